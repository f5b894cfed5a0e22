"""A budget is the last number of tokens within the limit, and the ridge is where time turns."""

from __future__ import annotations

import random

import pytest

from labcore.decoding.theory.speedup import Roofline
from labcore.studies.inflight.budget import MOST, budget, ridge, step_seconds


def roofline(chance: random.Random) -> Roofline:
    return Roofline(
        flops=chance.uniform(1e14, 1e15), bandwidth=chance.uniform(1e12, 5e12),
        weights=chance.uniform(1e9, 7e10), cache=chance.uniform(1e4, 5e5), attention=5e5,
    )  # fmt: skip


def test_one_token_more_than_the_budget_misses_the_limit(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        roof, load = (
            roofline(chance),
            {"rows": chance.randint(0, 99), "context": chance.randrange(9000)},
        )
        limit = chance.uniform(0.5, 30) * roof.seconds(1)
        most = budget(roof, limit, **load)
        assert most in range(MOST + 1)
        assert most == 0 or step_seconds(roof, most, **load) <= limit
        assert most == MOST or step_seconds(roof, most + 1, **load) > limit


def test_time_is_flat_up_to_the_ridge_and_then_in_proportion(seed: int) -> None:
    roof = roofline(random.Random(seed))
    at = ridge(roof)
    assert at == pytest.approx(roof.flops / roof.bandwidth)
    assert step_seconds(roof, int(at)) == step_seconds(roof, 1) < step_seconds(roof, int(at) + 2)
    many = 10 * int(at)
    assert step_seconds(roof, 2 * many) == pytest.approx(2 * step_seconds(roof, many))


def test_rows_pay_for_their_contexts(seed: int) -> None:
    roof = roofline(random.Random(seed))
    more = step_seconds(roof, 64, rows=64, context=4096) - step_seconds(roof, 64)
    assert more == pytest.approx(
        max(64 * 4096 * roof.cache / roof.bandwidth, 64 * 4096 * roof.attention / roof.flops)
    )
    with pytest.raises(ValueError, match="limit"):
        budget(roof, 0)
