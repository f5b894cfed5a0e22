"""The same requests under every policy, pool, budget and chunk: what two policies make of them.

Loads are fractions of a capacity, which makes the figures the same for slow and fast machines: 1.0
is what "guaranteed_no_evict" serves with room for every promise when all requests wait from the
start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import FREE, Run, simulate
from labcore.serving.simulation.workload import Workload, lognormal, long_tail, poisson
from labcore.studies.inflight.scenes import Bar, scene

__all__ = ["BUDGETS", "CHUNKS", "COST", "LOADS", "POOLS", "ROWS", "Rival", "rival", "rivals"]

COST = CostModel(base=4e-3, per_prefill_token=1e-4, per_decode_row=4e-4)
"""A made-up machine: 4 ms per forward, 0.1 ms per prompt token, 0.4 ms per request that decodes."""

LOADS = (0.5, 0.8, 1.2)
"""Arrivals per second, as fractions of the capacity."""

POOLS = (16, 28, 84)
"""Blocks in the pool: enough for one long request, for some rows, for every promise."""

BUDGETS = (16, 64, 192)
"""The most tokens per step."""

CHUNKS = (16, 64, 192)
"""The most tokens of one prompt per step; the largest holds every prompt."""

ROWS = 6
_PAGE, _REQUESTS, _LONG, _MOST = 16, 24, 160, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """What one policy made of the requests. Times are in seconds from the first arrival.

    Those of bars, blocks and the end are rounded to 0.1 ms.

    bars: what each row did. held: (time, blocks held from then on). seconds: to the last end.
    tokens_per_second: of the outputs. ttft: the longest time to a first token. gap: the longest
    time between two tokens of one output. idle: the share of decode rows computed for ended
    requests. again: tokens read again after a preemption.
    """

    bars: tuple[Bar, ...]
    held: tuple[tuple[float, int], ...]
    seconds: float
    tokens_per_second: float
    ttft: float
    gap: float
    idle: float
    again: int


def _work(load: float, speed: float) -> Workload:
    """Return the requests: every fifth prompt is long, and so are a few outputs."""
    prompts = [
        _LONG if at % 5 == 2 else length
        for at, length in enumerate(lognormal(24, _REQUESTS, 7, sigma=0.4, least=8, most=48))
    ]
    outputs = long_tail(8, _REQUESTS, 3, tail=0.8, most=_MOST)
    second = poisson(1.0, _REQUESTS, 11)
    arrivals = tuple((time - second[0]) / (load * speed) if load else 0.0 for time in second)
    return Workload(arrivals, tuple(prompts), outputs, max_tokens=_MOST)


def _served(policy: str, work: Workload, pool: int, budget: int, chunk: int) -> Run:
    def scheduler() -> Scheduler:
        return Scheduler(
            BlockPool(pool, _PAGE), policy=policy, max_num_seqs=ROWS,
            max_num_batched_tokens=budget, chunk=chunk, enable_prefix_caching=False,
        )  # fmt: skip

    return simulate(work, scheduler, COST, blocks=True)


@lru_cache(maxsize=1)
def _capacity() -> float:
    """Return the requests per second that are served without pressure if all wait at first."""
    room = ROWS * blocks_for(_LONG + _MOST, _PAGE)
    work = _work(0, 1.0)
    return _served("guaranteed_no_evict", work, room, 192, 192).requests_per_second


def rival(policy: str, load: float, pool: int, budget: int, chunk: int) -> Rival:
    """Serve the requests by one policy on the simulated machine.

    load: arrivals over the capacity. pool: blocks of 16 tokens, at least 14. budget, chunk: the
    most tokens per step, and of one prompt in it. Raises ValueError for a pool that is too small.
    """
    if pool < (least := blocks_for(_LONG + _MOST - 1, _PAGE)):
        raise ValueError(
            f"pool must be at least {least} blocks, for the longest request, got {pool}"
        )
    run = _served(policy, _work(load, _capacity()), pool, budget, chunk)
    shown = scene(run)
    held = [(0.0, 0)]
    for step, blocks in zip(run.steps, run.blocks, strict=True):
        count = sum(block != FREE for block in blocks)  # while the step runs
        if count != held[-1][1]:
            held.append((round(step.at - run.begin, 4), count))
    return Rival(
        bars=tuple(
            replace(one, begin=round(one.begin, 4), end=round(one.end, 4)) for one in shown.bars
        ),
        held=tuple(held),
        seconds=round(shown.seconds, 4),
        tokens_per_second=run.tokens_per_second,
        ttft=max(one.ttft for one in run.metrics if one.ttft is not None),
        gap=_longest_gap(run),
        idle=run.wasted,
        again=shown.recomputed,
    )


def _longest_gap(run: Run) -> float:
    told: dict[str, list[float]] = {}
    for step in run.steps:
        drew = [one.id for one in step.decodes] + [one.id for one in step.chunks if one.last]
        for id in drew:
            told.setdefault(id, []).append(step.at + step.seconds)
    return max(two - one for times in told.values() for one, two in pairwise(times))


@lru_cache(maxsize=1)
def rivals() -> dict[tuple[str, float, int, int, int], Rival]:
    """Return `rival` for every policy, load, pool, budget and chunk.

    A chunk above the budget does what one of the budget's size does, so those are left out.
    """
    settings = product(POLICIES, LOADS, POOLS, BUDGETS, CHUNKS)
    return {setting: rival(*setting) for setting in settings if setting[4] <= setting[3]}
