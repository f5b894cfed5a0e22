"""Runs reduced to the numbers that figures need, with times from the first arrival.

A run of `simulate` and one of a real engine give the same format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labcore.serving.metrics import summary
from labcore.serving.simulation.simulate import Run
from labcore.studies.inflight.gantt import Span, timeline

__all__ = ["Bar", "Scene", "scene"]

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
    request. slots: rows. seconds: time to the last end. tokens_per_second: output tokens per
    second. p50, p99: of the seconds from arrival to end. shares: the fraction of the rows' time
    for each kind of bar and for "empty". preemptions: over all requests. recomputed: tokens read
    again.
    """

    bars: tuple[Bar, ...]
    queue: tuple[Bar, ...]
    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    slots: int
    seconds: float
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


def scene(run: Run, *, bars: Sequence[Span] | None = None) -> Scene:
    """Return a run as a figure shows it. bars: the run's timeline; None computes it.

    Raises ValueError if the run has no requests or no time passed.
    """
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
        seconds=_short(run.seconds),
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
