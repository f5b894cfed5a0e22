"""The exercises on epsilon: right answers pass, each wrong one gets its own hint, laws hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from labcore.exercises import Exercise, load
from labcore.exercises.topics.adamw_epsilon import (
    CLINIC,
    CONVERTED_EPS,
    HALF_STEP,
    LARGEST_EPS,
    ROUND_BY_CHANCE,
)
from labcore.optim import rules
from labcore.studies.adamw_epsilon import epsilon
from labcore.ui.figures.clinic import curves
from tests.exercises.draws import answers, draws
from tests.exercises.notebook import complaints_about, source
from tests.exercises.reasons import with_reasons

FUNCTIONS = (LARGEST_EPS, CONVERTED_EPS, HALF_STEP, ROUND_BY_CHANCE)


def test_the_topic_offers_its_exercises() -> None:
    assert load("adamw_epsilon") == [*FUNCTIONS, CLINIC]
    assert sum(len(exercise.wrong) for exercise in FUNCTIONS) + len(CLINIC.faults) >= 6


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda one: one.id)
def test_each_wrong_answer_gets_its_own_hint(exercise: Exercise, seed: int) -> None:
    count = 2 if exercise is ROUND_BY_CHANCE else 8
    for draw, student in draws(seed, count):
        right = answers(exercise, exercise.reference, draw, student)
        assert exercise.judge(right, seed=draw, student=student).passed
        for name, (function, hint) in exercise.wrong.items():
            given = answers(exercise, function, draw, student)
            outcome = exercise.judge(given, seed=draw, student=student)
            assert (outcome.kind, outcome.mistake) == ("known mistake", name), (draw, student)
            assert hint in outcome.message


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda one: one.id)
def test_a_student_has_numbers_of_their_own(exercise: Exercise) -> None:
    assert exercise.variant(3) == exercise.variant(3)
    assert len({tuple(exercise.variant(student).values()) for student in range(50)}) >= 4


# How large may epsilon be? -----------------------------------------------------------------------


def test_the_largest_eps_costs_just_what_was_allowed(seed: int) -> None:
    for case in LARGEST_EPS.numbered_cases(seed, student=seed):
        outside, inside = LARGEST_EPS.reference(**case)
        for eps, mode in ((outside, "outside"), (inside, "inside")):
            kept = epsilon.predict_attenuation(case["rms"], eps, eps_mode=mode)
            assert kept.min().item() == pytest.approx(1 - case["lost"], rel=1e-9)


# Epsilon from another library --------------------------------------------------------------------


def test_the_converted_eps_takes_the_step_of_keras(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    beta1, eps_hat = 0.9, 1e-3
    numbers = CONVERTED_EPS.variant(seed)
    beta2, scale = numbers["beta2"], numbers["loss_scale"]
    m, v, state = 0.0, 0.0, {}
    for step in range(1, 12):
        grad = torch.randn((), generator=generator, dtype=torch.float64) * 1e-2
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        rate = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        keras = -rate * m / (v.sqrt() + eps_hat)
        eps = CONVERTED_EPS.reference(eps_hat, step, **numbers)
        moved, state = rules.adamw(
            torch.zeros_like(grad), scale * grad, state, lr=1.0, beta2=beta2, eps=eps
        )
        assert moved.item() == pytest.approx(keras.item(), rel=1e-9)


def test_without_another_loss_the_conversion_is_the_library_s(seed: int) -> None:
    for case in CONVERTED_EPS.numbered_cases(seed, student=seed):
        case["loss_scale"] = 1.0
        eps_hat, step, beta2 = case["eps_hat"], case["step"], case["beta2"]
        wanted = epsilon.equivalent_eps(eps_hat, step=step, beta2=beta2)
        assert CONVERTED_EPS.reference(**case) == pytest.approx(wanted, rel=1e-9)


# The step in fp16 --------------------------------------------------------------------------------


def in_double(**case: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same step in float64 by the library's rule."""
    beta1, beta2 = case["betas"]
    names = ("exp_avg", "exp_avg_sq")
    state = {name: case[name].double() for name in names} | {"step": case["step"] - 1}
    settings = {name: case[name] for name in ("lr", "eps", "weight_decay")}
    new, state = rules.adamw(
        case["weight"].double(),
        case["grad"].double() / case["loss_scale"],
        state,
        beta1=beta1,
        beta2=beta2,
        **settings,
    )
    return new.half(), *(state[name].float() for name in names)


def test_the_tolerances_of_the_half_step_admit_float64(seed: int) -> None:
    for draw, student in draws(seed, 100):
        given = answers(HALF_STEP, in_double, draw, student)
        assert HALF_STEP.judge(given, seed=draw, student=student).passed, (draw, student)


def test_the_cases_of_the_half_step_are_hard(seed: int) -> None:
    cases = HALF_STEP.numbered_cases(seed, seed)
    for case in cases:
        for tensor in HALF_STEP.reference(**case):
            assert torch.isfinite(tensor).all()
        assert case["weight"].ndim == 0 or not torch.isfinite(in_half(**case)).all()
    assert any((case["grad"] == 0).any() and (case["exp_avg_sq"] == 0).any() for case in cases)


def in_half(**case: Any) -> Tensor:
    """The new weight where all is fp16."""
    beta1, beta2 = case["betas"]
    state = {name: case[name].half() for name in ("exp_avg", "exp_avg_sq")}
    settings = {name: case[name] for name in ("lr", "eps", "weight_decay")}
    grad = case["grad"] / case["loss_scale"]
    state["step"] = case["step"] - 1
    return rules.adamw(case["weight"], grad, state, beta1=beta1, beta2=beta2, **settings)[0]


@pytest.mark.parametrize("given", [None, 1.0, (1.0, 2.0), [torch.ones(2)] * 3])
def test_the_half_step_says_what_form_it_wants(given: Any, seed: int) -> None:
    outcome = HALF_STEP.judge([given] * len(HALF_STEP.cases(seed)), seed=seed)
    assert outcome.kind == "wrong"
    assert "must" in outcome.message or "return" in outcome.message


def test_what_is_rounded_before_the_subtraction_is_seen(seed: int) -> None:
    for draw, student in draws(seed, 20):
        for name in ("subtraction in fp16", "decay in fp16", "decay after the step"):
            given = answers(HALF_STEP, HALF_STEP.wrong[name][0], draw, student)
            assert HALF_STEP.judge(given, seed=draw, student=student).mistake == name
            given[-1] = answers(HALF_STEP, HALF_STEP.reference, draw, student)[-1]
            assert HALF_STEP.judge(given, seed=draw, student=student).passed, "the last case alone"


def test_the_half_step_shows_the_inputs_of_the_worst_number(seed: int) -> None:
    given = answers(HALF_STEP, HALF_STEP.reference, seed, 0)
    given[1][0][2, 3] += 1
    message = HALF_STEP.judge(given, seed=seed).message
    case = HALF_STEP.numbered_cases(seed)[1]
    assert "the returned weight: 1 of 15 numbers differ, most of all at [2, 3]" in message
    assert f"There weight = {case['weight'][2, 3].item():.6g}, grad = " in message
    assert "step = 2, lr = 0.02" in message


# Rounding by chance ------------------------------------------------------------------------------


def test_rounding_by_chance_has_its_mean_and_two_outcomes(seed: int) -> None:
    n = 100_000
    for bits, number in itertools.product((4, 7, 10), (1.3, -2.7e-5, 1e4)):
        x = torch.full((n,), number)
        rounded = ROUND_BY_CHANCE.reference(x, bits, seed).double()
        spacing = 2.0 ** (math.frexp(number)[1] - 1 - bits)
        low = math.floor(x[0].item() / spacing) * spacing
        assert set(rounded.tolist()) <= {low, low + spacing}
        # Hoeffding: the mean of n draws within one spacing errs by more with chance 2 exp(−2·32).
        assert abs(rounded.mean().item() - x[0].item()) < spacing * math.sqrt(32 / n)


def by_floor(x: Tensor, bits: int, seed: int) -> Tensor:
    """A right function of another make, in fp32 arithmetic throughout."""
    generator = torch.Generator().manual_seed(seed)
    spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits)
    rounded = torch.floor(x / spacing + torch.rand(x.shape, generator=generator)) * spacing
    return torch.where(torch.isfinite(x), rounded, x)


def unguarded(x: Tensor, bits: int, seed: int) -> Tensor:
    """By bits, without a thought of what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    drop = 23 - bits
    noise = torch.randint(0, 1 << drop, x.shape, dtype=torch.int32, generator=generator)
    return ((x.view(torch.int32) + noise) & -(1 << drop)).view(torch.float32)


@pytest.mark.parametrize("make", [by_floor, unguarded])
def test_the_law_admits_every_right_make(make: Callable[..., Any], seed: int) -> None:
    for draw, student in draws(seed, 6):
        given = answers(ROUND_BY_CHANCE, make, draw, student)
        assert ROUND_BY_CHANCE.judge(given, seed=draw, student=student).passed, (draw, student)


def one_coin(x: Tensor, bits: int, seed: int) -> Tensor:
    coin = torch.rand((), generator=torch.Generator().manual_seed(seed))
    spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits)
    return torch.where(torch.isfinite(x), torch.floor(x / spacing + coin) * spacing, x)


def squared_share(x: Tensor, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits)
    coins = torch.rand(x.shape, generator=generator).sqrt()
    return torch.where(torch.isfinite(x), torch.floor(x / spacing + coins) * spacing, x)


@pytest.mark.parametrize("wrong", [one_coin, squared_share])
def test_the_law_refuses_what_is_not_on_the_list(wrong: Callable[..., Any], seed: int) -> None:
    for draw, student in draws(seed, 3):
        given = answers(ROUND_BY_CHANCE, wrong, draw, student)
        outcome = ROUND_BY_CHANCE.judge(given, seed=draw, student=student)
        assert not outcome.passed
        assert ("one coin were thrown" in outcome.message) == (wrong is one_coin)
        # A single coin near the middle is as good as none.
        assert outcome.kind == "wrong" or (wrong is one_coin and outcome.mistake == "nearest")


# The clinic --------------------------------------------------------------------------------------


def test_the_patients_can_be_told_apart_by_eye() -> None:
    # Any two differ by a quarter in some panel, over a quarter of its length at least.
    seen = CLINIC.patients()
    for one, other in itertools.combinations(seen, 2):
        apart = 0
        for panel in seen[one]:
            ratio = torch.tensor(seen[one][panel]) / torch.tensor(seen[other][panel])
            apart = max(apart, (ratio.log().abs() > math.log(1.25)).double().mean().item())
        assert apart > 0.25, (one, other)


def test_a_wrong_diagnosis_gets_the_symptom_of_the_fault_named(seed: int) -> None:
    names = CLINIC.diagnoses(seed)
    assert CLINIC.check(with_reasons(CLINIC, names), student=seed).passed
    for patient, name in itertools.product(names, CLINIC.names):
        if name != names[patient]:
            wrong = with_reasons(CLINIC, {**names, patient: name})
            outcome = CLINIC.check(wrong, student=seed, patient=patient)
            assert CLINIC.faults[name].symptom in outcome.message
            assert CLINIC.faults[names[patient]].symptom not in outcome.message


def test_the_text_says_which_columns_share_a_scale() -> None:
    assert "the rows of the first and of the third column share a scale" in source(
        "adamw_epsilon"
    ).read_text("utf-8")
    figure = curves(CLINIC.patients(), clinic=CLINIC, from_zero=True)
    for column, shared in ((1, True), (2, False), (3, True)):
        ranges = {axis.range for axis in figure.select_yaxes(col=column)}
        assert (len(ranges) == 1) == shared


# The notebook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("if stable else 1.0", "if False else 1.0"),  # the rule that labcore has
        ("g * g / square", "grad.float() ** 2 / square"),
        ("square.clamp(min=eps**2)", "square"),  # 0/0 without a gradient
        (".mean().sqrt().item() if", ".max().sqrt().item() if"),
    ],
)
def test_the_changed_rule_is_graded(right: str, wrong: str) -> None:
    failed = complaints_about("adamw_epsilon", "half_step", right, wrong)
    assert set(failed) == {"stable-step-test"}
