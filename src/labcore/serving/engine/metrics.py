"""What an engine did: a record of each step, the times of each request, and their exposition.

Times are in seconds on the engine's clock unless a docstring says otherwise. Nothing here touches
a tensor, so that a simulation reports in the same words.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from labcore.checks import positive
from labcore.serving.engine.requests import State
from labcore.serving.engine.scheduler import Chunk, Decode

__all__ = [
    "EngineCounters",
    "Histogram",
    "Observed",
    "RequestMetrics",
    "Snapshot",
    "StepRecord",
    "exposition",
    "summary",
]

# Bounds of the histograms' buckets, in seconds: of what a user waits for, and of a token.
_WAITS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TIMES = ("queue", "ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of an engine.

    step: its number. at: when it began. seconds: how long it took, by the machine's own clock
    whatever the engine's is. chunks, decodes: what was read, as in the plan. contexts: of each
    request in them, the tokens that the cache held before the step. tokens: what the step took of
    the budget. waiting, running: requests after the step. free, held, cached: blocks of the pool
    after it. idle: rows of ended requests that a static batch computed beside the decodes.
    admitted, preempted, expired: requests that began, were sent back, and ran out of
    time in it. emitted: tokens that joined outputs. drafted, accepted: of speculation. failed:
    requests that the step ended with an error.
    """

    step: int
    at: float
    seconds: float
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    contexts: Mapping[str, int]
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
    def prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """How one request fared.

    prompt, output: tokens. finish: why it ended. arrival: when it came. queue: until its first
    chunk was scheduled. ttft: from arrival to the first token. tpot: between two tokens, from the
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


class Histogram:
    """Counts of values by bucket, as Prometheus keeps them: a bucket holds all below its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(positive("a bound", bound) for bound in bounds)
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bounds must ascend, got {self.bounds}")
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[float, int]]:
        """Each bound, infinity at the end, with the number of values that are at most it."""
        reached, told = 0, []
        for bound, count in zip((*self.bounds, math.inf), self._counts, strict=True):
            reached += count
            told.append((bound, reached))
        return told


@dataclass(kw_only=True, slots=True)
class EngineCounters:
    """What an engine has counted since it was made; every number only grows.

    steps, seconds: of forwards and all around them. prompt_tokens: read in chunks, read again ones
    included. output_tokens: that joined an output. cached_tokens: found in the cache.
    preemptions, recomputed, wasted: as in RequestMetrics. drafted, accepted: of speculation.
    finished: requests by why they ended. times: a histogram of each of RequestMetrics' times.
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
    times: dict[str, Histogram] = field(
        default_factory=lambda: {
            name: Histogram(_TOKEN_WAITS if name == "tpot" else _WAITS) for name in _TIMES
        }
    )

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
        for name, histogram in self.times.items():
            value = getattr(metrics, name)
            if value is not None:
                histogram.add(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """An engine at one moment: its queues, its pool, and its counters as in `EngineCounters`.

    waiting, running: requests. free, held, cached: blocks of the pool, which add up to `pages`.
    """

    waiting: int
    running: int
    pages: int
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
            if one.name not in ("finished", "times")
        }
        return cls(finished=dict(counters.finished), **now, **counted)


class Observed(Protocol):
    """What `exposition` asks of an engine."""

    counters: EngineCounters

    def stats(self) -> Snapshot:
        """The state at this moment."""


def exposition(engine: Observed) -> str:
    """The engine's state as Prometheus reads it: text format 0.0.4, ending in a newline.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats.
    """
    now = engine.stats()
    lines: list[str] = []

    def family(name: str, kind: str, about: str, values: Mapping[str, float]) -> None:
        lines.append(f"# HELP labcore_{name} {about}")
        lines.append(f"# TYPE labcore_{name} {kind}")
        lines.extend(f"labcore_{name}{labels} {_number(value)}" for labels, value in values.items())

    family("requests_waiting", "gauge", "Requests in the queue.", {"": now.waiting})
    family("requests_running", "gauge", "Requests that hold a slot.", {"": now.running})
    blocks = {"free": now.free, "held": now.held, "cached": now.cached}
    family("blocks", "gauge", "Blocks of the pool.", _labelled("state", blocks))
    ended = dict(sorted(now.finished.items()))
    family("requests_total", "counter", "Requests that ended.", _labelled("finish", ended))
    tokens = {
        "prompt": now.prompt_tokens,
        "output": now.output_tokens,
        "cached": now.cached_tokens,
        "recomputed": now.recomputed,
        "wasted": now.wasted,
        "drafted": now.drafted,
        "accepted": now.accepted,
    }
    family("tokens_total", "counter", "Tokens.", _labelled("kind", tokens))
    family("preemptions_total", "counter", "Requests sent back.", {"": now.preemptions})
    family("steps_total", "counter", "Steps.", {"": now.steps})
    family("step_seconds_total", "counter", "Time in steps.", {"": now.seconds})
    about = {
        "queue": "From arrival to the first chunk.",
        "ttft": "From arrival to the first token.",
        "tpot": "Between two tokens of an output, on average.",
        "e2e": "From arrival to the end.",
    }
    for name, histogram in engine.counters.times.items():
        full = f"request_{name}_seconds"
        values: dict[str, float] = {
            f'_bucket{{le="{_number(bound)}"}}': count for bound, count in histogram.buckets()
        }
        family(full, "histogram", about[name], values)
        lines.append(f"labcore_{full}_sum {_number(histogram.total)}")
        lines.append(f"labcore_{full}_count {histogram.count}")
    return "\n".join(lines) + "\n"


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': value for name, value in values.items()}


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
