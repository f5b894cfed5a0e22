"""The exercises on the port to AMD, against the emulator and AMD's tables, and their notebook."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from labcore import hip
from labcore.exercises import CheckFailedError, student_seed
from labcore.exercises.running import Played
from labcore.exercises.topics.hip import (
    BROKEN,
    CHOOSE_TILE,
    CLINIC,
    HELD,
    MEND,
    PLACE_TILE,
    WARPS,
    WIDEN,
    emulated,
    run_shares,
)
from labcore.exercises.topics.hip.banks import COLUMNS
from labcore.exercises.topics.hip.clinic import LENGTHS, ROWS, TILE, Port
from labcore.exercises.topics.hip.fragments import INSTRUCTIONS
from labcore.exercises.topics.hip.tile import OTHERS
from labcore.hip import EmulationError
from labcore.hip.occupancy import occupancy
from tests.exercises.notebook import (
    check_changed_rule,
    complaints_about,
    solved,
    source,
    texts,
)

OWN = (PLACE_TILE, CHOOSE_TILE)
LAYOUT = Path(__file__).resolve().parents[2] / "hip" / "mfma_layout.json"


def test_students_have_their_own_numbers(seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(120)]
    for exercise, kinds in zip(OWN, (len(COLUMNS), len(OTHERS)), strict=True):
        assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])
        drawn = {tuple(exercise.variant(number).values()) for number in numbers}
        assert len(drawn) == kinds, exercise.id


# The wavefront -----------------------------------------------------------------------------------


def launched(text: str, wave: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    return [MEND.launch(text, wave, data) for data in MEND.data(seed)]


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("fault", ["", *MEND.wrong])
def test_the_models_are_what_the_emulator_computes(fault: str, seed: int) -> None:
    text = (MEND.wrong[fault][0] if fault else MEND.reference)(BROKEN)
    assert_same(launched(text, 64, seed), [MEND.model(data, fault) for data in MEND.data(seed)])


def test_a_vote_kept_in_32_bits_gets_a_hint_that_names_its_type(seed: int) -> None:
    text = MEND.reference(BROKEN).replace("unsigned long long above", "unsigned above")
    found = launched(text, 64, seed)
    assert_same(found, [MEND.model(data, "narrow count") for data in MEND.data(seed)])
    assert "the type that holds a vote" in MEND.wrong["narrow count"][1]


@pytest.mark.parametrize("name", ["warpSize", "__popc", "__popcll", "__shared__"])
def test_names_that_portable_h_lacks_are_said_in_the_text(name: str) -> None:
    source_folder = Path(hip.__file__).parent / "source"
    files = [path for path in source_folder.glob("cpu*.h") if path.name != "cpu_hip.h"]
    given = "".join(path.read_text("utf-8") for path in files)
    assert "__ballot" in given
    assert not re.search(rf"\b{name}\b", given)
    assert f"`{name}`" in source("hip").read_text("utf-8")


def test_the_right_model_is_sums_and_packed_values(seed: int) -> None:
    for data in MEND.data(seed):
        values = data["values"]
        sums, packed, counts = MEND.model(data, "")
        torch.testing.assert_close(sums.double(), values.double().sum(1))
        for row, count, front in zip(values, counts.tolist(), packed, strict=True):
            assert front[:count].tolist() == row[row > 0].tolist()
            assert set(front[count:].tolist()) <= {-1.0}


def test_the_broken_kernel_is_right_on_a_warp_of_32_lanes(seed: int) -> None:
    right = [MEND.model(data, "") for data in MEND.data(seed)]
    assert_same(launched(BROKEN, 32, seed), right)


@pytest.mark.parametrize("fault", ["", *WIDEN.wrong])
def test_the_models_of_any_width_are_what_the_emulator_computes(fault: str, seed: int) -> None:
    text = (WIDEN.wrong[fault][0] if fault else WIDEN.reference)(WARPS)
    for data in WIDEN.data(seed):
        assert_same(WIDEN.launch(text, 0, data), WIDEN.model(data, fault))


def test_the_kernel_for_warps_is_right_on_them_and_gives_odd_rows_a_neighbors_sum(
    seed: int,
) -> None:
    values = torch.rand(4, 90, generator=torch.Generator().manual_seed(seed)) + 0.5
    sums = values.sum(1, keepdim=True)
    torch.testing.assert_close(run_shares(WARPS, values, wave=32), values / sums)
    torch.testing.assert_close(run_shares(WARPS, values, wave=64), values / sums[[0, 0, 2, 2]])
    for wave in (32, 64):
        torch.testing.assert_close(
            run_shares(WIDEN.reference(WARPS), values, wave=wave), values / sums
        )
    narrow = WARPS.replace("__shfl(sum, 0)", "__shfl(sum, 0, 32)").replace(
        "__shfl_down(sum, step)", "__shfl_down(sum, step, 32)"
    )
    # Two rows per wavefront are right, too.
    assert WIDEN.check(lambda source: source and narrow, seed=seed).passed


KERNELS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "no text": (lambda _: 7, "wrong", "must be the kernel's source, a str, got 7"),
    "no C++": (lambda text: text + "\nnonsense", "wrong", "does not compile"),
    "another name": (
        lambda text: text.replace("row_positives", "rows"), "wrong", "got 'row_positives'",
    ),
    "out of bounds": (
        lambda text: text.replace("sums[row]", "sums[row + 7]"), "wrong", "is outside its",
    ),
    "a lane is missing": (
        lambda text: text.replace("sum = wave_sum(sum);", "if (lane < 9) sum = wave_sum(sum);"),
        "wrong",
        "takes no part",
    ),
    "endless": (
        lambda text: text.replace("step /= 2", "step /= 1"), "timeout", "did not end within",
    ),
    "crash": (
        lambda text: text.replace("int count = 0;", "int count = 0; __builtin_trap();"),
        "exit",
        "ended the process that ran it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_fails_is_told_and_harms_nobody(name: str, seed: int) -> None:
    change, kind, words = KERNELS[name]
    hasty = dataclasses.replace(MEND, timeout_s=4.0)
    outcome = hasty.check(lambda source: change(MEND.reference(source)), seed=seed)
    assert (outcome.passed, outcome.kind, outcome.mistake) == (False, kind, "")
    assert words in outcome.message


def test_without_a_compiler_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = MEND.check(MEND.reference)
    assert (outcome.passed, outcome.kind) == (False, "unavailable")
    assert outcome.message.startswith("Nothing was checked: CXX must name a C++ compiler")
    with pytest.raises(CheckFailedError, match="Nothing was checked"):
        outcome.require()


def test_a_cache_that_cannot_be_written_to_is_told(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def full(*_: Any, **__: Any) -> Played:
        return Played(answers=["the folder for built kernels must be writable, got /nowhere"])

    monkeypatch.setattr(emulated, "play", full)
    outcome = MEND.judge([BROKEN], seed=seed)
    assert outcome.kind == "unavailable" and "must be writable" in outcome.message


def test_banks_go_unchecked_when_the_emulator_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    PLACE_TILE.ready.cache_clear()  # type: ignore[attr-defined]
    outcome = PLACE_TILE.check(PLACE_TILE.reference)
    assert outcome.kind == "unavailable"


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("step = WAVE / 2;", "step = 32;", "the first step is that of 64 lanes"),
        ("const LaneMask above", "const unsigned above", ""),
    ],
)
def test_both_widths_are_graded(right: str, wrong: str, hint: str) -> None:
    complaints = complaints_about("hip", "mend", right, wrong)
    assert "both-waves-test" in complaints
    assert hint in complaints["both-waves-test"]
    assert ("mend-test" in complaints) == (not hint)


def test_a_source_that_is_left_as_it_is_gets_no_point() -> None:
    names = solved("hip")
    for cell in ("mend-test", "both-waves-test"):
        with pytest.raises(CheckFailedError, match="Nothing in it is mended"):
            exec(texts("hip")[cell], {**names, "mend": lambda source: source})


# Fragments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tile", "depth", "bits"), INSTRUCTIONS)
def test_registers_hold_what_amd_s_calculator_says(tile: int, depth: int, bits: int) -> None:
    name = f"{tile}x{tile}x{depth}_f{bits}"
    table = json.loads(LAYOUT.read_text("utf-8"))["instructions"][name]
    for matrix in "ABD":
        packed = 1 if matrix == "D" else 32 // bits
        for row, line in enumerate(table[matrix]):
            for column, (lane, item) in enumerate(line):
                shape = {"tile": tile, "depth": depth, "bits": bits}
                found = HELD.reference(matrix, lane, item // packed, **shape)
                assert len(found) == packed and found[item % packed] == (row, column)


# What the calculator prints for v_mfma_f32_16x16x32_fp8_fp8 and v_mfma_f32_32x32x16_fp8_fp8.
BYTES = [
    (("A", 16, 0, 16, 32), [(0, 8), (0, 9), (0, 10), (0, 11)]),
    (("A", 19, 1, 16, 32), [(3, 12), (3, 13), (3, 14), (3, 15)]),
    (("B", 16, 1, 32, 16), [(4, 16), (5, 16), (6, 16), (7, 16)]),
]


def test_the_answer_for_bytes_is_that_of_amd_s_calculator() -> None:
    held = solved("hip")["held"]
    for (matrix, lane, register, tile, depth), right in BYTES:
        assert held(matrix, lane, register, tile=tile, depth=depth, bits=8) == right


def test_each_element_lies_in_one_place() -> None:
    held = solved("hip")["held"]
    for tile, depth, bits in (*INSTRUCTIONS, (16, 32, 8), (32, 16, 8)):
        shape = {"tile": tile, "depth": depth, "bits": bits}
        counts = {"A": depth * tile * bits // 2048, "D": tile * tile // 64}
        for matrix, columns in (("A", depth), ("D", tile)):
            every = [
                place
                for lane, register in itertools.product(range(64), range(counts[matrix]))
                for place in held(matrix, lane, register, **shape)
            ]
            assert sorted(every) == [*itertools.product(range(tile), range(columns))]


def test_the_text_s_example_of_registers() -> None:
    shape = {"tile": 32, "depth": 8, "bits": 16}
    assert HELD.reference("A", 33, 1, **shape) == [(1, 6), (1, 7)]
    assert HELD.reference("B", 33, 1, **shape) == [(6, 1), (7, 1)]
    assert HELD.reference("D", 33, 5, **shape) == [(13, 1)]
    assert "Its register 5 holds (13, 1) of D." in source("hip").read_text("utf-8")


def test_byte_rule_is_graded_and_the_reference_fails_it(seed: int) -> None:
    check_changed_rule("hip", "bytes-test", "held", HELD, "Two elements of 8 bits", seed)


# Banks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "mistake"), [(8, "four words more"), (16, "two words more")])
def test_a_hint_fits_rows_that_are_turned_too(period: int, mistake: str, seed: int) -> None:
    cases = PLACE_TILE.numbered_cases(seed)
    row, column = torch.arange(64)[:, None], torch.arange(cases[0]["columns"])
    table = row * len(column) + (column ^ row % period)
    outcome = PLACE_TILE.judge([table[: case["rows"]] for case in cases], seed=seed)
    assert outcome.mistake == mistake
    assert outcome.message.startswith("Not yet. A column of yours stands in")


@pytest.mark.parametrize("columns", COLUMNS)
def test_layouts_without_conflicts_pass_however_they_are_made(columns: int, seed: int) -> None:
    cases = [{**case, "columns": columns} for case in PLACE_TILE.numbered_cases(seed)]
    right = [PLACE_TILE.reference(**case) for case in cases]
    column = torch.arange(columns)
    for layout in (
        lambda row: row * (columns + 7) + column,
        lambda row: row * columns + (column ^ row % 32),
        lambda row: (len(row) - 1 - row) * (columns + 3) + columns - 1 - column,
    ):
        given = [layout(torch.arange(case["rows"])[:, None]) for case in cases]
        assert PLACE_TILE.compare is not None and PLACE_TILE.compare(given, right, cases) is None


def lost(table: torch.Tensor) -> int:
    """By the rule of the text: 32 lanes at a time, a word a bank and cycle."""
    cycles = 0
    for half in table.flatten().split(32):
        words = half.unique()
        cycles += int((words % 32).bincount().max()) - 1
    return cycles


def test_the_emulator_counts_by_the_text_s_rule(seed: int) -> None:
    cases = PLACE_TILE.numbered_cases(seed, seed)
    for fn in (PLACE_TILE.reference, *(fn for fn, _ in PLACE_TILE.wrong.values())):
        for case in cases:
            table = fn(**case)
            complaint = PLACE_TILE.compare([table], [torch.zeros(0)], [case])  # type: ignore[misc]
            if complaint and "emulator counts" in complaint:
                said = f"counts {lost(table)} lost cycles when rows are written and {lost(table.T)}"
                assert said in complaint


def test_the_text_s_example_of_banks() -> None:
    row, column = torch.arange(64)[:, None], torch.arange(32)
    assert lost((32 * row + column).T) == 31 * 64
    assert "loses 31 cycles for each 32 lanes" in source("hip").read_text("utf-8")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("row * (columns + 1) + column", "There are no spare words"),
        ("row * columns + column", "a column in one bank"),
        ("row * columns + (column + row % 16) % columns", "every two have their words"),
        ("row * columns + column + row % 32", "the end of one lies in the next"),
    ],
)
def test_no_spare_words_are_graded(wrong: str, hint: str) -> None:
    right = "row * columns + (column ^ row % 32)"
    complaints = complaints_about("hip", "place_tile", right, wrong)
    assert set(complaints) == {"no-spare-test"}
    assert hint in complaints["no-spare-test"]


# A tile for gfx942 -------------------------------------------------------------------------------


def test_the_tile_has_its_waves_and_no_better_one_does(seed: int) -> None:
    for case in CHOOSE_TILE.numbered_cases(seed, seed)[:12]:
        able = {(0, 0): 0}
        lanes = 64 * case["waves"]
        for queries, keys in itertools.product(range(32, 257, 32), repeat=2):
            floats = torch.empty(queries, case["head_dim"], dtype=torch.float32, device="meta")
            scores = torch.empty(queries, keys, dtype=torch.float32, device="meta")
            rows = torch.empty(case["stages"], 2, keys, case["head_dim"] + 4, dtype=torch.float16,
                               device="meta")  # fmt: skip
            vgprs = case["other"] + (scores.nbytes + floats.half().nbytes) // (4 * lanes)
            agprs = floats.nbytes // (4 * lanes)
            if max(vgprs, agprs) <= 256:
                found = occupancy(
                    "gfx942", vgprs=vgprs, agprs=agprs, lds=rows.nbytes, threads=lanes
                )
                if found.waves_per_simd >= case["wanted"]:
                    able[queries, keys] = found.waves_per_simd
        best = max(able)
        assert CHOOSE_TILE.reference(**case) == (*best, able[best])


def test_the_text_s_example_of_a_tile() -> None:
    own = {"waves": 2, "stages": 1, "wanted": 2, "other": 40}
    assert CHOOSE_TILE.reference(128, **own) == (96, 32, 2)
    assert "40 other registers give (96, 32, 2)" in source("hip").read_text("utf-8")


def largest_area(head_dim: int, *, waves: int, stages: int, wanted: int, other: int) -> Any:
    """With the text's rule for ties: the most keys."""
    best = (0, 0, 0, 0)
    for queries, keys in itertools.product(range(32, 257, 32), repeat=2):
        part = queries / (64 * waves)
        vgprs, agprs = int(part * (keys + head_dim / 2)) + other, int(part * head_dim)
        if max(vgprs, agprs) <= 256:
            lds = 2 * stages * keys * (2 * head_dim + 8)
            found = occupancy("gfx942", vgprs=vgprs, agprs=agprs, lds=lds, threads=64 * waves)
            if found.waves_per_simd >= wanted:
                best = max(best, (queries * keys, keys, queries, found.waves_per_simd))
    return best[2], best[1], best[3]


def test_the_largest_area_is_known_with_the_text_s_rule_for_ties(seed: int) -> None:
    given = [largest_area(**case) for case in CHOOSE_TILE.numbered_cases(seed)]
    assert CHOOSE_TILE.judge(given, seed=seed).mistake == "largest area"


def test_the_mistakes_in_a_tile_show_for_every_width_of_a_head(seed: int) -> None:
    functions = {name: fn for name, (fn, _) in CHOOSE_TILE.wrong.items()}
    functions[""] = CHOOSE_TILE.reference
    shapes = [
        {"waves": waves, "stages": stages, "wanted": wanted}
        for waves, stages, wanted in itertools.product((1, 2, 4), (1, 2), (1, 2, 3))
    ]
    other = random.Random(seed).choice(OTHERS)  # all of them take 5 s
    found = {
        (name, dim): tuple(fn(head_dim=dim, **shape, other=other) for shape in shapes)
        for name, fn in functions.items()
        for dim in (64, 80, 96, 112, 128)
    }
    for pair in itertools.combinations((80, 96, 112, 128), 2):
        seen = {tuple(found[name, dim] for dim in (64, *pair)) for name in functions}
        assert len(seen) == len(functions), (other, pair)


# The clinic --------------------------------------------------------------------------------------


def test_what_the_symptoms_say_of_the_curves() -> None:
    names = {"healthy": "healthy", **CLINIC.diagnoses()}
    seen = {
        names[label]: [dict(zip(LENGTHS, curve, strict=True)) for curve in panels.values()]
        for label, panels in CLINIC.patients().items()
    }
    error, cycles, segments = seen.pop("healthy")
    assert not any(error.values()) and not any(cycles.values())
    for name, ends in (
        ("the upper half of the lanes is never added", -0.5),
        ("the vote is kept in 32 bits", 1.0),
    ):
        wrong, *counted = seen[name]
        assert counted == [cycles, segments]
        assert all((wrong[length] * ends > 0) == (length > TILE // 2) for length in LENGTHS)
        assert wrong[TILE] == wrong[2 * TILE] == ends
    banked = seen["rows of LDS lie 64 words apart"]
    assert banked[0] == error and banked[2] == segments and min(banked[1].values()) > 0
    scattered = seen["neighboring lanes load from different rows"]
    assert scattered[:2] == [error, cycles]
    assert all(scattered[2][length] > 1.9 * segments[length] for length in LENGTHS)
    for curve, healthy in zip(
        seen["lanes without a column leave at once"], (error, cycles, segments), strict=True
    ):
        for length in LENGTHS:
            stopped = length < TILE
            assert math.isnan(curve[length]) == stopped
            assert stopped or curve[length] == healthy[length]


def test_the_lanes_that_left_are_missed_at_the_barrier() -> None:
    with pytest.raises(EmulationError, match="returned, and thread .* waits at the barrier"):
        Port(leave_early=True).run(TILE - 1)


def test_a_healthy_port_reads_each_segment_of_a_row_once() -> None:
    _, lost_cycles, segments = Port().run(TILE)
    assert lost_cycles == 0
    assert segments == ROWS * TILE * 4 // 64 + 2  # and 32 means are written, two segments
