"""Beyond one machine: simulated replicas behind a router that picks one for each request.

Each replica has its own scheduler, pool and prefix cache; nothing moves between replicas. A router
sees how many requests each replica has in flight and remembers what it sent where, but it doesn't
know output lengths. Cache-aware routing weighs the cache as much as the load (Zheng et al., 2024,
SGLang, arXiv 2312.07104; Srivatsa et al., 2024, Preble, arXiv 2407.00023).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from labcore.checks import one_of, positive_int
from labcore.serving.engine.blocks import chain_hashes
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import RequestMetrics, summary
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import Run, Simulator
from labcore.serving.simulation.workload import Workload

__all__ = [
    "ROUTERS",
    "LeastLoaded",
    "PrefixAware",
    "RoundRobin",
    "Routed",
    "Router",
    "route_requests",
]


class Router(Protocol):
    """A policy that picks a replica for each arriving request."""

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:
        """Return the index of the replica that serves the request."""


class RoundRobin:
    """Pick the replicas in turn, regardless of their load."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:  # noqa: ARG002
        """Return the replica after that of the last request."""
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastLoaded:
    """Pick the replica with the fewest requests in flight; break ties by the fewest sent so far."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:  # noqa: ARG002
        """Return the replica with the fewest requests in flight."""
        chosen = min(
            range(len(replicas)),
            key=lambda place: (replicas[place].outstanding, self._sent[place], place),
        )
        self._sent[chosen] += 1
        return chosen


class PrefixAware:
    """Pick the replica that received the longest prefix of the prompt, unless it is much busier.

    imbalance: how many more requests in flight than the least loaded replica a replica may have
    and still be picked for its cache. For each replica, the router remembers the blocks it sent
    last, as many as the replica's pool has; it can't know what the replica evicted.
    """

    def __init__(self, imbalance: int = 8) -> None:
        if isinstance(imbalance, bool) or not isinstance(imbalance, int) or imbalance < 0:
            raise ValueError(f"imbalance must be a whole number, at least 0, got {imbalance!r}")
        self.imbalance = imbalance
        self._sent: Counter[int] = Counter()
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:
        """Prefer the longest prefix, then the fewest in flight, then the fewest sent so far."""
        loads = [replica.outstanding for replica in replicas]
        near = [at for at, load in enumerate(loads) if load <= min(loads) + self.imbalance]
        digests = {at: _digests(request, replicas[at]) for at in near}
        chosen = min(
            near, key=lambda at: (-self._matched(at, digests[at]), loads[at], self._sent[at], at)
        )
        self._sent[chosen] += 1
        self._remember(chosen, digests[chosen], replicas[chosen].scheduler.pool.num_blocks)
        return chosen

    def _matched(self, place: int, digests: Sequence[bytes]) -> int:
        known = self._known.get(place, OrderedDict())
        return next((n for n, one in enumerate(digests) if one not in known), len(digests))

    def _remember(self, place: int, digests: Sequence[bytes], most: int) -> None:
        known = self._known.setdefault(place, OrderedDict())
        for digest in reversed(digests):  # the beginning of a prefix is forgotten last
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > most:
            known.popitem(last=False)


def _digests(request: Request, replica: Simulator) -> list[bytes]:
    """Return the digests of the full blocks that may be cached; the last token never is."""
    return chain_hashes(request.prompt[:-1], replica.scheduler.pool.block_size)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
"""Routers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What several replicas did. assigned: each request's replica, by id. runs: each replica's."""

    assigned: Mapping[str, int]
    runs: tuple[Run, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of requests sent to each replica."""
        sent = Counter(self.assigned.values())
        return tuple(sent[place] for place in range(len(self.runs)))

    @property
    def metrics(self) -> tuple[RequestMetrics, ...]:
        """The metrics of all requests, in order of arrival."""
        told = {one.id: one for run in self.runs for one in run.metrics}
        return tuple(told[id] for id in self.assigned)

    @property
    def seconds(self) -> float:
        """The time from the first arrival to the last end, over all replicas."""
        used = [run for run in self.runs if run.metrics]
        return max((run.end for run in used), default=0.0) - min(
            (run.begin for run in used), default=0.0
        )

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all replicas together; NaN if no time passed."""
        total = sum(run.output_tokens for run in self.runs)
        return total / self.seconds if self.seconds else math.nan

    @property
    def hit_rate(self) -> float:
        """Cached tokens over cached plus prefilled tokens; NaN if there are none."""
        found = sum(one.cached for one in self.metrics)
        read = sum(step.prefill_tokens for run in self.runs for step in run.steps)
        return found / (found + read) if found + read else math.nan

    def summary(self) -> dict[str, dict[str, float]]:
        """Return count, mean, p50 and p99 of queue, ttft, tpot and e2e; see `metrics.summary`."""
        return summary(self.metrics)


def route_requests(
    requests: Workload | Sequence[Request],
    replicas: int,
    scheduler: Callable[[], Scheduler],
    cost: CostModel | Sequence[CostModel],
    *,
    policy: str | Router = "round_robin",
    lengths: Mapping[str, int] | None = None,
    residuals: Sequence[float] = (),
    seed: int = 0,
) -> Routed:
    """Serve the requests on simulated replicas; the policy picks a replica when a request arrives.

    scheduler: makes a replica's scheduler. cost: one for all replicas, or one per replica if the
    machines differ. policy: a name in `ROUTERS`, or a router. A request that finds its replica's
    queue full is rejected, not sent to another replica. lengths, residuals, seed: as in `simulate`;
    each replica draws with its own seed.
    Raises ValueError for an unknown policy, or if there isn't one cost per replica.
    """
    positive_int("replicas", replicas)
    router = ROUTERS[one_of("policy", policy, ROUTERS)]() if isinstance(policy, str) else policy
    costs = [cost] * replicas if isinstance(cost, CostModel) else list(cost)
    if len(costs) != replicas:
        raise ValueError(
            f"cost must be one cost model, or one for each of {replicas} replicas, got {len(costs)}"
        )
    if isinstance(requests, Workload):
        lengths = requests.lengths if lengths is None else lengths
        requests = requests.requests()
    servers = [
        Simulator(scheduler(), one, lengths, residuals=residuals, seed=seed + place)
        for place, one in enumerate(costs)
    ]
    assigned: dict[str, int] = {}
    for request in sorted(requests, key=lambda one: one.arrival):
        for server in servers:
            server.until(request.arrival)
        assigned[request.id] = router.choose(request, servers)
        servers[assigned[request.id]].submit(request)
    return Routed(assigned=assigned, runs=tuple(server.run() for server in servers))
