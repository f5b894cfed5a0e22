"""The exercises on attention in tiles, by other ways to the same numbers, and their notebook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from labcore.exercises import student_seed
from labcore.exercises.topics.attention import (
    ADD_TILE,
    CLINIC,
    COUNT_TILES,
    LARGEST_TILE,
    MERGE_PARTS,
)
from labcore.exercises.topics.attention.clinic import KEYS, TILE, Stream
from labcore.exercises.topics.attention.tiles import BLOCKS
from tests.exercises.notebook import check_changed_rule, complaints_about, source, texts

OWN = (ADD_TILE, COUNT_TILES, LARGEST_TILE)


def test_students_have_their_own_numbers(seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(120)]
    for exercise, kinds in zip(OWN, (6, 15, 8), strict=True):
        assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])
        drawn = {tuple(exercise.variant(number).values()) for number in numbers}
        assert kinds <= len(drawn), exercise.id


# One more tile -----------------------------------------------------------------------------------


def test_tile_after_tile_is_one_softmax(generator: torch.Generator) -> None:
    base, shape = 3.0, (4, 53)
    scores = 5 * torch.randn(shape, generator=generator, dtype=torch.float64) + 800
    scores[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    scores[0] = -torch.inf
    values = torch.randn(53, 2, generator=generator, dtype=torch.float64)
    top = torch.full((4,), -torch.inf, dtype=torch.float64)
    state = top, torch.zeros_like(top), torch.zeros(4, 2, dtype=torch.float64)
    for tile in torch.arange(53).split(8):
        state = ADD_TILE.reference(*state, scores[:, tile], values[tile], base=base)
    top, total, mean = state
    wide = scores[1:] * math.log(base)
    torch.testing.assert_close(mean[1:], wide.softmax(1) @ values)
    torch.testing.assert_close((top + total.log() / math.log(base))[1:],
                               wide.logsumexp(1) / math.log(base))  # fmt: skip
    torch.testing.assert_close(top, scores.amax(1))
    assert (top[0], total[0]) == (-torch.inf, 0) and not mean[0].any()


def test_the_text_s_example_of_a_tile() -> None:
    given = [[3.0], [1.0], [[10.0]], [[5.0]], [[20.0]]]
    state = ADD_TILE.reference(*map(torch.tensor, given), base=2.0)
    assert [one.item() for one in state] == [5, 1.25, 18]
    assert "Its top becomes 5, its total 1.25 and its mean 18" in source("attention").read_text()


# Parts of the keys -------------------------------------------------------------------------------


def by_keys(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to base 2; NaN and -inf for a row without keys."""
    wide = scores * math.log(2)
    return wide.softmax(1) @ values, wide.logsumexp(1) / math.log(2)


def test_merged_parts_are_attention_over_all_keys(generator: torch.Generator) -> None:
    scores = 4 * torch.randn(5, 37, generator=generator, dtype=torch.float64)
    scores[torch.rand(5, 37, generator=generator) < 0.4] = -torch.inf
    scores[2] = -torch.inf
    values = torch.randn(37, 3, generator=generator, dtype=torch.float64)
    parts = torch.arange(37).split([1, 9, 2, 25])
    found = [by_keys(scores[:, part], values[part]) for part in parts]
    out, lse = (torch.stack(one) for one in zip(*found, strict=True))
    assert out[:, 2].isnan().all()
    came = MERGE_PARTS.reference(out, lse, torch.ones(4))
    right = by_keys(scores, values)
    assert not came[0][2].any() and came[1][2] == -torch.inf
    seen = torch.tensor([0, 1, 3, 4])
    for one, other in zip(came, right, strict=True):
        torch.testing.assert_close(one[seen], other[seen])


def test_a_shift_that_is_not_the_largest_is_refused(seed: int) -> None:
    given = []
    for case in MERGE_PARTS.numbered_cases(seed):
        finite = case["lse"].masked_fill(case["lse"] == -torch.inf, torch.nan)
        shift = finite.nanmean(0).nan_to_num(0.0)
        weights = (case["lse"] - shift).exp2()
        out = (weights[..., None] * case["out"].nan_to_num(0.0)).sum(0)
        total = weights.sum(0)
        given.append((out / total.masked_fill(total == 0, 1.0)[:, None], shift + total.log2()))
    assert "in case 6 of 6" in MERGE_PARTS.judge(given, seed=seed).message


def test_the_text_s_example_of_parts() -> None:
    parts = torch.tensor([[[0.0]], [[6.0]]]), torch.tensor([[1.0], [2.0]]), torch.ones(2)
    out, lse = MERGE_PARTS.reference(*parts)
    assert out.item() == pytest.approx(4) and f"{lse.item():.2f}" == "2.58"


# Tiles -------------------------------------------------------------------------------------------


def by_pairs(case: dict[str, Any]) -> tuple[int, int, int]:
    rows, keys = torch.arange(case["queries"])[:, None], torch.arange(case["keys"])
    late = case["alignment"] == "bottom_right"
    seen = keys <= rows + (case["keys"] - case["queries"] if late else 0)
    kinds = [0, 0, 0]
    for band in seen.split(case["block_q"]):
        for tile in band.split(case["block_k"], dim=1):
            kinds[0 if tile.all() else 1 if tile.any() else 2] += 1
    return kinds[0], kinds[1], kinds[2]


def test_tiles_are_those_of_the_mask(seed: int) -> None:
    *cases, long = COUNT_TILES.numbered_cases(seed, seed)
    for case in cases:
        assert COUNT_TILES.reference(**case) == by_pairs(case)
    assert long["queries"] * long["keys"] > 2**32  # bytes of a mask, twice what a check has


def test_the_text_s_example_of_tiles() -> None:
    example = COUNT_TILES.reference(5, 7, block_q=2, block_k=3, alignment="bottom_right")
    assert example == (5, 2, 2)
    assert "There are 9 tiles: 5 whole, 2 masked, 2 skipped." in source("attention").read_text()


def test_the_mistakes_in_tiles_show_for_every_pair_of_blocks(seed: int) -> None:
    for block_q in BLOCKS:
        for block_k in set(BLOCKS) - {block_q}:
            own = {"block_q": block_q, "block_k": block_k}
            cases = [{**case, **own} for case in COUNT_TILES.cases(seed)]
            right = [COUNT_TILES.reference(**case) for case in cases]
            made = [tuple(fn(**case) for case in cases) for fn, _ in COUNT_TILES.wrong.values()]
            assert len({tuple(right), *made}) == 1 + len(made), own


# A tile for a memory -----------------------------------------------------------------------------


def tile_bytes(keys: int, case: dict[str, Any]) -> int:
    """Array by array."""
    width = next(2**n for n in range(12) if 2**n >= case["head_dim"])
    rows, item = keys * case["ratio"], case["itemsize"]
    held = [torch.empty(rows, width, item), torch.empty(2, case["stages"], keys, width, item)]
    held += [torch.empty(rows, keys, 4), torch.empty(rows, width, 4), torch.empty(rows, 2, 4)]
    return sum(array.numel() for array in held)


def test_the_tile_fits_and_no_larger_one_does(seed: int) -> None:
    found = set()
    for case in LARGEST_TILE.numbered_cases(seed, seed):
        keys, size = LARGEST_TILE.reference(**case)
        found.add(keys)
        assert size == (tile_bytes(keys, case) if keys else 0) <= case["sram"]
        assert tile_bytes(2 * keys if keys else 16, case) > case["sram"]
    assert {0, 16, 32} <= found <= {0, 16, 32, 64, 128, 256}


def test_the_text_s_example_of_a_memory() -> None:
    own = {"head_dim": 64, "itemsize": 2, "ratio": 2, "stages": 3}
    assert LARGEST_TILE.reference(49_152, **own) == (16, 26_880)
    assert LARGEST_TILE.reference(57_856, **own) == (32, 57_856)
    assert LARGEST_TILE.reference(57_855, **own) == (16, 26_880)


# The clinic --------------------------------------------------------------------------------------


def test_what_the_symptoms_say_of_the_curves() -> None:
    names = {"healthy": "healthy", **CLINIC.diagnoses()}
    seen = {names[label]: list(panels.values()) for label, panels in CLINIC.patients().items()}
    output, error, late = seen.pop("healthy")
    assert set(output) == {1.0} and not any(error) and not any(late)
    assert not any(any(curves[2]) for name, curves in seen.items() if "rescaled" in name)
    names_of_three = "nothing is rescaled", "the sums are not rescaled", "the total is not rescaled"
    alike, grown, shrunk = (seen[name] for name in names_of_three)
    assert set(alike[0]) == {1.0} and alike[1] == shrunk[1] == sorted(alike[1])
    assert alike[1][-1] > 1 and shrunk[0][-1] < 0.5
    assert grown[0] == sorted(grown[0]) and grown[0][-1] > 2 and not any(grown[1])
    for name, sign in (("empty places are counted", 1), ("a short last tile is left out", -1)):
        for keys, at_error, at_late in zip(KEYS, *seen[name][1:], strict=True):
            whole = keys % TILE == 0
            assert whole == (at_error == 0) == (at_late == 0)
            assert sign * at_error >= 0
    empty, short = seen["empty places are counted"], seen["a short last tile is left out"]
    assert max(empty[1]) == empty[1][1] > 20 * empty[1][-8] > 0  # right behind a multiple
    assert min(short[1][-8:]) == short[1][-2] < -0.5  # right before one
    assert set(short[0]) == {1.0}


def test_a_healthy_stream_is_attention(generator: torch.Generator) -> None:
    scores = 9 * torch.randn(21, generator=generator, dtype=torch.float64)
    values = torch.randn(21, generator=generator, dtype=torch.float64)
    out, lse = Stream().attend(scores.tolist(), values.tolist())
    assert out == pytest.approx((scores.softmax(0) @ values).item())
    assert lse == pytest.approx(scores.logsumexp(0).item())


# The notebook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("    heard", "    count = torch.ones_like(count)\n    heard", "Every part counts once"),
        ("count[:, None] * 2 **", "count[:, None].abs() * 2 **", "It is to be taken away"),
        ("count[:, None] * 2 **", "count[:, None].clamp(min=0) * 2 **", "left out altogether"),
        ("top + total.log2()", "top + (2 ** (lse - top)).sum(0).log2()", "its logarithm does not"),
        ("torch.where(count[:, None] == 0, -torch.inf, lse)", "lse", "has a say in what is taken"),
        (
            "torch.where(total == 0, 1.0, total)",
            "torch.where((lse == -torch.inf).all(0), 1.0, total)",
            "sees no key at all",
        ),
    ],
)
def test_the_changed_rule_is_graded(right: str, wrong: str, hint: str) -> None:
    complaints = complaints_about("attention", "merge_parts", right, wrong)
    assert set(complaints) == {"counted-parts-test"}
    assert hint in complaints["counted-parts-test"]


def test_the_reference_does_not_know_the_changed_rule(seed: int) -> None:
    check_changed_rule(
        "attention",
        "counted-parts-test",
        "merge_parts",
        MERGE_PARTS,
        "Every part counts once",
        seed,
    )


def test_counts_make_one_of_keys_that_two_have_seen(generator: torch.Generator) -> None:
    scores = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    values = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in ("imports", "merge-parts"):
        exec(texts("attention")[name], names)
    parts = [[*range(5), *range(5, 12)], [*range(5), *range(12, 20)], [*range(5)]]
    found = [by_keys(scores[:, part], values[part]) for part in parts]
    out, lse = (torch.stack(one) for one in zip(*found, strict=True))
    count = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(names["merge_parts"](out, lse, count), by_keys(scores, values))
