"""difference: None where two answers are one, a sentence that names the place where not."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from labcore.exercises.matching import difference
from labcore.exercises.wording import LINE, describe, in_lines

NAN, INF = math.nan, math.inf
EQUAL: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF])),
    (torch.tensor([1.0 + 1e-7]), torch.tensor([1.0])),
    (torch.zeros(0, 3), torch.zeros(0, 3)),
    (torch.tensor(3), torch.tensor(3)),
    (torch.tensor([True, False]), torch.tensor([True, False])),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()),
    (np.array([1.0, NAN]), np.array([1.0, NAN])),
    (np.array(2), np.array(2)),
    ([torch.ones(1), 1], (torch.ones(1), 1.0)),
    ({"a": 1, "b": [None, "x", True]}, {"b": [None, "x", True], "a": 1.0}),
    (NAN, NAN),
    (-INF, -INF),
    (None, None),
]
DIFFERENT: list[tuple[Any, Any, str]] = [
    (torch.tensor([1.0]), torch.tensor([1.00001]), r"^the result differs at \[0\]: yours 1,"),
    (torch.tensor([[1.0, 2], [3, 9]]), torch.tensor([[1.0, 2], [3, 4]]), r"at \[1, 1\]: yours 9, "
     "expected 4"),
    (torch.tensor([NAN, 5.0]), torch.tensor([0.0, 1.0]), r"yours nan.*1 of yours is NaN"),
    (torch.tensor([INF]), torch.tensor([-INF]), r"yours inf, expected -inf"),
    (torch.tensor([1.0]), torch.tensor([INF]), r"expected inf"),
    (torch.tensor([NAN]), torch.tensor([INF]), r"yours nan, expected inf"),
    (torch.tensor([2**53 + 1]), torch.tensor([2**53]), r"the result differs"),
    (torch.tensor([True]), torch.tensor([False]), r"yours True, expected False"),
    (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), r"the result differs"),
    (torch.ones(2), torch.ones(2, 1), r"shape \(2, 1\), got \(2,\)"),
    (torch.ones(2).int(), torch.ones(2), r"dtype float32, got int32"),
    (np.ones(2), torch.ones(2).double(), r"torch\.from_numpy"),
    (torch.ones(2), np.ones(2, np.float32), r"x\.numpy\(\)"),
    ([1.0, 1.0], torch.ones(2), r"must be a torch.Tensor, got \[1.0"),
    (torch.tensor(1.0), 1.0, r"one Python number.*x\.item"),
    (torch.ones(3), 1.0, r"one Python number, .* of shape \(3,\): \[1, 1, 1\]; combine"),
    (True, 1.0, r"must be a number, got True"),
    ("1", 1.0, r"must be a number, got '1'"),
    (3.0, 3, r"whole number"),
    (4, 3, r"is 4, expected 3"),
    (1.0, NAN, r"is 1, expected nan"),
    (1, True, r"must be True, got 1"),
    (None, 1.0, r"`return`"),
    ((1.0,), (1.0, 2.0), r"length 2, got 1"),
    (1.0, [1.0], r"list of length 1, got 1"),
    ((1.0, 3.0), (1.0, 2.0), r"the result\[1\] is 3, expected 2"),
    ({"a": 1.0}, {"b": 1.0}, r"keys \['b'\], got \['a'\]"),
    ({"a": [1.0]}, {"a": [2.0]}, r"the result\['a'\]\[0\] is 1"),
    (5, {"a": 1}, r"dict with the keys"),
    ("yes", "no", r"is 'yes', expected 'no'"),
    ("no", None, r"must be None, got 'no'"),
]  # fmt: skip


@pytest.mark.parametrize(("came", "wanted"), EQUAL)
def test_equal_answers(came: Any, wanted: Any) -> None:
    assert difference(came, wanted, rtol=1e-6, atol=0.0) is None


@pytest.mark.parametrize(("came", "wanted", "words"), DIFFERENT)
def test_different_answers(came: Any, wanted: Any, words: str) -> None:
    text = difference(came, wanted, rtol=1e-6, atol=0.0)
    assert text is not None
    assert re.search(words, text), text


def test_tolerances_are_those_of_the_sentence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.standard_normal(50)
    allowed = 1e-3 + 0.01 * np.abs(wanted)
    sign = rng.choice([-1.0, 1.0], 50)
    assert difference(wanted + 0.999 * sign * allowed, wanted, rtol=0.01, atol=1e-3) is None
    text = difference(wanted + 1.001 * sign * allowed, wanted, rtol=0.01, atol=1e-3)
    assert text is not None and "all 50 numbers" in text


def test_parts_get_their_names() -> None:
    text = difference((1.0, 2.0), (1.0, 3.0), rtol=0, atol=0, parts=("weight", "momentum"))
    assert text is not None and text.startswith("the returned momentum")


def test_large_arrays_are_told_by_their_shape() -> None:
    assert describe(torch.ones(2, 50).bfloat16()) == "bfloat16 tensor of shape (2, 50)"
    assert describe(np.array([1.5, 2])) == "float64 numpy array of shape (2,): [1.5, 2]"
    assert len(describe("x" * 500)) == 80


def test_so_many_digits_are_shown_that_the_numbers_differ() -> None:
    right = torch.tensor([1.0199], dtype=torch.float64)
    text = difference(right + 3e-10, right, rtol=0, atol=0)
    assert text is not None
    shown = re.search(r"yours (\S+), expected ([^,]+), which first differ in digit (\d+)", text)
    assert shown is not None and shown[1] != shown[2] and int(shown[3]) in (9, 10, 11), text


def test_the_first_wrong_number_is_named_beside_the_worst(generator: torch.Generator) -> None:
    right = torch.randn(4, 6, generator=generator)
    places = torch.randperm(right.numel(), generator=generator)[:3].sort().values
    first, worst, _ = ([place // 6, place % 6] for place in places.tolist())
    wrong = right.flatten().index_add(0, places, torch.tensor([0.1, 5.0, 0.2])).reshape(4, 6)
    text = difference(wrong, right, rtol=1e-6, atol=0) or ""
    assert f"3 of 24 numbers differ, the first at {first}, most of all at {worst}: " in text
    alone = difference(torch.where(wrong == wrong[*worst], wrong, right), right, rtol=1e-6, atol=0)
    assert f"1 of 24 numbers differ, most of all at {worst}: " in (alone or "")


@pytest.mark.parametrize(
    ("narrow", "dtype", "words"),
    [
        (torch.float32, torch.float64, "float32 numbers"),
        (torch.float16, torch.float32, "float16 numbers"),
        (torch.bfloat16, torch.float32, "bfloat16 numbers"),
    ],
)
def test_a_result_that_was_rounded_on_the_way_is_told_so(
    narrow: torch.dtype, dtype: torch.dtype, words: str, generator: torch.Generator
) -> None:
    right = torch.randn(50, generator=generator, dtype=dtype)
    text = difference(right.to(narrow).to(dtype), right, rtol=1e-9, atol=0)
    assert text is not None and words in text
    worse = difference(right.to(narrow).to(dtype) * 1.5, right, rtol=1e-9, atol=0)
    assert worse is not None and "rounded" not in worse


def test_float32_arithmetic_is_suspected_in_float64_results(generator: torch.Generator) -> None:
    right = torch.rand(50, generator=generator, dtype=torch.float64) + 0.5
    text = difference(1 / (1 / right.float()).double(), right, rtol=1e-12, atol=0)
    assert text is not None and "computed in float32" in text
    number = difference(0.1 + 1e-9, 0.1, rtol=1e-12, atol=0)
    assert number is not None and "computed in float32" in number


def test_the_case_is_told_where_the_results_differ() -> None:
    case = {"w": torch.arange(20.0).reshape(4, 5), "lr": 0.5, "beta": torch.ones(2)}
    right = torch.zeros(4, 5)
    came = right.clone()
    came[1, 3] = 2.0
    text = difference(came, right, rtol=0, atol=0, case=case)
    assert text is not None
    assert text.endswith("There w = 8; lr = 0.5, beta = float32 tensor of shape (2,): [1, 1]")
    shape = difference(came[0], right, rtol=0, atol=0, case=case)
    assert shape is not None and "The case: w = float32 tensor of shape (4, 5), lr" in shape


def test_lines_are_broken_at_spaces_and_never_at_an_equals_sign(seed: int) -> None:
    rng = random.Random(seed)
    words = [rng.choice(["a = 1", "some", "words,", "name_of_it = 0.25"]) for _ in range(400)]
    text = "  ".join(words[:3]) + "\n    " + " ".join(words)
    lines = in_lines(text).split("\n")
    assert max(map(len, lines)) <= LINE
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert not any(line.endswith("=") or line.lstrip().startswith("=") for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])
