"""What all wrong answers have in common is said, and nothing where they have nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from labcore.exercises.laws import law

WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sign": (lambda x: -x, "The result has the opposite sign in every case"),
    "factor": (lambda x: 2.5 * x, "The result is 2.5 times what it must be, in every case"),
    "factor below 0": (lambda x: x * -0.5, "The result is -0.5 times what it must be"),
    "too large": (lambda x: x + 3, "The result is too large by 3 in every case"),
    "too small": (lambda x: x - 0.25, "The result is too small by 0.25 in every case"),
    "reverse": (lambda x: x.flip(0), "The result has the right numbers in reverse order"),
    "order": (lambda x: x.roll(1, 0), "The result has the right numbers in another order"),
    "first": (lambda x: torch.cat([0 * x[:1], x[1:]]), "The result is wrong only at index 0"),
    "last": (lambda x: torch.cat([x[:-1], 9 + x[-1:]]), "The result is wrong only at its last"),
    "nothing": (lambda x: x**3 + x, ""),
    "a shape": (lambda x: x[None], ""),
    "a NaN": (lambda x: torch.where(x == x.max(), torch.nan, x), ""),
    "rounding": (lambda x: x * (1 + 1e-9), ""),
}
SHAPES = ((5,), (4, 1), (3, 2, 7))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_law_is_found_whatever_the_shapes(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    change, words = WRONG[name]
    right = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    told = law([change(one) for one in right], right)
    assert told.startswith(words) and bool(told) == bool(words)
    arrays = [change(one).numpy() for one in right], [one.numpy() for one in right]
    assert law(*arrays) == told
    # A case with a NaN in the right answer does not count.
    spoiled = [*right, torch.tensor([torch.nan])]
    assert law([*map(change, right), torch.ones(1)], spoiled) == told


def test_numbers_over_all_cases_have_a_law_and_single_parts_too() -> None:
    right = [3, 7, 4, 12]
    assert law([one + 1 for one in right], right) == "The result is too large by 1 in every case"
    assert law([one * 1.5 for one in right], right).startswith("The result is 1.5 times")
    assert law([3, 7, 4, 13], right) == ""
    pairs = [(one, one / 2) for one in right]
    wrong = [(one, -half) for one, half in pairs]
    words = "has the opposite sign in every case"
    assert law(wrong, pairs, ("step", "half")) == f"The returned half {words}"
    assert law(wrong, pairs) == f"Result 2 {words}"
    assert law(pairs, pairs) == law([None] * 4, right) == law(["a"] * 4, ["b"] * 4) == ""
    assert law([(1,)] * 4, pairs) == law([np.array([1 + 2j])], [np.array([1 + 1j])]) == ""
    # With two different numbers a factor or a summand may fit by chance.
    assert law([2, 2, 4, 4], [1, 1, 2, 2]) == ""
