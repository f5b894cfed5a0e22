"""The exercises on ghost batch norm, by other ways to the same numbers, and their notebook."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from labcore.exercises import Exercise, student_seed
from labcore.exercises.topics.ghost_norm import (
    BACKWARD,
    CLINIC,
    LARGE_BATCH,
    MERGED,
    PADDED_GHOSTS,
)
from labcore.exercises.topics.ghost_norm.patients import Norm
from labcore.ui.figures.clinic import curves
from tests.exercises.draws import draws
from tests.exercises.notebook import check_changed_rule, complaints_about, source

FUNCTIONS = {
    "large_batch": LARGE_BATCH,
    "padded_ghosts": PADDED_GHOSTS,
    "merged": MERGED,
    "backward": BACKWARD,
}
Change = Callable[[str], str]


@pytest.mark.parametrize(("exercise", "count"), [(LARGE_BATCH, 20), (PADDED_GHOSTS, 2)])
def test_each_wrong_answer_gets_its_own_hint_for_any_student(
    exercise: Exercise, count: int, seed: int
) -> None:
    for draw, student in draws(seed, count):
        for name, (fn, hint) in exercise.wrong.items():
            given = [fn(**case) for case in exercise.numbered_cases(draw, student)]
            outcome = exercise.judge(given, seed=draw, student=student)
            assert outcome.mistake == name, (draw, student, outcome)
            assert hint in outcome.message


def test_students_have_their_own_numbers(seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(80)]
    for exercise in (LARGE_BATCH, PADDED_GHOSTS):
        assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])
        assert len({tuple(exercise.variant(number).values()) for number in numbers}) >= 8


# Settings for a larger batch ---------------------------------------------------------------------


def test_the_settings_do_what_they_were_chosen_for(seed: int) -> None:
    for draw, student in draws(seed, 10):
        for case in LARGE_BATCH.numbered_cases(draw, student):
            lr, momentum, epochs = LARGE_BATCH.reference(**case)
            assert math.log(lr / case["lr"], case["factor"]) == pytest.approx(case["power"])
            old = new = 1.0
            for _ in range(case["factor"]):
                old *= 1 - case["momentum"]
            new *= 1 - momentum
            assert new == pytest.approx(old, rel=1e-9)
            rows, batch = range(case["rows"]), case["batch"]
            before = case["epochs"] * len(rows[::batch])
            an_epoch = len(rows[:: batch * case["factor"]])
            assert (epochs - 1) * an_epoch < before <= epochs * an_epoch
            assert epochs == math.ceil(Fraction(before, an_epoch))


def test_the_text_s_example_of_settings() -> None:
    *_, epochs = LARGE_BATCH.reference(1.0, 0.1, 3, rows=10, batch=2, factor=3, power=0.5)
    assert epochs == 8 and "Three epochs become 8" in source("ghost_norm").read_text("utf-8")


# Ghosts in a batch with padding ------------------------------------------------------------------


def test_a_ghost_is_what_torch_makes_of_its_rows(seed: int) -> None:
    for case in PADDED_GHOSTS.numbered_cases(seed, student=seed):
        x, weight = case["x"], case["weight"]
        size, real = case["ghost_size"], weight.nonzero()[:, 0].tolist()
        y = PADDED_GHOSTS.reference(**case)
        assert not y[weight == 0].any()
        while real:
            mine, real = (real[:size], real[size:]) if len(real) >= 2 * size else (real, [])
            if len(mine) > 1:  # of one row torch refuses to make a batch
                right = functional.batch_norm(x[mine], None, None, training=True, eps=case["eps"])
                torch.testing.assert_close(y[mine], right)
            else:
                assert not y[mine].any()


def test_the_cases_have_every_kind_of_rest() -> None:
    for student in range(30):
        cases = PADDED_GHOSTS.numbered_cases(1, student)
        size = cases[0]["ghost_size"]
        real = [int(case["weight"].sum()) for case in cases]
        assert {0, 1, 2} <= {rows % size for rows in real if rows >= size}
        assert {0, 1, 2} <= {rows for rows in real if rows < size}


def test_padding_that_is_not_finite_does_not_hide_a_mistake(seed: int) -> None:
    def spread(**case: Any) -> Tensor:
        y = PADDED_GHOSTS.wrong["n - 1"][0](**case)
        return y + 0 * case["x"]

    given = [spread(**case) for case in PADDED_GHOSTS.numbered_cases(seed)]
    assert PADDED_GHOSTS.judge(given, seed=seed).mistake == "n - 1"


# One statistic out of many -----------------------------------------------------------------------


def shared_out(generator: torch.Generator) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The values of each of three channels, and what five workers know of them."""
    workers = torch.randint(5, (60, 3), generator=generator)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64) + 2 * workers
    case = {name: torch.zeros(5, 3, dtype=torch.float64) for name in ("mean", "var")}
    case["count"] = torch.zeros(5, 3, dtype=torch.int64)
    for worker, channel in itertools.product(range(4), range(3)):  # the fifth's are not there
        mine = x[workers[:, channel] == worker, channel]
        case["count"][worker, channel] = len(mine)
        if len(mine):
            case["mean"][worker, channel] = mine.mean()
            case["var"][worker, channel] = mine.var(correction=0)
    return [x[workers[:, channel] < 4, channel] for channel in range(3)], case


def test_merged_statistics_are_those_of_all_values(generator: torch.Generator) -> None:
    values, case = shared_out(generator)
    mean, variance = MERGED.reference(**case)
    torch.testing.assert_close(mean, torch.stack([channel.mean() for channel in values]))
    torch.testing.assert_close(variance, torch.stack([channel.var() for channel in values]))


def test_merging_loses_no_digits_far_from_zero(generator: torch.Generator) -> None:
    values, case = shared_out(generator)
    case["mean"] = torch.where(case["count"] > 0, case["mean"] + 2.0**24, 0.0)
    mean, variance = MERGED.reference(**case)
    right = [torch.stack([one.mean(), one.var()]) for one in values]
    came = torch.stack([mean - 2.0**24, variance], dim=1)
    torch.testing.assert_close(came, torch.stack(right), rtol=1e-7, atol=1e-7)


def by_squares(count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    n = count.double()
    total = n.sum(0)
    together = (n * mean).sum(0) / total
    squares = (n * (var + mean**2)).sum(0) / total - together**2
    return together, squares * total / (total - 1)


def test_lost_digits_are_called_so_and_nothing_else_is(seed: int) -> None:
    unaided = replace(MERGED, mistakes=())
    for draw, _ in draws(seed, 5):
        given = [by_squares(**case) for case in MERGED.numbered_cases(draw)]
        assert "its digits are lost" in unaided.judge(given, seed=draw).message
        for name in MERGED.wrong.keys() - {"shares in fp32"}:
            given = [MERGED.wrong[name][0](**case) for case in MERGED.numbered_cases(draw)]
            assert "digits are lost" not in unaided.judge(given, seed=draw).message, name


@pytest.mark.parametrize("given", [None, 1.0, (1.0, 2.0), [torch.ones(2)] * 3])
def test_merged_says_what_form_it_wants(given: Any, seed: int) -> None:
    outcome = MERGED.judge([given] * len(MERGED.cases(seed)), seed=seed)
    assert outcome.kind == "wrong"
    assert "must" in outcome.message or "return" in outcome.message


# The gradient by hand ----------------------------------------------------------------------------


def test_the_gradient_is_autograd_s(generator: torch.Generator) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes, eps = (3, 8, 2, 6), 0.3
    x, weight, bias = (leaf.requires_grad_() for leaf in (normal(19, 3), normal(3), normal(3)))
    y = torch.cat(
        [
            functional.batch_norm(rows, None, None, weight, bias, training=True, eps=eps)
            for rows in x.split(sizes)
        ]
    )
    grad = normal(19, 3)
    right = torch.autograd.grad(y, (x, weight, bias), grad)
    rows = x.detach().split(sizes)
    inverse = torch.stack([(one.var(0, correction=0) + eps).rsqrt() for one in rows])
    scaled = [(one - one.mean(0)) * scale for one, scale in zip(rows, inverse, strict=True)]
    came = BACKWARD.reference(grad, torch.cat(scaled), inverse, weight.detach(), sizes=sizes)
    torch.testing.assert_close(came, right)


# The clinic --------------------------------------------------------------------------------------


class EveryFourthRow(Norm):
    """Ghosts of rows that stand apart."""

    def train(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = Norm.train(self, x.view(-1, self.ghosts).T.reshape(-1))
        return y.view(self.ghosts, -1).T.reshape(-1), mean, variance


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest distance in any panel, in spans of the two curves."""
    found = 0.0
    for panel in one:
        both = torch.tensor([one[panel], other[panel]])
        distance = (both[0] - both[1]).abs().max() / (both.max() - both.min())
        found = max(found, distance.item())
    return found


def test_what_the_explanation_says_of_the_curves() -> None:
    names = {"healthy": "healthy", **CLINIC.diagnoses()}
    seen = {names[label]: panels for label, panels in CLINIC.patients().items()}
    ill = {
        name: {panel for panel in panels if panels[panel] != seen["healthy"][panel]}
        for name, panels in seen.items()
    }
    both = {"running variance", "evaluation: output"}
    assert ill.pop("healthy") == set()
    assert ill == {
        "statistics of the whole batch": both | {"length of w"},
        "momentum the wrong way round": both,
        "own statistics in evaluation": {"evaluation: output"},
        "statistics without a gradient": {"length of w"},
    }
    strided = CLINIC.observe(EveryFourthRow())
    assert apart(strided, seen["statistics of the whole batch"]) < 0.1
    length = seen["healthy"]["length of w"]
    assert all(b >= a for a, b in itertools.pairwise(length))
    assert length[-1] == pytest.approx(length[20], rel=1e-2)


def test_each_column_of_the_figure_has_one_scale() -> None:
    figure = curves(CLINIC.patients(), from_zero=True)
    for column in (1, 2, 3):
        assert len({axis.range for axis in figure.select_yaxes(col=column)}) == 1


# The notebook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("w = weight[rows, None] / weight[rows].sum()", "w = 1 / max(1, len(rows))", "count alike"),
        ("(w * apart**2).sum(0)", "(apart**2).mean(0)", "The variance does not know"),
        ("apart = x[rows] - (w * x[rows]).sum(0)", "apart = x[rows] - x[rows].mean(0)", "The mean"),
        ("/ weight[rows].sum()", "/ len(rows)", "divided by the number of rows"),
        ("y[rows] = apart", "y[rows] = weight[rows, None] * apart", "multiplied by their weights"),
    ],
)
def test_the_changed_rule_is_graded(right: str, wrong: str, hint: str) -> None:
    complaints = complaints_about("ghost_norm", "padded_ghosts", right, wrong)
    assert set(complaints) == {"weighted-ghosts-test"}
    assert hint in complaints["weighted-ghosts-test"]


def test_the_reference_does_not_know_the_changed_rule(seed: int) -> None:
    check_changed_rule(
        "ghost_norm",
        "weighted-ghosts-test",
        "padded_ghosts",
        PADDED_GHOSTS,
        "All real rows count",
        seed,
    )
