"""Scenes say what their runs did, in fewer numbers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import Run, simulate
from labcore.serving.simulation.workload import Workload, lognormal, long_tail, poisson
from labcore.studies.inflight.gantt import busy, timeline
from labcore.studies.inflight.scenes import scene

COST = CostModel(base=0.01, per_prefill_token=1e-4, per_decode_row=5e-4)


def served(policy: str, seed: int, *, rate: float = 9.0, prefix: int = 0, n: int = 17) -> Run:
    prompts, outputs = lognormal(14, n, seed, most=40), long_tail(3, n, seed + 1, most=30)
    work = Workload(
        poisson(rate, n, seed), prompts, outputs, max_tokens=32, prefix=prefix, seed=seed
    )
    return simulate(
        work,
        lambda: Scheduler(
            BlockPool(26, 4),
            policy=policy,
            max_num_seqs=3,
            max_num_batched_tokens=13,
            enable_prefix_caching=prefix > 0,
        ),
        COST,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scene_has_the_run_s_times_and_rates(policy: str, seed: int) -> None:
    run = served(policy, seed)
    shown = scene(run)
    assert shown.slots == 3
    assert shown.seconds == pytest.approx(run.seconds, rel=1e-3)
    assert shown.tokens_per_second == pytest.approx(run.tokens_per_second, rel=1e-3)
    told = run.summary()["e2e"]
    assert (shown.p50, shown.p99) == pytest.approx((told["p50"], told["p99"]), rel=1e-3)
    assert sum(shown.shares.values()) == pytest.approx(1)
    work = sum(shown.shares.get(kind, 0) for kind in ("prefill", "decode", "recompute"))
    assert work == pytest.approx(busy(run))
    assert shown.preemptions == sum(one.preemptions for one in run.metrics)
    assert shown.recomputed == sum(one.recomputed for one in run.metrics)
    for at, one in enumerate(run.metrics):
        assert shown.arrivals[at] == pytest.approx(one.arrival - run.begin, rel=1e-3, abs=1e-9)
        assert shown.ends[at] == pytest.approx(one.arrival + one.e2e - run.begin, rel=1e-3)
    assert max(shown.ends) == pytest.approx(shown.seconds, rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_bars_of_a_row_stay_apart_and_keep_each_kind_s_time(policy: str, seed: int) -> None:
    run = served(policy, seed)
    shown = scene(run)
    for slot in range(3):
        bars = [bar for bar in shown.bars if bar.slot == slot]
        assert all(one.end <= two.begin * (1 + 1e-3) + 1e-9 for one, two in pairwise(bars))
        for one, two in pairwise(bars):
            assert (one.number, one.kind) != (two.number, two.kind) or two.begin > one.end
    for kind in {span.kind for span in timeline(run) if span.slot >= 0}:
        whole = sum(span.end - span.begin for span in timeline(run) if span.kind == kind)
        assert sum(b.end - b.begin for b in shown.bars if b.kind == kind) == pytest.approx(
            whole, rel=0.02, abs=2e-3 * run.seconds
        )


def test_bars_with_only_an_engines_gaps_between_them_are_one(seed: int) -> None:
    """As if each step took 2 % of its time around its forward: a replay has such gaps."""
    run = served("guaranteed_no_evict", seed)
    cut = []
    for span in timeline(run):
        if span.slot < 0:
            cut.append(span)
            continue
        parts = random.Random(seed).randint(2, 6)
        edges = [span.begin + (span.end - span.begin) * at / parts for at in range(parts + 1)]
        cut += [
            replace(span, begin=low, end=low + 0.98 * (high - low)) for low, high in pairwise(edges)
        ]
    whole, parted = scene(run), scene(run, bars=cut)
    assert [(b.number, b.kind, b.slot) for b in parted.bars] == [
        (b.number, b.kind, b.slot) for b in whole.bars
    ]


def test_the_queue_is_as_long_as_those_who_wait(seed: int) -> None:
    run = served("static", seed, rate=40)
    shown = scene(run)
    assert shown.waiting[0][0] == 0 and shown.waiting[-1][1] == 0
    assert all(one < two for (one, _), (two, _) in pairwise(shown.waiting))
    held = sum(count * (later - time) for (time, count), (later, _) in pairwise(shown.waiting))
    assert held == pytest.approx(math.fsum(one.queue or 0 for one in run.metrics), rel=1e-2)


def test_a_scene_needs_requests(seed: int) -> None:
    with pytest.raises(ValueError, match="a scene needs a run .* got 0 requests"):
        scene(replace(served("static", seed), metrics=()))
