"""The clocks of a loop: hand-made bodies whose time is known, and laws for random ones."""

import itertools
import random

import pytest

from labcore.compile_only.pipeline import Loop, blocks_per_sm, inner_loop, timeline
from tests.compile_only.test_hazards import sass

# 64 x 128 x 16: 64 clocks of a part's matrix unit. The left operand comes from registers.
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
WAIT_FOR_OLDER = "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
EXPS = [f"MUFU.EX2 R{n}, R{n} ;" for n in range(100, 116)]  # 8 clocks each, independent
LAST = 8  # a product starts while the last exponential still runs
BACK = "@P0 BRA `(.L_x_1) ;"


def walked(*lines: str, warps: int = 4, blocks: int = 1) -> Loop:
    loop = inner_loop(sass(".L_x_1:", *lines, BACK, "EXIT ;"), warps=warps, blocks=blocks)
    assert loop is not None
    return loop


def test_a_wait_keeps_products_and_exponentials_apart() -> None:
    loop = walked(PRODUCT, WAIT, *EXPS)
    assert loop.busy == {"exp": 128, "issue": 19, "matrix": 64}
    assert 192 - LAST <= loop.clocks[0] == loop.clocks[1] <= 192 + LAST
    assert walked(PRODUCT, *EXPS, WAIT).clocks[0] <= 128 + LAST  # the product runs meanwhile


def test_a_wait_may_leave_the_newest_product_running() -> None:
    assert walked(PRODUCT, PRODUCT, WAIT, *EXPS).clocks[0] >= 256 - LAST
    assert walked(PRODUCT, PRODUCT, WAIT_FOR_OLDER, *EXPS).clocks[0] < 200


def test_a_second_warp_fills_the_gaps_unless_a_barrier_keeps_them_together() -> None:
    two = walked(PRODUCT, WAIT, *EXPS, warps=8)
    assert two.busy["matrix"] == 128 and two.busy["exp"] == 256
    assert 256 <= two.clocks[0] <= two.clocks[1] < 128 + 256
    step = ("BAR.SYNC.DEFER_BLOCKING 0x0 ;", PRODUCT, WAIT, "BAR.SYNC.DEFER_BLOCKING 0x0 ;")
    together = walked(*step, *EXPS, warps=8)
    assert min(together.clocks) >= 128 + 256 - LAST
    apart = walked(*step, *EXPS, blocks=2)  # blocks don't wait for each other
    assert max(apart.clocks) < min(together.clocks)


def test_a_result_is_awaited_where_it_is_read() -> None:
    chain = [f"FADD R{n + 1}, R{n}, R4 ;" for n in range(100, 120)]
    apart = [f"FADD R{n + 1}, R4, R5 ;" for n in range(100, 120)]
    clocks = [walked(*lines, PRODUCT, WAIT).clocks[0] for lines in (chain, apart)]
    assert clocks[0] - clocks[1] == 19 * 3  # a sum is ready after 4 clocks


def test_narrow_products_wait_for_shared_memory() -> None:
    narrow = "HGMMA.64x32x16.F32.BF16 R24, {}, R24, gsb0 ;"
    from_registers = walked(narrow.format("R8, gdesc[UR4]"), WAIT)
    assert from_registers.busy["matrix"] == 16  # 64 * 32 * 16 products, 2,048 per clock
    both_shared = walked(narrow.format("gdesc[UR4]"), WAIT)
    assert both_shared.busy["matrix"] == 24  # (64 + 32) * 16 * 2 bytes, 128 per clock


def test_the_loop_without_a_mask_is_taken_and_retries_are_not() -> None:
    masked = [PRODUCT, *["FSEL R1, R2, R3, P1 ;"] * 20, WAIT]
    before = ["FADD R1, R2, R3 ;"] * 9
    lines = [
        *(".L_x_1:", *masked, "@P0 BRA `(.L_x_1) ;"),
        *(
            ".L_x_2:",
            *before,
            "@!P1 BRA `(.L_x_9) ;",
            ".L_x_3:",
            PRODUCT,
            WAIT,
            "@P0 BRA `(.L_x_2) ;",
        ),
        *("EXIT ;", ".L_x_9:", "@!P1 BRA `(.L_x_9) ;", "BRA `(.L_x_3) ;"),
    ]
    loop = inner_loop(sass(*lines), warps=4, blocks=1)
    assert loop is not None and loop.busy["issue"] == 13 and loop.busy["matrix"] == 64
    assert inner_loop(sass("FADD R1, R2, R3 ;", "EXIT ;"), warps=4, blocks=1) is None


@pytest.mark.parametrize("number", range(20))
def test_no_unit_works_longer_than_the_loop_takes(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    lines = [
        *EXPS,
        *(f"FFMA R{n}, R{n + 1}, R{n + 2}, R9 ;" for n in range(100, 130)),
        *(f"FMNMX R{n}, R{n + 1}, R{n}, !PT ;" for n in range(100, 110)),
        "LDS.128 R140, [R3] ;",
        "SHFL.BFLY PT, R141, R100, 0x2, 0x1f ;",
        "HMMA.16816.F32.BF16 R144, R100, R104, R144 ;",
        "BAR.SYNC.DEFER_BLOCKING 0x0 ;",
        *[PRODUCT] * 4,
        *[WAIT, WAIT_FOR_OLDER],
    ]
    body = [PRODUCT, *(rng.choice(lines) for _ in range(rng.randint(5, 60))), WAIT_FOR_OLDER]
    warps, blocks = rng.choice((4, 8, 16)), rng.randint(1, 3)
    loop = walked(*body, warps=warps, blocks=blocks)
    alone = walked(*body)
    # An iteration's products may be pending before and after the 8 that count.
    pending = loop.busy["matrix"] / 8
    assert max(loop.busy.values()) <= min(loop.clocks) + pending + 1
    serial = max(*alone.clocks, *alone.busy.values()) * (warps // 4) * blocks
    assert max(loop.clocks) <= serial * 1.25 + 1  # turns may cost a little, as they do here
    assert loop.busy["matrix"] == pytest.approx(alone.busy["matrix"] * warps // 4 * blocks, 0.01)


def test_blocks_share_registers_and_memory() -> None:
    assert blocks_per_sm(warps=4, registers=128, shared=1024) == 4
    assert blocks_per_sm(warps=4, registers=129, shared=1024) == 3
    assert blocks_per_sm(warps=8, registers=40, shared=75 * 1024) == 3
    assert blocks_per_sm(warps=16, registers=32, shared=0) == 4


def test_a_timeline_has_all_work_of_its_iterations() -> None:
    code = sass(".L_x_1:", PRODUCT, WAIT, *EXPS, BACK, "EXIT ;")
    for warps, fair in ((4, False), (8, False), (8, True)):
        loop = inner_loop(code, warps=warps, blocks=1)
        clocks, spans = timeline(code, warps=warps, blocks=1, fair=fair, iterations=3)
        assert loop is not None and clocks == 3 * loop.clocks[fair]
        assert min(span.start for span in spans) == 0
        assert {span.warp for span in spans} == set(range(warps // 4))
        for unit in ("matrix", "exp"):
            work = sum(span.end - span.start for span in spans if span.unit == unit)
            assert abs(work - 3 * loop.busy[unit]) <= loop.busy[unit] / 2  # at both ends
            ends = sorted((one.start, one.end) for one in spans if one.unit == unit)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))  # one at a time


def test_a_kernel_without_a_loop_has_no_timeline_and_one_that_does_not_fit_no_clocks() -> None:
    with pytest.raises(ValueError, match="a timeline needs a loop with matrix products"):
        timeline(sass(PRODUCT, "EXIT ;"), warps=4, blocks=1, fair=False)
    code = sass(".L_x_1:", PRODUCT, WAIT, BACK, "EXIT ;")
    assert inner_loop(code, warps=4, blocks=0) is None
