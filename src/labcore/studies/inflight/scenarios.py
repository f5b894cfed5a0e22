"""Small simulated servers for interactive figures: policies, rates, lengths and pools.

Rates are fractions of a capacity, which makes the figures the same for slow and fast machines. 1.0
is what "guaranteed_no_evict" serves when all requests wait from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy

from labcore.checks import one_of, positive, positive_int
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from labcore.serving.metrics import RequestMetrics, summary
from labcore.serving.simulation.costs import CostModel, StepWork
from labcore.serving.simulation.router import ROUTERS, PrefixAware, Routed, route_requests
from labcore.serving.simulation.simulate import Run, simulate
from labcore.serving.simulation.workload import (
    Workload,
    bursts,
    fixed,
    lognormal,
    long_tail,
    poisson,
)
from labcore.studies.inflight.scenes import Scene, StepParts, scene, step_parts

__all__ = [
    "CHUNKS", "COST", "MEASURES", "MIXES", "POOLS", "RATES", "SHARES", "Fleet", "Gaps", "Quantiles",
    "capacity", "chunk_sizes", "curves", "fleets", "grid", "lengths", "long_prompt", "opening",
    "routed", "scenario", "short_trace",
]  # fmt: skip

COST = CostModel(base=4e-3, per_prefill_token=1e-4, per_decode_row=4e-4, per_context_token=1e-6)
"""A made-up machine, used without measurements: 4 ms per forward, 0.1 ms per prompt token."""

MIXES = ("all alike", "mixed", "long tail")
"""Distributions of output lengths: equal; lognormal; a few many times longer than most."""

RATES = (0.3, 0.5, 0.7, 0.9, 1.2, 2.0)
"""Arrivals per second, as fractions of the capacity."""

POOLS = (16, 24, 40)
"""Blocks in the pool: too few for the rows, about enough, enough for every promise."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Fractions of the prompts that begin with one of a few common prefixes."""

MEASURES = ("ttft", "tpot", "normalised", "queue")
"""A request's times: to the first token, between tokens, from arrival to end per output token, and
in the queue."""

CHUNKS = (16, 32, 64, 128, 256, 512)
"""Maximum tokens of a prompt per step."""

_SLOTS, _PAGE, _BUDGET, _MOST = 6, 16, 64, 64
_PREFIX, _OWN, _GROUPS, _REPLICA_SLOTS, _IMBALANCE = 240, 16, 6, 4, 2


def lengths(mix: str, n: int, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of n prompts and of n outputs for a name in `MIXES`."""
    one_of("mix", mix, MIXES)
    if mix == "all alike":
        return fixed(24, n), fixed(30, n)
    prompts = lognormal(24, n, seed, sigma=0.4, least=8, most=48)
    if mix == "mixed":
        return prompts, lognormal(24, n, seed + 1, sigma=0.6, least=4, most=_MOST)
    return prompts, long_tail(8, n, seed + 1, tail=0.8, most=_MOST)


def _scheduler(policy: str, pool: int, slots: int, budget: int = _BUDGET) -> Scheduler:
    return Scheduler(
        BlockPool(pool, _PAGE),
        policy=policy,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )


@lru_cache(maxsize=64)
def capacity(mix: str, cost: CostModel = COST, *, requests: int = 48, slots: int = _SLOTS) -> float:
    """Return the requests per second that "guaranteed_no_evict" serves if all wait from the start.

    The pool has room for every promise. mix: a name in `MIXES`. cost: the machine's cost model.
    """
    prompts, outputs = lengths(mix, requests)
    work = Workload((0.0,) * requests, prompts, outputs, max_tokens=_MOST)
    pool = slots * blocks_for(max(prompts) + _MOST, _PAGE)
    run = simulate(work, lambda: _scheduler("guaranteed_no_evict", pool, slots), cost)
    return run.requests_per_second


def scenario(
    policy: str,
    rate: float,
    mix: str,
    pool: int,
    *,
    cost: CostModel = COST,
    requests: int = 24,
    slots: int = _SLOTS,
    seed: int = 0,
    blocks: bool = True,
) -> Run:
    """Serve requests with random arrivals on one simulated server that doesn't know their lengths.

    policy: a name in `POLICIES`. rate: arrivals per second, as a fraction of `capacity`; it scales
    the arrival times of the same requests. mix: a name in `MIXES`. pool: number of blocks of 16
    tokens, at least 7: every request asks for at most 64 tokens, and prompts have at most 48.
    slots: rows. blocks: whether to keep the block map.
    """
    one_of("policy", policy, POLICIES)
    positive("rate", rate, "pass a share of the capacity")
    prompts, outputs = lengths(mix, requests, seed)
    second = poisson(1.0, requests, seed + 2)
    speed = rate * capacity(mix, cost, slots=slots)
    arrivals = tuple((time - second[0]) / speed for time in second)
    work = Workload(arrivals, prompts, outputs, max_tokens=_MOST, seed=seed)
    return simulate(work, lambda: _scheduler(policy, pool, slots), cost, blocks=blocks)


def opening(
    cost: CostModel = COST, *, requests: int = 12, slots: int = 4, seed: int = 10
) -> tuple[Run, Run]:
    """Run the same few long-tailed requests under "static" and under "guaranteed_no_evict".

    They arrive as fast as the second policy can serve them, and the pool has room for every
    promise.
    """
    pool = slots * blocks_for(48 + _MOST, _PAGE)
    static, inflight = (
        scenario(
            policy, 1.0, "long tail", pool,
            cost=cost, requests=requests, slots=slots, seed=seed, blocks=False,
        )
        for policy in ("static", "guaranteed_no_evict")
    )  # fmt: skip
    return static, inflight


def grid(
    cost: CostModel = COST,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    rates: Sequence[float] = RATES,
    mixes: Sequence[str] = MIXES,
    pools: Sequence[int] = POOLS,
    seed: int = 0,
) -> dict[tuple[str, float, str, int], Scene]:
    """Return scenes of all combinations, by (policy, rate, mix, pool); each takes about 0.02 s."""
    return {
        (policy, rate, mix, pool): scene(scenario(policy, rate, mix, pool, cost=cost, seed=seed))
        for policy in policies
        for rate in rates
        for mix in mixes
        for pool in pools
    }


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The p50 and p99 of a time, in seconds."""

    p50: float
    p99: float


def curves(
    cost: CostModel = COST,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    rates: Sequence[float] = RATES,
    mixes: Sequence[str] = MIXES,
    pool: int = POOLS[1],
    requests: int = 72,
    seed: int = 0,
) -> dict[tuple[str, str], dict[float, dict[str, Quantiles]]]:
    """Return latencies by (policy, mix), then by rate, then by a name in `MEASURES`."""
    options: dict[str, Any] = {"cost": cost, "requests": requests, "seed": seed, "blocks": False}
    return {
        (policy, mix): {
            rate: _times(scenario(policy, rate, mix, pool, **options).metrics) for rate in rates
        }
        for policy in policies
        for mix in mixes
    }


def _times(metrics: Sequence[RequestMetrics]) -> dict[str, Quantiles]:
    told = {
        name: Quantiles(found["p50"], found["p99"])
        for name, found in summary(metrics).items()
        if name in MEASURES
    }
    each = [one.e2e / one.output for one in metrics if one.e2e is not None and one.output]
    p50, p99 = numpy.quantile(each, (0.5, 0.99)).tolist()
    return {**told, "normalised": Quantiles(p50, p99)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Token times of rows that decode during a long prefill, in seconds from its arrival.

    chunk: maximum tokens of the long prompt per step. rows: number of rows that decode. prompt:
    tokens of the long prompt. times: when a row emits its tokens. gaps: the time since the token
    before each of them. ttft: the time to the long prompt's first token.
    """

    chunk: int
    rows: int
    prompt: int
    times: tuple[float, ...]
    gaps: tuple[float, ...]
    ttft: float

    @property
    def worst(self) -> float:
        """The longest gap."""
        return max(self.gaps)

    @property
    def usual(self) -> float:
        """The median of the gaps after the long prompt was read."""
        later = [
            gap for time, gap in zip(self.times, self.gaps, strict=True) if time - gap >= self.ttft
        ]
        return float(numpy.median(later))


def long_prompt(chunk: int, *, cost: CostModel = COST, rows: int = 5, prompt: int = 512) -> Gaps:
    """Simulate a long prompt that arrives while `rows` requests decode; chunk: tokens per step."""
    before, behind = 12, 20  # steps shown before and after its prefill
    positive_int("chunk", chunk)
    positive_int("rows", rows)
    step = cost.of(StepWork(forwards=1, decode=rows))
    begin = before * step
    said = before + -(-positive_int("prompt", prompt) // chunk) + 2 * behind
    prompts, outputs = (*fixed(8, rows), prompt), fixed(said, rows + 1)
    work = Workload((*(0.0,) * rows, begin), prompts, outputs)
    pool = sum(blocks_for(sum(one), _PAGE) for one in zip(prompts, outputs, strict=True))

    def scheduler() -> Scheduler:
        budget = max(prompt, 8 * rows) + rows  # large enough that only the chunk size matters
        return Scheduler(
            BlockPool(pool, _PAGE),
            max_num_seqs=rows + 1,
            max_num_batched_tokens=budget,
            chunk=chunk,
            enable_prefix_caching=False,
        )

    run = simulate(work, scheduler, cost)
    ttft = run.metrics[-1].ttft or 0.0
    watched = run.metrics[0].id
    said_at = [
        one.at + one.seconds - begin
        for one in run.steps
        if any(row.id == watched for row in one.decodes)
    ]
    shown = [
        (two, two - one) for one, two in pairwise(said_at) if two <= ttft + (behind + 0.5) * step
    ]
    return Gaps(
        chunk=chunk,
        rows=rows,
        prompt=prompt,
        times=tuple(time for time, _ in shown),
        gaps=tuple(gap for _, gap in shown),
        ttft=ttft,
    )


def chunk_sizes(
    cost: CostModel = COST, *, chunks: Sequence[int] = CHUNKS, rows: int = 5, prompt: int = 512
) -> dict[int, Gaps]:
    """Run `long_prompt` for each chunk size."""
    return {chunk: long_prompt(chunk, cost=cost, rows=rows, prompt=prompt) for chunk in chunks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Replicas behind a router.

    loads: for each replica, (time in seconds, requests in flight from then on). sent: requests per
    replica. read, found: prompt tokens that each replica read, and that it found in its cache.
    hit_rate: found / (found + read) over all replicas. p50, p99: of the TTFT, in seconds. seconds:
    duration of the run.
    """

    loads: tuple[tuple[tuple[float, int], ...], ...]
    sent: tuple[int, ...]
    read: tuple[int, ...]
    found: tuple[int, ...]
    hit_rate: float
    p50: float
    p99: float
    seconds: float


def _replica() -> Scheduler:
    pool = _REPLICA_SLOTS * blocks_for(_PREFIX + _OWN + _MOST, _PAGE)
    return Scheduler(
        BlockPool(pool, _PAGE), max_num_seqs=_REPLICA_SLOTS, max_num_batched_tokens=128
    )


@lru_cache(maxsize=16)
def _replica_capacity(cost: CostModel, requests: int, seed: int) -> float:
    """Return one replica's requests per second if all wait and no prefix is shared."""
    prompts, outputs = _fleet_lengths(requests, seed)
    work = Workload((0.0,) * requests, prompts, outputs, max_tokens=_MOST, seed=seed)
    return simulate(work, _replica, cost).requests_per_second


def _fleet_lengths(requests: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    outputs = long_tail(8, requests, seed + 1, tail=0.8, most=_MOST)
    return fixed(_PREFIX + _OWN, requests), outputs


def routed(
    policy: str,
    share: float,
    *,
    cost: CostModel = COST,
    replicas: int = 4,
    requests: int = 96,
    load: float = 1.0,
    seed: int = 0,
) -> Routed:
    """Serve requests on several replicas; a share of them begins with one of six common prefixes.

    policy: a name in `ROUTERS`; "prefix_aware" has an imbalance of 2 requests. share: 0 to 1. Times
    and lengths are the same for every share: 256 prompt tokens, 240 of them prefix, and
    long-tailed outputs. load: arrivals per second, relative to what the replicas serve without a
    common prefix.
    """
    one_of("policy", policy, ROUTERS)
    prompts, outputs = _fleet_lengths(requests, seed)
    speed = load * replicas * _replica_capacity(cost, requests, seed)
    work = Workload(
        poisson(speed, requests, seed + 2), prompts, outputs,
        max_tokens=_MOST, prefix=_PREFIX, groups=_GROUPS, sharing=share, seed=seed,
    )  # fmt: skip
    router = PrefixAware(_IMBALANCE) if policy == "prefix_aware" else policy
    return route_requests(work, replicas, _replica, cost, policy=router)


def fleets(
    cost: CostModel = COST,
    *,
    policies: Sequence[str] = tuple(ROUTERS),
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> dict[tuple[str, float], Fleet]:
    """Return the results of `routed` as plain numbers, by (policy, share)."""
    return {
        (policy, share): _fleet(routed(policy, share, cost=cost, seed=seed))
        for policy in policies
        for share in shares
    }


def _fleet(found: Routed) -> Fleet:
    used = [run for run in found.runs if run.metrics]
    begin = min(run.begin for run in used)
    loads = []
    for run in found.runs:
        changes = {0.0: 0}
        for one in run.metrics:
            for time, change in ((one.arrival, 1), (one.arrival + (one.e2e or 0.0), -1)):
                at = float(f"{time - begin:.5g}")
                changes[at] = changes.get(at, 0) + change
        times = sorted(changes)
        loads.append(tuple(zip(times, accumulate(changes[time] for time in times), strict=True)))
    ttft = found.summary()["ttft"]
    return Fleet(
        loads=tuple(loads),
        sent=found.counts,
        read=tuple(sum(step.prefill_tokens for step in run.steps) for run in found.runs),
        found=tuple(sum(one.cached for one in run.metrics) for run in found.runs),
        hit_rate=found.hit_rate,
        p50=ttft["p50"],
        p99=ttft["p99"],
        seconds=found.seconds,
    )


def short_trace(
    policy: str = "guaranteed_no_evict", *, cost: CostModel = COST, most: int = 40
) -> list[StepParts]:
    """Return the steps of a server that reads prompts of up to 120 tokens, 48 tokens per step."""
    budget, n = 48, 12
    prompts = lognormal(50, n, 0, sigma=0.6, least=8, most=120)
    outputs = lognormal(14, n, 1, sigma=0.6, least=4, most=40)
    pool = _SLOTS * blocks_for(120 + 40, _PAGE)
    speed = 1 / cost.of(StepWork(forwards=2, prefill=50, decode=10))
    work = Workload(bursts(speed, n, 4, size=3), prompts, outputs, max_tokens=40)
    run = simulate(work, lambda: _scheduler(policy, pool, _SLOTS, budget), cost)
    return step_parts(run.steps, budget, most=most)
