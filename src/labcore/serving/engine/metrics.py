"""What an engine did: a record of each step, and the times of each request.

Times are in seconds on the engine's clock unless a docstring says otherwise. Nothing here touches
a tensor, so that a simulation reports in the same words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from labcore.serving.engine.request import State
from labcore.serving.engine.scheduler import Chunk, Decode

__all__ = [
    "EngineCounters",
    "RequestMetrics",
    "Snapshot",
    "StepRecord",
    "goodput",
    "summary",
]

_TIMES = ("queue", "ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of an engine.

    step: its number. at: when it began. seconds: how long it took, by the machine's own clock
    whatever the engine's is. chunks, decodes: what was read, as in the plan. tokens: what the
    step took of its token budget. waiting, running: requests after the step. free, held, cached:
    blocks of the pool after it. idle: rows of ended requests that a static batch computed beside
    the decodes. admitted, preempted, expired: requests that began, were sent back, and ran out of
    time in it. emitted: tokens that joined outputs. drafted, accepted: of speculation. failed:
    requests that the step ended with an error.
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

    @property
    def contexts(self) -> dict[str, int]:
        """Of each request that read, the tokens that the cache held before the step."""
        return {one.id: one.start for one in self.chunks} | {
            one.id: one.start for one in self.decodes
        }

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """How one request fared.

    prompt, output: tokens. finish: why it ended. arrival: when it came. queue: until it was
    admitted. ttft: from arrival to the first token. tpot: between two tokens, from the
    first to the last, on average. e2e: from arrival to the end. What did not happen is None: no
    ttft without a token, no tpot without two.
    preemptions: how often it lost its blocks. recomputed: tokens that were read again for that
    reason. wasted: drafted tokens that were read and rejected. cached: tokens that were found in
    blocks of an earlier request instead of being read; after a preemption they may be its own, and
    are not counted.
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
        """Of a request that ended."""
        arrival, output = state.request.arrival, state.emitted
        first, finished = state.first_token_at, state.finished_at
        between = None
        if first is not None and finished is not None and output > 1:
            between = (finished - first) / (output - 1)
        return cls(
            id=state.id,
            prompt=len(state.request.prompt),
            output=output,
            finish=state.finish,
            arrival=arrival,
            queue=None if state.admitted_at is None else state.admitted_at - arrival,
            ttft=None if first is None else first - arrival,
            tpot=between,
            e2e=None if finished is None else finished - arrival,
            preemptions=state.preemptions,
            recomputed=state.recomputed,
            wasted=state.wasted,
            cached=state.matched,
        )


def summary(metrics: Iterable[RequestMetrics]) -> dict[str, dict[str, float]]:
    """Of each time: {"n", "mean", "p50", "p99"}, in seconds, over the requests that have it.

    The keys are "queue", "ttft", "tpot" and "e2e"; without any such request n is 0 and the rest is
    NaN. Quantiles are interpolated between the two nearest requests.
    """
    given = list(metrics)
    told = {}
    for name in _TIMES:
        values = [value for one in given if (value := getattr(one, name)) is not None]
        if not values:
            told[name] = {"n": 0.0, "mean": math.nan, "p50": math.nan, "p99": math.nan}
            continue
        p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
        mean = math.fsum(values) / len(values)
        told[name] = {"n": float(len(values)), "mean": mean, "p50": p50, "p99": p99}
    return told


def goodput(metrics: Iterable[RequestMetrics], *, ttft: float, tpot: float) -> float:
    """Return the completed requests per second that met both bounds, in seconds.

    The time runs from the first arrival to the last end; without any, the result is NaN. A request
    of one token has no tpot and meets that bound. Source: Zhong et al., DistServe, OSDI 2024.
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

    steps, seconds: of forwards and all around them. prompt_tokens: read in chunks, read again ones
    included. output_tokens: that joined an output. cached_tokens: found in the cache.
    preemptions, recomputed, wasted: as in RequestMetrics. drafted, accepted: of speculation.
    finished: requests by why they ended.
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
    finished: Counter[str] = field(default_factory=Counter)

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
        self.finished[metrics.finish] += 1
        self.cached_tokens += metrics.cached
        self.recomputed += metrics.recomputed
        self.wasted += metrics.wasted


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """An engine at one moment: its queues, its pool, and its counters as in `EngineCounters`.

    waiting, running: requests. free, held, cached: blocks of the pool, which add up to num_blocks.
    """

    waiting: int
    running: int
    num_blocks: int
    free: int
    held: int
    cached: int
    steps: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    recomputed: int
    wasted: int
    drafted: int
    accepted: int
    finished: Mapping[str, int]

    @classmethod
    def of(cls, counters: EngineCounters, **now: int) -> Snapshot:
        """The counters as they are, with what is true `now`: the first six fields."""
        counted = {
            one.name: getattr(counters, one.name)
            for one in fields(counters)
            if one.name != "finished"
        }
        return cls(finished=dict(counters.finished), **now, **counted)
