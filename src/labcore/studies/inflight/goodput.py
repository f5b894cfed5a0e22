"""Prompts and outputs on the same replicas, or apart: which keeps its promises at which load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import RequestMetrics
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.disaggregation import disaggregate
from labcore.serving.simulation.router import route_requests
from labcore.serving.simulation.workload import Workload, lognormal, poisson
from labcore.studies.inflight.rivals import COST

__all__ = ["GOAL", "PROMPTS", "RATES", "TRANSFERS", "WAYS", "Times", "attained", "best", "sweep"]

WAYS = ("together, whole prompts", "together, chunks of 64", "apart")
"""Two replicas that do everything, without and with chunks; or one for prompts, one for outputs."""

PROMPTS = (128, 512)
"""Mean tokens of a prompt; outputs have 32 on average."""

RATES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Requests per second at both replicas together."""

TRANSFERS = (10, 100)
"""Microseconds to send one token's keys and values to another replica."""

GOAL = 0.9
"""The share of requests that must meet both limits for a load to count."""

_REQUESTS, _BLOCKS, _ROWS, _WHOLE = 60, 2000, 16, 2048


@dataclass(frozen=True, slots=True)
class Times:
    """For each request of a run, the seconds to its first token, and per token after it."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]

    @classmethod
    def of(cls, metrics: Sequence[RequestMetrics]) -> Times:
        """Return the times of requests; without a first token, one meets no limit.

        A single token has no time after it, and meets that limit.
        """
        return cls(
            tuple(math.inf if one.ttft is None else one.ttft for one in metrics),
            tuple(one.tpot or 0.0 for one in metrics),
        )


def _scheduler(chunk: int) -> Scheduler:
    return Scheduler(
        BlockPool(_BLOCKS, 16), max_num_seqs=_ROWS, max_num_batched_tokens=_WHOLE, chunk=chunk,
        enable_prefix_caching=False,
    )  # fmt: skip


def _run(way: str, prompt: int, rate: float, transfer: float, cost: CostModel) -> Times:
    work = Workload(
        poisson(rate, _REQUESTS, 1),
        lognormal(prompt, _REQUESTS, 2, sigma=0.5, least=prompt // 4, most=3 * prompt),
        lognormal(32, _REQUESTS, 3, sigma=0.5, least=4, most=128),
        max_tokens=128,
    )
    if way == "apart":
        run = disaggregate(work, lambda: _scheduler(_WHOLE), cost, transfer=transfer)
        return Times.of(run.metrics)
    chunk = _WHOLE if way.endswith("whole prompts") else 64
    routed = route_requests(work, 2, lambda: _scheduler(chunk), cost, policy="least_loaded")
    return Times.of(routed.metrics)


@lru_cache(maxsize=1)
def sweep(cost: CostModel = COST) -> dict[tuple[str, int, int], dict[float, Times]]:
    """Return times by (way, prompt, transfer) and rate; only replicas apart send anything."""
    told: dict[tuple[str, int, int], dict[float, Times]] = {}
    for way, prompt, transfer in product(WAYS, PROMPTS, TRANSFERS):
        known = None if way == "apart" else told.get((way, prompt, TRANSFERS[0]))
        told[way, prompt, transfer] = known or {
            rate: _run(way, prompt, rate, 1e-6 * transfer, cost) for rate in RATES
        }
    return told


def attained(times: Times, *, ttft: float, tpot: float) -> float:
    """Return the share of requests that met both limits, in seconds (the SLO attainment)."""
    met = [a <= ttft and b <= tpot for a, b in zip(times.ttft, times.tpot, strict=True)]
    return sum(met) / len(met)


def best(by_rate: Mapping[float, Times], *, ttft: float, tpot: float) -> float:
    """Return the goodput: the highest rate up to which GOAL of the requests met both limits; or 0.

    Both replicas count as one server; DistServe divides by the number of GPUs (Zhong et al., OSDI
    2024, arXiv 2401.09670).
    """
    kept = 0.0
    for rate in sorted(by_rate):
        if attained(by_rate[rate], ttft=ttft, tpot=tpot) < GOAL:
            break
        kept = rate
    return kept
