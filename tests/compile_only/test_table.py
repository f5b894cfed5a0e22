"""The committed table is that of today's kernels, and what it says stays true."""

import ast
import copy
from importlib.metadata import version
from pathlib import Path

import pytest

import labcore
from labcore import compile_only, device
from labcore.attention.configs import DESCRIBED, FORWARD, KEYS, QUERIES
from labcore.compile_only import TARGETS
from labcore.compile_only.__main__ import main

pytest.importorskip("triton", reason=device.triton_problem() or "Triton")

ATTENTION = ("forward_kernel", "described_kernel", "dkdv_kernel", "dq_kernel")
TABLE = Path(__file__).parent.parent / "kernel_resources.json"


@pytest.fixture(scope="module")
def table() -> dict:
    return compile_only.read(TABLE)


@pytest.mark.long
def test_the_gated_programs_need_no_more_than_the_table(table) -> None:
    found = compile_only.measure(gated=True)
    assert compile_only.problems(found, table) == []
    assert sum(len(targets) for targets in found.values()) <= 120
    assert {target for targets in found.values() for target in targets} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_has_exactly_the_programs_that_are_launched(table, target: str) -> None:
    with compile_only.compilers() as pool:
        launched = pool.submit(compile_only.names, target).result()
    assert set(launched) == {name for name, row in table["kernels"].items() if target in row}


def test_every_kernel_is_in_the_table(table) -> None:
    defined, called = set(), set()
    for path in Path(labcore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(one) for one in node.decorator_list
            ):
                defined.add(node.name)
                calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
                called |= {one.id for one in calls if isinstance(one, ast.Name)}
    assert len(defined) > 20
    assert {name.split("/")[0] for name in table["kernels"]} == defined - called


def test_attention_in_16_bits_neither_spills_nor_waits(table) -> None:
    seen = 0
    for name, targets in table["kernels"].items():
        kernel, _, case = name.partition("/")
        dtype, dim, *_ = case.split("-")
        if kernel in ATTENTION and "float16" in dtype:
            for target, need in targets.items():
                assert need["warnings"] == [], (name, target)
                if dim in ("d64", "d128"):
                    assert need["spills"] == 0, (name, target)
                    units = {"sm_90": "wgmma", "sm_100": "tcgen05"}
                    unit = units.get(target, "mma" if target[:2] == "sm" else "mfma")
                    assert need["unit"] == unit, (name, target)
                    seen += 1
    assert seen > 60 * len(TARGETS)


def test_the_loop_that_is_timed_has_all_products_of_a_tile(table) -> None:
    """A shorter loop, such as the end of a tile, would be timed too fast."""
    kernels = {
        "forward_kernel": (FORWARD, 2),
        "described_kernel": ({dim: {"hopper": tile} for dim, tile in DESCRIBED.items()}, 2),
        "dkdv_kernel": (KEYS, 4),
        "dq_kernel": (QUERIES, 3),
    }
    seen = 0
    for name, targets in table["kernels"].items():
        kernel, _, case = name.partition("/")
        parts = case.split("-")
        if kernel not in kernels or "float16" not in case or parts[1] not in ("d64", "d128"):
            continue
        if "sm_90" not in targets:  # a program of AMD's GPUs alone
            continue
        loop = targets["sm_90"]["loop"]
        tiles, products = kernels[kernel]
        dim = int(parts[1][1:])
        tile = tiles[dim]["tree" if "tree" in parts else "hopper"]
        work = (products + ("fused" in parts)) * tile.m * tile.n * dim  # multiply-adds
        least = work / 2048 * loop["blocks"]
        # Narrow tiles wait for shared memory.
        assert least <= loop["busy"]["matrix"] <= 4 * least, name
        assert loop["busy"]["exp"] >= tile.m * tile.n / 16 * loop["blocks"], name
        assert max(loop["busy"].values()) <= 1.02 * loop["clocks"][0], name
        seen += 1
    assert seen > 60


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_decoding_keeps_two_blocks_of_keys_in_flight_and_a_third_at_hand(table, target) -> None:
    rows = {
        name: row[target]
        for name, row in table["kernels"].items()
        if name.startswith("decode_kernel/") and "/float32-" not in name and target in row
    }
    assert len(rows) > 10
    fewest = 2 if target == "sm_89" else 3
    for name, need in rows.items():
        if "-tree" not in name:  # the loop over a tree's own keys, its last few, has one
            assert need["buffers"] >= fewest, name


def one(**changes) -> compile_only.Resources:
    need = {
        **{"registers": 40, "spills": 0, "shared": 1024, "matrix": 4, "unit": "wgmma"},
        **{"buffers": 2, "reuse": 20, "warnings": []},
    }
    return {"k/case": {"sm_89": {**need, **changes}}}


@pytest.fixture
def ours(table) -> dict:
    return {"triton": version("triton"), "source": table["source"], "kernels": one()}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spills": 8}, "8 spills, but the table has 0"),
        ({"registers": 43}, "43 registers, but the table has 40"),
        ({"shared": 1076}, "1076 shared, but the table has 1024"),
        ({"unit": ""}, "matrix unit none, but the table has wgmma"),
        ({"unit": "mma"}, "matrix unit mma, but the table has wgmma"),
        ({"buffers": 1}, "1 tiles in flight, but the table has 2"),
        ({"reuse": 19}, "a register is reused after 19 instructions, not 20"),
        ({"warnings": ["C7511 wgmma serialized"]}, "a fault: C7511"),
    ],
)
def test_a_program_that_needs_more_is_named(ours, changes, sentence: str) -> None:
    assert compile_only.problems(one(), ours) == []
    (wrong,) = compile_only.problems(one(**changes), ours)
    assert wrong.startswith("k/case on sm_89: ") and sentence in wrong


def test_better_passes_and_so_does_growth_below_five_percent(ours) -> None:
    assert compile_only.problems(one(registers=42, shared=1075), ours) == []
    assert compile_only.problems(one(registers=20, buffers=3, reuse=None), ours) == []


def test_a_block_that_the_target_cannot_hold_is_named(ours) -> None:
    ours["kernels"] = one(shared=101_000)
    assert compile_only.problems(one(shared=101_376), ours) == []
    (wrong,) = compile_only.problems(one(shared=101_377), ours)
    assert "101377 bytes of shared memory" in wrong and " 101376; use a" in wrong


def test_a_program_outside_the_table_is_named(ours) -> None:
    (wrong,) = compile_only.problems({"k/other": one()["k/case"]}, ours)
    assert wrong.startswith("k/other on sm_89: not in the table")


def test_a_table_of_other_kernels_is_named(ours) -> None:
    (wrong,) = compile_only.problems(one(), {**ours, "source": "0" * 16})
    assert "the kernels have changed" in wrong


def test_another_triton_may_need_other_registers_but_not_spill(ours) -> None:
    other = {**ours, "triton": "0.0"}
    assert compile_only.problems(one(registers=60, shared=2000, buffers=1, reuse=1), other) == []
    assert len(compile_only.problems(one(spills=4), other)) == 1


def test_a_table_is_read_as_it_was_written(tmp_path: Path, ours) -> None:
    compile_only.write(copy.deepcopy(ours["kernels"]), tmp_path / "table.json")
    assert compile_only.read(tmp_path / "table.json") == ours


def test_a_part_is_not_written_over_the_table(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--targets", "sm_80", "--write", str(TABLE)])
    assert "--write needs all programs and targets" in capsys.readouterr().err
