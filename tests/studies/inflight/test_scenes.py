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
from labcore.serving.simulation.simulate import CACHED, FREE, SHARED, Run, simulate
from labcore.serving.simulation.workload import Workload, lognormal, long_tail, poisson
from labcore.studies.inflight.gantt import busy, timeline
from labcore.studies.inflight.scenes import PROMISED, scene, step_parts

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
        blocks=True,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scene_has_the_run_s_times_and_rates(policy: str, seed: int) -> None:
    run = served(policy, seed)
    shown = scene(run)
    assert shown.slots == 3 and shown.num_blocks == 26
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


@pytest.mark.parametrize("policy", POLICIES)
def test_the_map_shows_who_holds_a_block_at_that_time(policy: str, seed: int) -> None:
    run = served(policy, seed)
    columns = 31
    shown = scene(run, columns=columns)
    assert len(shown.blocks) == 26 and {len(row) for row in shown.blocks} == {columns}
    promised = 0
    for column in range(columns):
        time = run.begin + (column + 0.5) / columns * run.seconds
        at = max((n for n, step in enumerate(run.steps) if step.at <= time), default=None)
        here = [row[column] for row in shown.blocks]
        if at is None or time > run.steps[at].at + run.steps[at].seconds + 0.005 * run.seconds:
            assert set(here) <= {FREE, CACHED}
            continue
        for told, was in zip(here, run.blocks[at], strict=True):
            assert told == was or (told == PROMISED and was in (FREE, CACHED))
        assert here.count(PROMISED) == run.promised[at]
        promised += here.count(PROMISED)
    assert bool(promised) == POLICIES[policy].promises


def test_a_shared_prefix_is_shown_as_shared_and_kept(seed: int) -> None:
    shown = scene(served("max_utilization", seed, prefix=8, rate=30), columns=90)
    codes = {code for row in shown.blocks for code in row}
    assert SHARED in codes and CACHED in codes


def test_runs_may_lack_a_map_but_not_requests(seed: int) -> None:
    run = served("static", seed)
    assert scene(replace(run, blocks=(), promised=())).blocks == ()
    with pytest.raises(ValueError, match="a scene needs a run .* got 0 requests"):
        scene(replace(run, metrics=()))
    with pytest.raises(ValueError, match="columns"):
        scene(run, columns=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_parts_of_a_step_add_up(policy: str, seed: int) -> None:
    run = served(policy, seed, rate=30)
    parts = step_parts(run.steps, 13, most=len(run.steps))
    assert len(parts) == len(run.steps)
    for one, record in zip(parts, run.steps, strict=True):
        read = sum(count for _, count in one.chunks)
        assert sum(one.decodes) + read == record.tokens <= one.budget == 13
        assert one.free + one.held + one.cached == 26 and one.waiting == record.waiting
        assert {number for number, _ in one.left} <= {number for number, _ in one.chunks}
    for at, record in enumerate(run.steps):
        for chunk, (number, _) in zip(record.chunks, parts[at].chunks, strict=True):
            assert (number in dict(parts[at].left)) <= (not chunk.last)
    if POLICIES[policy].promises:  # nobody starts over: the rest of a prompt is what is read later
        lengths = {one.id: one.prompt for one in run.metrics}
        for at, record in enumerate(run.steps):
            for chunk, (number, count) in zip(record.chunks, parts[at].chunks, strict=True):
                rest = lengths[chunk.id] - chunk.start - count
                assert dict(parts[at].left).get(number, 0) == rest
    assert step_parts(run.steps, 13, first=2, most=3) == parts[2:5]
    with pytest.raises(ValueError, match="skip fewer"):
        step_parts(run.steps, 13, first=len(run.steps))
