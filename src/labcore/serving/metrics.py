"""What an engine or a simulated server did: a record of each step, and the times of each request.

Times are in seconds on the server's clock unless a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from labcore.serving.engine.plan import Chunk, Decode, StepPlan, StepResult
from labcore.serving.engine.request import State
from labcore.serving.engine.scheduler import Scheduler

__all__ = [
    "EngineCounters",
    "RequestMetrics",
    "Snapshot",
    "StepRecord",
    "goodput",
    "summary",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step.

    step: counts from 0. at: when it began. seconds: how long it took; an engine measures this on
    the machine's clock, whatever its own clock is. chunks, decodes: what was read, as in the plan.
    tokens: how many tokens were read. waiting, running: requests after the step. free, held,
    cached: blocks of the pool after it. idle: rows of ended requests that a static batch computed.
    admitted, preempted, expired: requests that were admitted, lost their blocks, or were cut off
    by their deadline. emitted: tokens added to outputs. drafted, accepted: drafted tokens that were
    verified, and those of them that were accepted. failed: requests that an error ended.
    """

    step: int
    at: float
    seconds: float
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    tokens: int
    waiting: int
    running: int
    free: int
    held: int
    cached: int
    idle: int = 0
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    failed: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        results: Mapping[str, StepResult],
        scheduler: Scheduler,
        *,
        at: float,
        seconds: float,
    ) -> StepRecord:
        """Return the record of a plan that `scheduler` has just committed with `results`."""
        pool, brought = scheduler.pool, [len(result.tokens) for result in results.values()]
        return cls(
            step=plan.step,
            at=at,
            seconds=seconds,
            chunks=plan.chunks,
            decodes=plan.decodes,
            tokens=plan.tokens,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            free=pool.free,
            held=pool.held,
            cached=pool.cached,
            idle=plan.rests,
            admitted=plan.admitted,
            preempted=plan.preempted,
            expired=plan.expired,
            emitted=sum(brought),
            drafted=sum(one.drafted for one in plan.decodes if results[one.id].tokens),
            accepted=sum(max(count - 1, 0) for count in brought),  # one token is always drawn
            failed=tuple(id for id, result in results.items() if result.finish == "error"),
        )

    @property
    def contexts(self) -> dict[str, int]:
        """The tokens of each request that the cache held before the step read more of it."""
        decodes = {one.id: one.start for one in self.decodes}
        return {one.id: one.start for one in self.chunks} | decodes

    @property
    def prefill_tokens(self) -> int:
        """The tokens in all chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """How one request fared.

    prompt, output: tokens. finish: why it ended. arrival: when it came. queue: from arrival to
    admission. ttft: from arrival to the first token. tpot: the mean time per token after the first.
    e2e: from arrival to the end. What didn't happen is None: a request without tokens has no ttft,
    and one with a single token has no tpot.
    preemptions: how often it lost its blocks. recomputed: tokens read again after that. wasted:
    drafted tokens that were read and rejected. cached: tokens found in shared blocks, instead of
    being read, when it was first admitted.
    """

    id: str
    prompt: int
    output: int
    finish: str
    arrival: float
    queue: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    preemptions: int = 0
    recomputed: int = 0
    wasted: int = 0
    cached: int = 0

    @classmethod
    def of(cls, state: State) -> RequestMetrics:
        """Return the metrics of a request that ended."""
        arrival, output = state.request.arrival, state.emitted
        first, finished = state.first_token_at, state.finished_at
        tpot = None
        if first is not None and finished is not None and output > 1:
            tpot = (finished - first) / (output - 1)
        return cls(
            id=state.id,
            prompt=len(state.request.prompt),
            output=output,
            finish=state.finish,
            arrival=arrival,
            queue=None if state.admitted_at is None else state.admitted_at - arrival,
            ttft=None if first is None else first - arrival,
            tpot=tpot,
            e2e=None if finished is None else finished - arrival,
            preemptions=state.preemptions,
            recomputed=state.recomputed,
            wasted=state.wasted,
            cached=state.matched,
        )


def summary(metrics: Iterable[RequestMetrics]) -> dict[str, dict[str, float]]:
    """Return {"n", "mean", "p50", "p99"} of "queue", "ttft", "tpot" and "e2e", in seconds.

    Each is taken over the requests that have that time; if there are none, n is 0 and the rest is
    NaN. Quantiles are interpolated between the two nearest requests.
    """
    given, found = list(metrics), {}
    for name in ("queue", "ttft", "tpot", "e2e"):
        values = [value for one in given if (value := getattr(one, name)) is not None]
        mean = p50 = p99 = math.nan
        if values:
            mean = math.fsum(values) / len(values)
            p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
        found[name] = {"n": float(len(values)), "mean": mean, "p50": p50, "p99": p99}
    return found


def goodput(metrics: Iterable[RequestMetrics], *, ttft: float, tpot: float) -> float:
    """Return the completed requests per second that met both bounds, in seconds.

    The time runs from the first arrival to the last end; if no time passed, the result is NaN. A
    request of one token has no tpot and meets that bound. This is what one run achieved; the
    goodput of DistServe is the highest load per GPU at which 90% meet the bounds (Zhong et al.,
    OSDI 2024, arXiv 2401.09670).
    """
    given = [one for one in metrics if one.e2e is not None]
    good = [
        one
        for one in given
        if one.finish in ("eos", "stop", "length")
        and one.ttft is not None
        and one.ttft <= ttft
        and (one.tpot is None or one.tpot <= tpot)
    ]
    if not good:
        return 0.0
    ends = max(one.arrival + (one.e2e or 0.0) for one in given)
    seconds = ends - min(one.arrival for one in given)
    return len(good) / seconds if seconds else math.nan


@dataclass(kw_only=True, slots=True)
class EngineCounters:
    """What an engine has counted since it was made; every number only grows.

    steps: steps that did something. seconds: of these steps, with all work around the forwards.
    prompt_tokens: read in chunks, including those read again. output_tokens: added to outputs.
    cached_tokens: found in shared blocks. preemptions, recomputed, wasted: as in `RequestMetrics`.
    drafted, accepted: as in `StepRecord`. finished: how many requests ended, by finish, and
    "queue_full" for those that found the queue full.
    """

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    wasted: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def add_step(self, record: StepRecord) -> None:
        """Count a step."""
        self.steps += 1
        self.seconds += record.seconds
        self.prompt_tokens += record.prefill_tokens
        self.output_tokens += record.emitted
        self.preemptions += len(record.preempted)
        self.drafted += record.drafted
        self.accepted += record.accepted

    def add_request(self, metrics: RequestMetrics) -> None:
        """Count a request that ended."""
        self.add_finish(metrics.finish)
        self.cached_tokens += metrics.cached
        self.recomputed += metrics.recomputed
        self.wasted += metrics.wasted

    def add_finish(self, finish: str) -> None:
        """Count why a request ended."""
        self.finished[finish] = self.finished.get(finish, 0) + 1


@dataclass(kw_only=True, slots=True)
class Snapshot(EngineCounters):
    """An engine at one moment: its counters so far, its queues and its pool.

    waiting, running: requests. free, held, cached: blocks of the pool, which add up to num_blocks.
    """

    waiting: int
    running: int
    num_blocks: int
    free: int
    held: int
    cached: int
