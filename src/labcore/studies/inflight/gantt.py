"""The timeline of a run: which request held which slot, when, and what it did."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labcore.checks import positive_int
from labcore.serving.metrics import StepRecord
from labcore.serving.simulation.simulate import QUEUE_FULL, Run

__all__ = ["KINDS", "Span", "busy", "timeline"]

KINDS = ("waiting", "prefill", "recompute", "decode", "stalled", "idle")
"""What a bar says about a request: it waits in the queue; its prompt is read; tokens lost to a
preemption are read again; it emits a token per step; it runs but gets nothing in the step because
the budget is spent; it has ended, but its slot waits for the last request of the batch (static
batching)."""

WAITING = -1
"""The slot of a request without one."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a timeline.

    kind: one of `KINDS`. slot: the row of the batch, -1 while the request waits. begin, end:
    seconds. tokens: number of tokens read in it.
    """

    id: str
    kind: str
    slot: int
    begin: float
    end: float
    tokens: int = 0


def timeline(run: Run) -> tuple[Span, ...]:
    """Return all bars of a run, ordered by their begin."""
    bars = _Bars(run.slots)
    for one in run.metrics:
        if one.finish not in (QUEUE_FULL, "refused"):
            bars.wait(one.id, one.arrival)
    last = {id: place for place, step in enumerate(run.steps) for id in step.contexts}
    late = {id for step in run.steps for id in step.expired}
    for place, (step, end) in enumerate(zip(run.steps, _ends(run.steps), strict=True)):
        for id in step.expired:
            bars.end(id, step.at)
        bars.step(step, end, batches=run.batches)
        for id in step.contexts:
            if last[id] == place and id not in late:
                bars.end(id, end)
    return bars.spans()


def busy(run: Run) -> float:
    """Return the fraction of the slots' time in which a slot processed tokens; NaN without time."""
    worked = ("prefill", "recompute", "decode")
    total = math.fsum(one.end - one.begin for one in timeline(run) if one.kind in worked)
    return total / (run.slots * run.seconds) if run.seconds else math.nan


def _ends(steps: Sequence[StepRecord]) -> Iterator[float]:
    """Yield when each step's bars end: a busy server's extend to its next step."""
    for place, step in enumerate(steps):
        end = step.at + step.seconds
        if place + 1 < len(steps):
            following = steps[place + 1].at
            end = following if step.running or step.waiting else min(end, following)
        yield end


@dataclass(slots=True)
class _Bar:
    kind: str
    slot: int
    begin: float
    end: float
    tokens: int


class _Bars:
    """Collects bars step by step; each admitted request gets the lowest free slot."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(positive_int("slots", slots)))
        self._slots: dict[str, int] = {}
        self._ended: set[str] = set()  # of those that have a slot
        self._since: dict[str, float] = {}
        self._peaks: dict[str, int] = {}  # the most tokens that each has read
        self._bars: dict[str, _Bar] = {}
        self._spans: list[Span] = []

    def wait(self, id: str, time: float) -> None:
        """Record that a request joins the queue."""
        self._since[id] = time

    def end(self, id: str, time: float) -> None:
        """Record that a request ends; in a static batch, its slot may stay occupied."""
        self._join(id, time)
        if id in self._slots:
            self._ended.add(id)

    def step(self, step: StepRecord, end: float, *, batches: bool) -> None:
        """Record a step that ends at `end`."""
        if not (batches and self._slots.keys() - self._ended):
            for id in list(self._ended):
                self._leave(id)
        for id in step.preempted:
            self._leave(id)
            self.wait(id, step.at)
        for id in step.admitted:
            self._join(id, step.at)
            self._slots[id] = heapq.heappop(self._free)
        read = {one.id: ("decode", 1 + one.drafted) for one in step.decodes}
        for one in step.chunks:
            again = one.start < self._peaks.get(one.id, 0)
            read[one.id] = ("recompute" if again else "prefill", one.count)
        for id, start in step.contexts.items():
            count = 1 if read[id][0] == "decode" else read[id][1]  # drafts may be rejected
            self._peaks[id] = max(self._peaks.get(id, 0), start + count)
        if end > step.at:
            for id in self._slots:
                kind, tokens = read.get(id, ("idle" if id in self._ended else "stalled", 0))
                self._mark(id, kind, step.at, end, tokens)

    def spans(self) -> tuple[Span, ...]:
        under_way = [self._span(id, bar) for id, bar in self._bars.items()]
        return tuple(sorted(self._spans + under_way, key=lambda one: (one.begin, one.id)))

    def _join(self, id: str, time: float) -> None:
        since = self._since.pop(id, None)
        if since is not None and time > since:
            self._spans.append(Span(id, "waiting", WAITING, since, time))

    def _leave(self, id: str) -> None:
        heapq.heappush(self._free, self._slots.pop(id))
        self._ended.discard(id)
        bar = self._bars.pop(id, None)
        if bar is not None:
            self._spans.append(self._span(id, bar))

    def _mark(self, id: str, kind: str, begin: float, end: float, tokens: int) -> None:
        bar = self._bars.get(id)
        if bar is not None and bar.kind == kind and bar.end == begin:
            bar.end, bar.tokens = end, bar.tokens + tokens
            return
        if bar is not None:
            self._spans.append(self._span(id, bar))
        self._bars[id] = _Bar(kind, self._slots[id], begin, end, tokens)

    @staticmethod
    def _span(id: str, bar: _Bar) -> Span:
        return Span(id, bar.kind, bar.slot, bar.begin, bar.end, bar.tokens)
