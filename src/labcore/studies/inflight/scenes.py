"""Runs reduced to the numbers that figures need, with times from the first arrival.

A run of `simulate` and one of a real engine give the same format.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labcore.checks import positive_int
from labcore.serving.metrics import StepRecord, summary
from labcore.serving.simulation.simulate import CACHED, FREE, Run
from labcore.studies.inflight.gantt import Span, timeline

__all__ = ["PROMISED", "Bar", "Scene", "StepParts", "scene", "step_parts"]

PROMISED = -4
"""In a scene's block map: a free block that is reserved for a running request."""

_DIGITS = 4
_GAP = 0.005  # bars closer together than this fraction of the run's time are merged


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that a request did without a break.

    number: the request's index, from 0. kind: one of `gantt.KINDS`. slot: its row, from 0; -1 in
    the queue. begin, end: seconds.
    """

    number: int
    kind: str
    slot: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A run as a figure shows it. Times are in seconds from the first arrival.

    bars: the bars of the rows. queue: the bars of waiting requests. arrivals, ends: of each
    request. slots: rows. num_blocks: of the pool. seconds: time to the last end. blocks: for each
    block, its state in each of several equal intervals of that time: FREE, PROMISED, CACHED,
    SHARED, or the number of a request; empty if the run kept no map. tokens_per_second: output
    tokens per second. p50, p99: of the seconds from arrival to end. shares: the fraction of the
    rows' time for each kind of bar and for "empty". preemptions: over all requests. recomputed:
    tokens read again.
    """

    bars: tuple[Bar, ...]
    queue: tuple[Bar, ...]
    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    slots: int
    num_blocks: int
    seconds: float
    blocks: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    p50: float
    p99: float
    shares: dict[str, float]
    preemptions: int
    recomputed: int

    @property
    def waiting(self) -> tuple[tuple[float, int], ...]:
        """The queue length over time: (time, requests waiting from then on), in order."""
        changes: dict[float, int] = {0.0: 0}
        for bar in self.queue:
            changes[bar.begin] = changes.get(bar.begin, 0) + 1
            changes[bar.end] = changes.get(bar.end, 0) - 1
        told, length = [], 0
        for time in sorted(changes):
            length += changes[time]
            told.append((time, length))
        return tuple(told)


def scene(run: Run, *, columns: int = 72, bars: Sequence[Span] | None = None) -> Scene:
    """Return a run as a figure shows it. columns: intervals of time in the block map.

    bars: the run's timeline; None computes it.

    Raises ValueError if the run has no requests or no time passed.
    """
    positive_int("columns", columns)
    if not run.metrics or not run.seconds > 0:
        raise ValueError(
            f"a scene needs a run with requests that takes time, got {len(run.metrics)} requests "
            f"in {run.seconds} s; serve at least one request"
        )
    numbers = {one.id: number for number, one in enumerate(run.metrics)}
    bars = timeline(run) if bars is None else bars
    spans = [one for one in bars if one.end > one.begin]
    rows = _merged([_bar(one, numbers, run.begin) for one in spans if one.slot >= 0], run.seconds)
    queue = [_bar(one, numbers, run.begin) for one in spans if one.slot < 0]
    times = summary(run.metrics)["e2e"]
    return Scene(
        bars=tuple(rows),
        queue=tuple(queue),
        arrivals=tuple(_short(one.arrival - run.begin) for one in run.metrics),
        ends=tuple(_short(one.arrival + (one.e2e or 0.0) - run.begin) for one in run.metrics),
        slots=run.slots,
        num_blocks=run.num_blocks,
        seconds=_short(run.seconds),
        blocks=_map(run, columns),
        tokens_per_second=_short(run.tokens_per_second),
        p50=_short(times["p50"]),
        p99=_short(times["p99"]),
        shares=_shares(run, bars),
        preemptions=sum(one.preemptions for one in run.metrics),
        recomputed=sum(one.recomputed for one in run.metrics),
    )


def _short(value: float) -> float:
    """Round to four digits, more than a figure can show."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else value


def _bar(span: Span, numbers: dict[str, int], begin: float) -> Bar:
    return Bar(
        numbers[span.id],
        span.kind,
        span.slot,
        _short(span.begin - begin),
        _short(span.end - begin),
    )


def _merged(bars: Sequence[Bar], seconds: float) -> list[Bar]:
    """Merge consecutive bars of a request and kind, because a real engine pauses between steps."""
    told: list[Bar] = []
    last: dict[int, int] = {}  # the index of each slot's last bar
    for bar in sorted(bars, key=lambda one: (one.begin, one.slot)):
        before = told[last[bar.slot]] if bar.slot in last else None
        if (
            before is not None
            and (before.number, before.kind) == (bar.number, bar.kind)
            and bar.begin - before.end <= _GAP * seconds
        ):
            told[last[bar.slot]] = replace(before, end=max(bar.end, before.end))
        else:
            last[bar.slot] = len(told)
            told.append(bar)
    return told


def _shares(run: Run, bars: Sequence[Span]) -> dict[str, float]:
    held: dict[str, float] = {}
    for span in bars:
        if span.slot >= 0:
            held[span.kind] = held.get(span.kind, 0.0) + span.end - span.begin
    whole = run.slots * run.seconds
    told = {kind: time / whole for kind, time in held.items()}
    return {**told, "empty": max(1 - math.fsum(told.values()), 0.0)}


def _map(run: Run, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the state of each block in the middle of each interval of time."""
    if not run.blocks:
        return ()
    begins = [step.at for step in run.steps]
    promised = run.promised or (0,) * len(run.blocks)
    made = []
    for column in range(columns):
        time = run.begin + (column + 0.5) / columns * run.seconds
        at = bisect_right(begins, time) - 1
        if at < 0:
            made.append((FREE,) * run.num_blocks)
            continue
        following = begins[at + 1] if at + 1 < len(begins) else run.end
        resting = time > begins[at] + run.steps[at].seconds + _GAP * run.seconds < following
        made.append(_column(run.blocks[at], promised[at], at_rest=resting))
    return tuple(zip(*made, strict=True))


def _column(blocks: Sequence[int], promised: int, *, at_rest: bool) -> tuple[int, ...]:
    """Return a step's blocks, with the last free ones marked PROMISED; at rest none is held."""
    if at_rest:
        return tuple(one if one in (FREE, CACHED) else FREE for one in blocks)
    told = list(blocks)
    for place in reversed(range(len(told))):
        if promised and told[place] in (FREE, CACHED):
            told[place] = PROMISED
            promised -= 1
    return tuple(told)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """How one step used its budget.

    step: its number. at, seconds: when it began and how long it took. decodes: tokens of the
    decoding requests, one entry each. chunks: (number of the request, tokens read) for each prompt.
    left: (number of the request, tokens left to read) for each of those prompts that isn't
    finished. waiting: requests in the queue after the step. budget: maximum tokens per step. free,
    held, cached: blocks after the step.
    """

    step: int
    at: float
    seconds: float
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    waiting: int
    budget: int
    free: int
    held: int
    cached: int


def step_parts(
    steps: Sequence[StepRecord], budget: int, *, first: int = 0, most: int = 60
) -> list[StepParts]:
    """Return a trace's steps as plain numbers, with requests numbered by their first chunks.

    budget: maximum tokens per step. first: number of steps to skip. most: maximum steps returned.
    Raises ValueError if no step is left.
    """
    positive_int("budget", budget)
    positive_int("most", most)
    numbers: dict[str, int] = {}
    for record in steps:
        for chunk in record.chunks:
            numbers.setdefault(chunk.id, len(numbers))
    left = _left(steps)
    begin = steps[0].at if steps else 0.0
    told = [
        StepParts(
            step=record.step,
            at=_short(record.at - begin),
            seconds=_short(record.seconds),
            decodes=tuple(1 + one.drafted for one in record.decodes),
            chunks=tuple((numbers[one.id], one.count) for one in record.chunks),
            left=tuple(
                (numbers[one.id], left[place][one.id])
                for one in record.chunks
                if left[place][one.id]
            ),
            waiting=record.waiting,
            budget=budget,
            free=record.free,
            held=record.held,
            cached=record.cached,
        )
        for place, record in enumerate(steps)
    ][first : first + most]
    if not told:
        raise ValueError(
            f"a trace must have more steps than the {first} to skip, got {len(steps)}; skip fewer"
        )
    return told


def _left(steps: Sequence[StepRecord]) -> list[dict[str, int]]:
    """Return, for each step, how many tokens each of its prompts has left after it, by id."""
    behind: dict[str, int] = {}
    told: list[dict[str, int]] = []
    for record in reversed(steps):
        here = {}
        for chunk in record.chunks:
            here[chunk.id] = 0 if chunk.last else behind.get(chunk.id, 0)
            behind[chunk.id] = here[chunk.id] + chunk.count
        for id in record.preempted:  # it starts over: later chunks belong to a new prefill
            behind.pop(id, None)
        told.append(here)
    return told[::-1]
