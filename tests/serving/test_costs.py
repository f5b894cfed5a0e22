"""Seconds of a step by hand, and a fit that finds what was planted, with noise and without."""

from __future__ import annotations

import random
import statistics
from dataclasses import astuple, replace

import pytest

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.plan import Chunk, Decode, StepPlan
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import StepRecord
from labcore.serving.simulation.costs import CostModel, StepWork, fit_costs, work
from labcore.serving.simulation.simulate import simulate
from labcore.serving.simulation.workload import Workload, lognormal, long_tail, poisson


def drawn(dice: random.Random) -> CostModel:
    return CostModel(
        base=10 ** dice.uniform(-3, -1),
        per_prefill_token=10 ** dice.uniform(-5, -3),
        per_decode_row=10 ** dice.uniform(-4, -2),
        per_context_token=10 ** dice.uniform(-6, -4),
    )


def steps(cost: CostModel, seed: int, n: int = 60) -> list[StepRecord]:
    requests = Workload(
        poisson(0.8 / (cost.seconds(StepPlan(step=0, decodes=(Decode("a"),))) * 4), n, seed),
        lognormal(40, n, seed, most=300),
        long_tail(3, n, seed, most=120),
        seed=seed,
    )
    pool = BlockPool(200, 8)
    return list(
        simulate(
            requests, lambda: Scheduler(pool, max_num_seqs=6, max_num_batched_tokens=64), cost
        ).steps
    )


def test_seconds_are_those_of_the_parts(seed: int) -> None:
    cost = drawn(random.Random(seed))
    chunks = (Chunk("a", 0, 7, False), Chunk("b", 32, 5, True))
    decodes = (Decode("c", 0, 11), Decode("d", 3, 2))
    assert work(chunks, decodes) == StepWork(1, 12, 5, 7 + 37 + 12 + 6)
    assert work(chunks, ()) == StepWork(1, 12, 0, 44)
    assert work((), decodes) == StepWork(1, 0, 5, 18)
    told = cost.seconds(StepPlan(step=3, chunks=chunks, decodes=decodes))
    base, prefill, row, context = astuple(cost)
    assert told == pytest.approx(base + 12 * prefill + 5 * row + 62 * context)
    apart = [StepPlan(step=0, chunks=chunks), StepPlan(step=1, decodes=decodes)]
    assert told + base == pytest.approx(sum(map(cost.seconds, apart)))
    assert cost.seconds(StepPlan(step=0)) == 0
    # Ended rows of a static batch are computed beside decodes, and nowhere else.
    resting = StepPlan(step=3, chunks=chunks, decodes=decodes, idle=("x", "y"))
    assert cost.seconds(resting) == pytest.approx(told + 2 * (row + context))
    alone = StepPlan(step=3, chunks=chunks, idle=("x", "y"))
    assert cost.seconds(alone) == cost.seconds(apart[0])


def test_a_fit_finds_what_was_planted(seed: int) -> None:
    planted = drawn(random.Random(seed))
    found = fit_costs(steps(planted, seed), skip=2)
    assert astuple(found.cost) == pytest.approx(astuple(planted), rel=1e-6)
    assert found.problem == "" and found.worst < 1e-9 and found.total == pytest.approx(1)
    assert [found.cost.of(done) for done in found.works] == pytest.approx(list(found.seconds))


def test_noise_does_not_shift_the_sum(seed: int) -> None:
    """Relative to measured times the fit would come out a sixth short; ours has no mean error."""
    dice = random.Random(seed)
    planted = CostModel(
        base=0.01, per_prefill_token=2e-4, per_decode_row=1e-3, per_context_token=1e-5
    )
    noisy = [
        replace(step, seconds=step.seconds * dice.lognormvariate(-0.045, 0.3))  # mean 1
        for step in steps(planted, seed, n=400)
    ]
    found = fit_costs(noisy)
    assert len(found.residuals) > 700
    assert statistics.fmean(found.residuals) == pytest.approx(0, abs=1e-6)
    assert found.total == pytest.approx(1, abs=0.05)
    assert 0.1 < found.typical < 0.35 < found.worst
    for done, plain in ((StepWork(1, 0, 6, 400), 0.02), (StepWork(1, 64, 5, 600), 0.0338)):
        assert planted.of(done) == pytest.approx(plain)
        assert found.cost.of(done) == pytest.approx(plain, rel=0.12)


def test_what_never_occurs_costs_nothing(seed: int) -> None:
    planted = drawn(random.Random(seed))
    only = [step for step in steps(planted, seed) if step.chunks and not step.decodes]
    found = fit_costs([replace(one, step=number) for number, one in enumerate(only * 4)])
    assert found.cost.per_decode_row == 0 and "decoded" not in found.problem


def test_rows_and_not_their_context_cost_what_noise_confounds(seed: int) -> None:
    planted = replace(drawn(random.Random(seed)), per_decode_row=0.0)
    own = planted.per_context_token / 2  # of a row, and below 0: the fit alone would give it 0
    records = [
        replace(one, seconds=one.seconds - own * len(one.decodes)) for one in steps(planted, seed)
    ]
    found = fit_costs(records)
    assert found.cost.per_context_token == 0 < found.cost.per_decode_row and not found.problem


def test_no_coefficient_is_negative(seed: int) -> None:
    """Steps that get shorter with more rows, as a free fit would have it."""
    dice = random.Random(seed)
    records = [
        replace(one, seconds=0.02 / (1 + len(one.decodes)) + 1e-3 * dice.random())
        for one in steps(drawn(dice), seed)
    ]
    found = fit_costs(records)
    assert min(astuple(found.cost)) >= 0
    assert "the fit gives 0 for" in found.problem and "a decoded token" in found.problem


def test_what_cannot_be_fitted_is_refused(seed: int) -> None:
    records = steps(drawn(random.Random(seed)), seed)
    with pytest.raises(ValueError, match="fit needs at least four steps .* got 3;"):
        fit_costs(records[:3])
    with pytest.raises(ValueError, match="seconds must be a finite number above 0"):
        fit_costs([*records[:8], replace(records[8], seconds=0.0)])
    with pytest.raises(ValueError, match="base must be a finite number, at least 0, got -1"):
        CostModel(base=-1.0)
    with pytest.raises(ValueError, match="a step must take time"):
        CostModel(base=0.0)
