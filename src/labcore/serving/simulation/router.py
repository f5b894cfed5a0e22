"""Past one machine: simulated replicas behind a router that picks one for each request.

A replica has its own scheduler, pool and cache of prefixes; nothing moves between them. A router
sees how many requests each has under way, and remembers what it sent where; it knows no lengths of
outputs. That the cache decides as much as the load is the point of cache-aware routing (Zheng et
al., 2024, SGLang, arXiv 2312.07104; Srivatsa et al., 2024, Preble, arXiv 2407.00023).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from labcore.checks import one_of, positive_int
from labcore.serving.cache.blocks import chain_hashes
from labcore.serving.engine.metrics import RequestMetrics, summary
from labcore.serving.engine.requests import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import Run, Simulator
from labcore.serving.simulation.workload import Workload

__all__ = ["ROUTERS", "LeastLoaded", "PrefixAware", "RoundRobin", "Routed", "Router", "route"]


class Router(Protocol):
    """Picks a replica for each request, as it comes."""

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:
        """The place of the replica that serves the request."""


class RoundRobin:
    """One after the other, whatever they are doing."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:  # noqa: ARG002
        """The one behind that of the last request."""
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastLoaded:
    """The one with the fewest requests under way; of equals the one that was sent the fewest."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:  # noqa: ARG002
        """The shortest queue."""
        chosen = min(
            range(len(replicas)),
            key=lambda place: (replicas[place].outstanding, self._sent[place], place),
        )
        self._sent[chosen] += 1
        return chosen


class PrefixAware:
    """The one that was sent the longest prefix of the prompt, among those not much busier.

    imbalance: requests that a replica may have under way beyond the least loaded one and still be
    chosen for its cache. The router remembers, for each replica, as many of the last blocks that
    it sent there as the replica's pool has; what the replica evicted it cannot know.
    """

    def __init__(self, imbalance: int = 8) -> None:
        if isinstance(imbalance, bool) or not isinstance(imbalance, int) or imbalance < 0:
            raise ValueError(f"imbalance must be a whole number, at least 0, got {imbalance!r}")
        self.imbalance = imbalance
        self._sent: Counter[int] = Counter()
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:
        """The longest prefix, then the shortest queue, then the one that was sent the fewest."""
        loads = [replica.outstanding for replica in replicas]
        near = [at for at, load in enumerate(loads) if load <= min(loads) + self.imbalance]
        digests = {at: _digests(request, replicas[at]) for at in near}
        chosen = min(
            near, key=lambda at: (-self._matched(at, digests[at]), loads[at], self._sent[at], at)
        )
        self._sent[chosen] += 1
        self._remember(chosen, digests[chosen], replicas[chosen].scheduler.pool.count)
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
    """Of the prompt's full blocks that a replica may find in its cache; the last token never is."""
    scheduler = replica.scheduler
    return chain_hashes(request.prompt[:-1], scheduler.pool.page, scheduler.salt)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
"""Routers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What several replicas did. assigned: the replica of each request, by id. runs: of each."""

    assigned: Mapping[str, int]
    runs: tuple[Run, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Requests that were sent to each replica."""
        sent = Counter(self.assigned.values())
        return tuple(sent[place] for place in range(len(self.runs)))

    @property
    def metrics(self) -> tuple[RequestMetrics, ...]:
        """Of all requests, in the order of arrival."""
        told = {one.id: one for run in self.runs for one in run.metrics}
        return tuple(told[id] for id in self.assigned)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end, over all replicas."""
        used = [run for run in self.runs if run.metrics]
        return max((run.end for run in used), default=0.0) - min(
            (run.begin for run in used), default=0.0
        )

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of all replicas together; NaN where no time went by."""
        total = sum(run.output_tokens for run in self.runs)
        return total / self.seconds if self.seconds else math.nan

    @property
    def hit_rate(self) -> float:
        """Tokens found in a cache, over those that were found or read in chunks; NaN for none."""
        found = sum(one.cached for one in self.metrics)
        read = sum(step.prefill_tokens for run in self.runs for step in run.steps)
        return found / (found + read) if found + read else math.nan

    def summary(self) -> dict[str, dict[str, float]]:
        """Count, mean, p50 and p99 of queue, ttft, tpot and e2e; see `metrics.summary`."""
        return summary(self.metrics)


def route(
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
    """Serve the requests on simulated replicas, each where the policy sends it on arrival.

    scheduler: makes the scheduler of a replica. cost: of all, or one a replica, for machines that
    differ. policy: a name of `ROUTERS`, or a router. A request that finds its replica's queue full
    is turned away and not sent to another. lengths, residuals, seed: as in `simulate`; each
    replica draws by a seed of its own.
    Raises ValueError for an unknown policy, and for other than one cost a replica.
    """
    positive_int("replicas", replicas)
    router = ROUTERS[one_of("policy", policy, ROUTERS)]() if isinstance(policy, str) else policy
    costs = [cost] * replicas if isinstance(cost, CostModel) else list(cost)
    if len(costs) != replicas:
        raise ValueError(
            f"cost must be one, or one for each of {replicas} replicas, got {len(costs)}"
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
