"""The plan follows its rule on any machine, and meets a memory budget by levers alone."""

from __future__ import annotations

import dataclasses
import math

import pytest

from labcore.capstone import plan as planning
from labcore.capstone.plan import (
    BATCHES,
    WIDTHS,
    Choices,
    Plan,
    held,
    make_plan,
    predicted,
    shape,
)
from labcore.models import Llama


def timed(monkeypatch: pytest.MonkeyPatch, flops: float) -> None:
    """Let a forward take the time of so many FLOPs per second."""

    def seconds(plan: Plan, _: Choices) -> float:
        return 6 * plan.weights * plan.rows * plan.length / flops

    monkeypatch.setattr(planning, "step_seconds", seconds)


@pytest.mark.parametrize("seconds", [50.0, 600.0, 3_660.0])
@pytest.mark.parametrize("flops", [3e9, 5e10, 4e13])
def test_size_and_tokens_are_as_the_rule_says(
    seconds: float, flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, flops)
    found = make_plan(seconds, Choices())
    # All seconds are spent, up to one step and what planning took.
    spent = found.steps * found.seconds + found.draft_seconds
    assert spent <= seconds < 2 * (spent + found.seconds)
    assert found.draft_seconds == min(seconds / 4, 120)
    # No other width comes nearer to 20 tokens per weight.
    weights = [Plan(config=shape(width)).weights for width in WIDTHS]
    tokens = found.steps * found.seconds * flops / 6  # times weights
    off = {one: abs(math.log(tokens / one / one / 20)) for one in weights}
    assert off[found.weights] == pytest.approx(min(off.values()), abs=0.1) or found.steps < 20
    # The largest batch that leaves 2,000 steps, but for the steps that planning cost.
    assert found.accumulate in BATCHES
    assert found.steps > 1_900 or found.accumulate == 1
    assert found.steps < 4_200 or found.accumulate == BATCHES[-1]


def test_the_rate_warms_up_and_ends_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 5e10)
    found = make_plan(180.0, Choices())
    factors = [found.schedule(step) for step in range(found.steps)]
    top = factors.index(max(factors))
    assert max(factors) <= 1 and top == found.steps // 10 - 1
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True) and 0 < factors[-1] < 0.02


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_a_model(width: int) -> None:
    config = shape(width)
    assert Llama(config, device="meta").config == config
    assert config.num_attention_heads % config.kv_heads == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_must_be_above_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a finite number above 0"):
        make_plan(seconds, Choices())


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_a_budget_is_met_and_bytes_are_as_predicted(
    optimizer: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, 5e10)
    choices = Choices(optimizer=optimizer)
    free = make_plan(240.0, choices)
    budget = int(share * predicted(free, choices).total)
    fitted = make_plan(240.0, choices, memory=budget)
    assert predicted(fitted, choices).total <= budget
    assert held(fitted, choices).total == pytest.approx(predicted(fitted, choices).total, rel=0.05)
    assert fitted.rows * fitted.accumulate == free.rows * free.accumulate
    assert (fitted.rows == free.rows) == (share == 1.0)


def test_too_small_a_budget_is_refused_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 5e10)
    with pytest.raises(ValueError, match=r"memory must be at least [\d.]+ MiB"):
        make_plan(240.0, Choices(), memory=1_000)


def test_a_forward_takes_time(plan: Plan) -> None:
    tried = dataclasses.replace(plan, accumulate=1)
    assert planning.step_seconds(tried, Choices()) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "SGD"),
        ("eps", 0.0),
        ("clip", -1.0),
        ("eps", "small"),
        ("seed", 2**60),
        ("seed", -1),
    ],
)
def test_a_choice_that_is_none_is_refused(field: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=field):
        Choices(**{field: value})  # type: ignore[arg-type]
