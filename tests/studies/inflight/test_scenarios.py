"""The scenarios of the explorers differ as their names say."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from labcore.serving.engine.scheduler import POLICIES
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.router import ROUTERS
from labcore.studies.inflight import scenarios
from labcore.studies.inflight.gantt import busy

FAST = CostModel(base=4e-5, per_prefill_token=1e-6, per_decode_row=4e-6, per_context_token=1e-8)


@pytest.mark.parametrize("mix", scenarios.MIXES)
def test_lengths_are_those_of_the_mix(mix: str, seed: int) -> None:
    # Of 4,000 lengths the spread deviates by 0.006: the nearest bound is seven of these away.
    prompts, outputs = scenarios.lengths(mix, 4000, seed)
    assert len(prompts) == len(outputs) == 4000
    assert max(prompts) <= 48 and max(outputs) <= 64
    spread = statistics.stdev(outputs) / statistics.mean(outputs)
    low, high = {"all alike": (0, 0), "mixed": (0.3, 0.65), "long tail": (0.6, 1.2)}[mix]
    assert low <= spread <= high
    with pytest.raises(ValueError, match="mix"):
        scenarios.lengths("unlike", 3)


def test_a_faster_machine_gives_the_same_picture() -> None:
    """All times scale with the machine, so a rate over the capacity means the same."""
    slow = scenarios.scenario("max_utilization", 0.9, "mixed", 24)
    fast = scenarios.scenario("max_utilization", 0.9, "mixed", 24, cost=FAST)
    assert 100 * fast.seconds == pytest.approx(slow.seconds, rel=1e-6)
    assert len(fast.steps) == len(slow.steps) and fast.blocks == slow.blocks


def test_the_same_requests_come_sooner_or_later(seed: int) -> None:
    runs = [
        scenarios.scenario("static", rate, "mixed", 40, seed=seed) for rate in (0.5, 1.0)
    ]  # fmt: skip
    early, late = ([one.arrival for one in run.metrics] for run in reversed(runs))
    assert late == pytest.approx([2 * time for time in early])
    assert [(one.prompt, one.output) for one in runs[0].metrics] == [
        (one.prompt, one.output) for one in runs[1].metrics
    ]


def test_the_capacity_is_what_is_served_under_overload() -> None:
    for mix in scenarios.MIXES:
        run = scenarios.scenario("guaranteed_no_evict", 50.0, mix, 60, requests=48, blocks=False)
        assert run.requests_per_second == pytest.approx(scenarios.capacity(mix), rel=0.08)


def test_the_pools_are_too_few_about_enough_and_enough() -> None:
    few, enough = scenarios.POOLS[0], scenarios.POOLS[-1]
    small = scenarios.scenario("max_utilization", 2.0, "mixed", few)
    large = scenarios.scenario("max_utilization", 2.0, "mixed", enough)
    assert sum(one.preemptions for one in small.metrics) > 5
    assert sum(one.preemptions for one in large.metrics) == 0
    tight = scenarios.scenario("guaranteed_no_evict", 2.0, "mixed", few)
    assert busy(tight) < 0.6 * busy(small)


def test_a_grid_has_every_combination_and_static_is_never_ahead() -> None:
    found = scenarios.grid(FAST, rates=(0.5, 2.0), mixes=("long tail", "all alike"), pools=(24,))
    assert len(found) == len(POLICIES) * 2 * 2
    for (policy, rate, mix, pool), shown in found.items():
        assert shown.num_blocks == pool and len(shown.ends) == 24
        static = found["static", rate, mix, pool]
        assert shown.p50 <= static.p50 * 1.001 and shown.seconds <= static.seconds * 1.001
        assert policy == "static" or "idle" not in shown.shares
    assert found["static", 2.0, "long tail", 24].shares["idle"] > 0.15


def test_curves_have_every_time_and_grow_with_the_rate() -> None:
    found = scenarios.curves(mixes=("long tail",), rates=(0.3, 2.0), requests=40)
    assert set(found) == {(policy, "long tail") for policy in POLICIES}
    for by_rate in found.values():
        assert list(by_rate) == [0.3, 2.0]
        for measure in scenarios.MEASURES:
            low, high = by_rate[0.3][measure], by_rate[2.0][measure]
            assert low.p50 <= low.p99 and high.p50 <= high.p99 and low.p50 <= high.p50
    assert set(found["static", "long tail"][0.3]) == set(scenarios.MEASURES)


def test_the_opening_is_of_the_same_requests(seed: int) -> None:
    static, inflight = scenarios.opening(seed=seed)
    assert static.slots == 4 and len(static.metrics) == 12
    for one, two in zip(static.metrics, inflight.metrics, strict=True):
        assert (one.id, one.arrival, one.prompt, one.output) == (
            two.id, two.arrival, two.prompt, two.output
        )  # fmt: skip


@pytest.mark.parametrize("prompt", [500, 512, 77])
def test_a_long_prompt_takes_as_many_steps_as_chunks(prompt: int) -> None:
    found = scenarios.chunk_sizes(chunks=(16, 100, 512), rows=3, prompt=prompt)
    for chunk, told in found.items():
        steps = -(-prompt // chunk)
        pairs = zip(told.times, told.gaps, strict=True)
        slow = [gap for time, gap in pairs if time - gap >= -1e-9 and time <= told.ttft + 1e-9]
        assert len(slow) in (steps, steps - 1)  # it may have come during a step
        cost = scenarios.COST.per_prefill_token * min(chunk, prompt)
        assert all(gap > told.gaps[0] + 0.9 * cost for gap in slow[:-1])
        assert told.times == tuple(sorted(told.times)) and told.times[0] < 0 < told.ttft
        assert told.times[-1] > told.ttft and len(told.times) == len(told.gaps)
        assert told.worst == max(told.gaps) and told.chunk == chunk and told.prompt == prompt
        assert told.worst > told.usual
    assert found[16].worst <= found[100].worst <= found[512].worst
    assert found[16].ttft >= found[100].ttft >= found[512].ttft


@pytest.mark.parametrize("policy", ROUTERS)
def test_fleets_tell_what_the_routed_requests_did(policy: str) -> None:
    (found,) = scenarios.fleets(policies=(policy,), shares=(0.75,)).values()
    routed = scenarios.routed(policy, 0.75)
    assert found.sent == routed.counts and sum(found.sent) == 96
    assert (
        found.hit_rate == routed.hit_rate == sum(found.found) / (sum(found.found) + sum(found.read))
    )
    assert found.p99 == routed.summary()["ttft"]["p99"]
    begin = min(run.begin for run in routed.runs)
    for load, run in zip(found.loads, routed.runs, strict=True):
        assert load[0][0] == 0 and load[-1][1] == 0 and min(count for _, count in load) == 0
        held = sum(c * (later - t) for (t, c), (later, _) in pairwise(load))
        assert held == pytest.approx(sum(one.e2e or 0 for one in run.metrics), rel=1e-3)
        assert load[-1][0] == pytest.approx(run.end - begin, rel=1e-3)


def test_common_prefixes_hit_more_and_most_under_prefix_aware() -> None:
    found = scenarios.fleets(shares=(0.0, 0.5, 1.0))
    for policy in ROUTERS:
        rates = [found[policy, share].hit_rate for share in (0.0, 0.5, 1.0)]
        assert rates[0] == 0 and rates[0] < rates[1] < rates[2]
    for share in (0.5, 1.0):
        aware = found["prefix_aware", share].hit_rate
        assert aware > 1.2 * found["round_robin", share].hit_rate
        assert aware > 1.2 * found["least_loaded", share].hit_rate


def test_short_trace_has_mixed_steps_and_waiting_prompts() -> None:
    trace = scenarios.short_trace()
    assert len(trace) == 40 and all(one.budget == 48 for one in trace)
    assert any(one.decodes and one.chunks for one in trace)
    assert any(one.left for one in trace) and any(one.waiting for one in trace)
