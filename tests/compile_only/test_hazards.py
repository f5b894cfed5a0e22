"""Registers that a pending matrix instruction uses: found on every path, and only there."""

import pytest

from labcore.compile_only.hazards import pending_writes

START = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def sass(*lines: str) -> str:
    """Text as nvdisasm prints it; a line that ends in a colon is a label."""
    found, at = [], 0
    for line in lines:
        if line.endswith(":"):
            found.append(line)
        else:
            found.append(f"        /*{at:04x}*/                   {line}")
            at += 16
    return "\n".join(found)


@pytest.mark.parametrize(
    ("line", "register"),
    [
        ("FADD R24, R1, R2 ;", "R24"),
        ("FADD R31, R1, R2 ;", "R31"),  # 64 x 16 sums are 8 registers of a thread
        ("@P0 FADD R25, R1, R2 ;", "R25"),
        ("@!P0 LDS.128 R22, [R4] ;", "R24, R25"),
        ("LDSM.16.M88.4 R21, [R4] ;", "R24"),
        ("IMAD.WIDE R30, R1, R2, R4 ;", "R30, R31"),
        ("SHFL.BFLY PT, R26, R3, 0x2, 0x1f ;", "R26"),
        ("LDG.E.64 R23, desc[UR4][R2.64] ;", "R24"),
    ],
)
def test_a_write_of_a_pending_sum_is_named(line: str, register: str) -> None:
    (wrong,), _ = pending_writes(sass(START, line, WAIT, "EXIT ;"))
    assert f"writes {register}, to which" in wrong
    assert pending_writes(sass(START, WAIT, line, "EXIT ;")) == ([], None)
    assert pending_writes(sass(line, START, WAIT, "EXIT ;")) == ([], None)


@pytest.mark.parametrize(
    "line",
    [
        "FADD R32, R24, R2 ;",
        "STS.128 [R24], R24 ;",
        "ISETP.GE.AND P0, PT, R24, R25, PT ;",
        "LDS.128 R20, [R24] ;",
        "STG.E desc[UR4][R24.64], R25 ;",
    ],
)
def test_a_read_or_a_neighbor_is_no_write(line: str) -> None:
    assert pending_writes(sass(START, line, WAIT, "EXIT ;")) == ([], None)


def test_the_soonest_write_of_the_left_operand_is_counted() -> None:
    more = ("MOV R1, R2 ;", "MOV R12, R1 ;", "MOV R11, R1 ;", "MOV R8, R1 ;")
    assert pending_writes(sass(START, *more, WAIT, "EXIT ;")) == ([], 3)
    shared = START.replace("R8, gdesc", "gdesc[UR8], gdesc")
    assert pending_writes(sass(shared, *more, WAIT, "EXIT ;")) == ([], None)


def test_a_wait_may_leave_the_newest_groups_pending() -> None:
    second = START.replace("R24", "R40")
    partly = WAIT.replace("0x0", "0x1")
    write, other = "MOV R24, R1 ;", "MOV R40, R1 ;"
    assert pending_writes(sass(START, second, partly, write, WAIT, "EXIT ;"))[0] == []
    assert len(pending_writes(sass(START, second, partly, other, WAIT, "EXIT ;"))[0]) == 1
    # Without gsb0, the first belongs to the second's group.
    chained = START.replace(", gsb0", "")
    assert len(pending_writes(sass(chained, second, partly, write, WAIT, "EXIT ;"))[0]) == 1


def test_paths_through_a_loop_are_followed() -> None:
    loop = (".L_x_1:", "MOV R24, R1 ;", WAIT, START, "@!P0 BRA `(.L_x_1) ;", WAIT, "EXIT ;")
    assert len(pending_writes(sass(*loop))[0]) == 1
    waited = (".L_x_1:", WAIT, "MOV R24, R1 ;", START, "@!P0 BRA `(.L_x_1) ;", WAIT, "EXIT ;")
    assert pending_writes(sass(*waited)) == ([], None)
    jumped = (START, "BRA `(.L_x_2) ;", "MOV R24, R1 ;", ".L_x_2:", WAIT, "EXIT ;")
    assert pending_writes(sass(*jumped)) == ([], None)
    perhaps = (START, "BRA P0, `(.L_x_2) ;", "MOV R24, R1 ;", ".L_x_2:", WAIT, "EXIT ;")
    assert len(pending_writes(sass(*perhaps))[0]) == 1


def test_a_kernel_without_them_has_none() -> None:
    assert pending_writes("") == ([], None)
    assert pending_writes(sass("MOV R1, R2 ;", "EXIT ;")) == ([], None)
