"""The formula of the loss is recovered from runs that follow it, and refuses too few."""

from __future__ import annotations

import random

import pytest

from labcore.capstone.scaling import Recorded, ScalingLaw, recorded_runs, scaling_law


def runs_of(law: ScalingLaw, noise: float, draw: random.Random) -> list[Recorded]:
    return [
        Recorded(
            weights=weights, tokens=tokens, bits=law(weights, tokens) + draw.uniform(-noise, noise)
        )
        for weights in (230_000, 531_000, 1_007_000)
        for tokens in (524_288, 1_310_720, 4_194_304)
    ]


def test_the_formula_is_recovered(seed: int) -> None:
    draw = random.Random(seed)
    law = ScalingLaw(
        floor=draw.uniform(0.2, 1),
        by_weights=draw.uniform(20, 80),
        by_tokens=draw.uniform(20, 80),
        worst=0,
    )
    terms = law.by_weights / 1e6**0.35 + law.by_tokens / 1e7**0.37
    assert law(1e6, 1e7) == pytest.approx(law.floor + terms)
    found = ScalingLaw.fitted(runs_of(law, 0.0, draw))
    assert found.floor == pytest.approx(law.floor, rel=1e-6)
    assert found.by_weights == pytest.approx(law.by_weights, rel=1e-6)
    assert found.by_tokens == pytest.approx(law.by_tokens, rel=1e-6)
    assert found.worst < 1e-9
    noisy = ScalingLaw.fitted(runs_of(law, 0.02, draw))
    assert 0 < noisy.worst < 0.04


def test_three_runs_are_too_few(seed: int) -> None:
    law = ScalingLaw(floor=0.5, by_weights=50, by_tokens=50, worst=0)
    with pytest.raises(ValueError, match="at least four, got 3"):
        ScalingLaw.fitted(runs_of(law, 0, random.Random(seed))[:3])


def test_the_recorded_runs_follow_it() -> None:
    runs, law = recorded_runs(), scaling_law()
    assert len(runs) >= 10 and law.worst < 0.15
    assert law.by_weights > 0 and law.by_tokens > 0
    for one in runs:
        assert abs(law(one.weights, one.tokens) - one.bits) <= law.worst + 1e-9
