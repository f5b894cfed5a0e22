"""Runs as pictures need them: a few plain numbers each, with times from the first arrival on.

A run of `simulate` and one of a real engine come out in the same form.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labcore.checks import positive_int
from labcore.serving.engine.metrics import StepRecord, summary
from labcore.serving.simulation.gantt import Span
from labcore.serving.simulation.simulate import CACHED, FREE, Run

__all__ = ["PROMISED", "Bar", "Scene", "StepParts", "scene", "step_parts"]

PROMISED = -4
"""In a scene's block map: a free block that is promised to a request that runs."""

_DIGITS = 4
_GAP = 0.005  # of a run's time: bars closer together than this are one


@dataclass(frozen=True, slots=True)
class Bar:
    """Something a request did without a break. number: its place among the requests, from 0.
    kind: one of `gantt.KINDS`. slot: its row, from 0, -1 in the queue. begin, end: seconds.
    """

    number: int
    kind: str
    slot: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A run in pictures. Times in seconds from the first arrival on.

    bars: of rows. queue: bars of waiting. arrivals, ends: of each request. slots: rows. pages:
    blocks of the pool. seconds: to the last end. blocks: of each block what it holds in each of
    some equal parts of that time: FREE, PROMISED, CACHED, SHARED, or the number of a request;
    empty where the run kept no map. tokens_per_second: of outputs. p50, p99: of the seconds from
    arrival to end. shares: of each kind of bar and of "empty" the share of the rows' time.
    preemptions: of all requests. recomputed: tokens read again.
    """

    bars: tuple[Bar, ...]
    queue: tuple[Bar, ...]
    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    slots: int
    pages: int
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
        """The length of the queue: (time, requests that wait from then on), in order of time."""
        changes: dict[float, int] = {0.0: 0}
        for bar in self.queue:
            changes[bar.begin] = changes.get(bar.begin, 0) + 1
            changes[bar.end] = changes.get(bar.end, 0) - 1
        told, length = [], 0
        for time in sorted(changes):
            length += changes[time]
            told.append((time, length))
        return tuple(told)


def scene(run: Run, *, columns: int = 72) -> Scene:
    """A run as a figure shows it; columns: parts of its time in the block map.

    Raises ValueError for a run without requests, or in which no time went by.
    """
    positive_int("columns", columns)
    if not run.metrics or not run.seconds > 0:
        raise ValueError(
            f"a scene needs a run of some seconds, got {len(run.metrics)} requests in "
            f"{run.seconds} s; serve one request or more"
        )
    numbers = {one.id: number for number, one in enumerate(run.metrics)}
    spans = [one for one in run.spans if one.end > one.begin]
    rows = _merged([_bar(one, numbers, run.begin) for one in spans if one.slot >= 0], run.seconds)
    queue = [_bar(one, numbers, run.begin) for one in spans if one.slot < 0]
    times = summary(run.metrics)["e2e"]
    return Scene(
        bars=tuple(rows),
        queue=tuple(queue),
        arrivals=tuple(_short(one.arrival - run.begin) for one in run.metrics),
        ends=tuple(_short(one.arrival + (one.e2e or 0.0) - run.begin) for one in run.metrics),
        slots=run.slots,
        pages=run.pages,
        seconds=_short(run.seconds),
        blocks=_map(run, columns),
        tokens_per_second=_short(run.tokens_per_second),
        p50=_short(times["p50"]),
        p99=_short(times["p99"]),
        shares=_shares(run),
        preemptions=sum(one.preemptions for one in run.metrics),
        recomputed=sum(one.recomputed for one in run.metrics),
    )


def _short(value: float) -> float:
    """Four digits: more than a picture can show."""
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
    """One bar for those of a request and a kind in a row: a real engine rests between steps."""
    told: list[Bar] = []
    last: dict[int, int] = {}  # of each slot the place of its last bar
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


def _shares(run: Run) -> dict[str, float]:
    held: dict[str, float] = {}
    for span in run.spans:
        if span.slot >= 0:
            held[span.kind] = held.get(span.kind, 0.0) + span.end - span.begin
    whole = run.slots * run.seconds
    told = {kind: time / whole for kind, time in held.items()}
    return {**told, "empty": max(1 - math.fsum(told.values()), 0.0)}


def _map(run: Run, columns: int) -> tuple[tuple[int, ...], ...]:
    """What each block holds in the middle of each part of the time."""
    if not run.blocks:
        return ()
    begins = [step.at for step in run.steps]
    promised = run.promised or (0,) * len(run.blocks)
    made = []
    for column in range(columns):
        time = run.begin + (column + 0.5) / columns * run.seconds
        at = bisect_right(begins, time) - 1
        if at < 0:
            made.append((FREE,) * run.pages)
            continue
        following = begins[at + 1] if at + 1 < len(begins) else run.end
        resting = time > begins[at] + run.steps[at].seconds + _GAP * run.seconds < following
        made.append(_column(run.blocks[at], promised[at], at_rest=resting))
    return tuple(zip(*made, strict=True))


def _column(blocks: Sequence[int], promised: int, *, at_rest: bool) -> tuple[int, ...]:
    """A step's blocks, the last of the free ones marked as promised; at rest nobody holds any."""
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
    """What one step made of its budget.

    step: its number. at, seconds: when it began and how long it took. decodes: tokens of requests
    that decode, one entry each. chunks: (number of the request, tokens read) of prompts. left: of
    each of those prompts (number, tokens that it has left to read). waiting: requests in the queue
    after the step. budget: most tokens of a step. free, held, cached: blocks after it.
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
    """Steps of a trace as plain numbers, requests numbered in the order of their first chunks.

    budget: most tokens of a step. first: steps that are passed over; most: how many are told.
    Raises ValueError where none is left.
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
            f"a trace must have steps behind the first {first}, got {len(steps)} in all; skip fewer"
        )
    return told


def _left(steps: Sequence[StepRecord]) -> list[dict[str, int]]:
    """Of each step and each prompt in it the tokens that its later chunks read, up to the last."""
    behind: dict[str, int] = {}
    told: list[dict[str, int]] = []
    for record in reversed(steps):
        here = {}
        for chunk in record.chunks:
            here[chunk.id] = 0 if chunk.last else behind.get(chunk.id, 0)
            behind[chunk.id] = here[chunk.id] + chunk.count
        for id in record.preempted:  # it starts over, and what it read later is another reading
            behind.pop(id, None)
        told.append(here)
    return told[::-1]
