"""The timeline of a batch: which request held which slot, when, and what it did."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from labcore.checks import positive_int
from labcore.serving.engine.request import State
from labcore.serving.engine.scheduler import StepPlan

__all__ = ["KINDS", "Gantt", "Span"]

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


@dataclass(slots=True)
class _Bar:
    kind: str
    slot: int
    begin: float
    end: float
    tokens: int


class Gantt:
    """Collect the bars of a run, step by step; each admitted request gets the lowest free slot."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(positive_int("slots", slots)))
        self._slots: dict[str, int] = {}
        self._ended: set[str] = set()  # of those that have a slot
        self._since: dict[str, float] = {}
        self._bars: dict[str, _Bar] = {}
        self._spans: list[Span] = []

    def wait(self, id: str, time: float) -> None:
        """Record that a request joins the queue."""
        self._since[id] = time

    def end(self, id: str, time: float) -> None:
        """Record that a request ends; the next step shows whether it still occupies its slot."""
        self._join(id, time)
        if id in self._slots:
            self._ended.add(id)

    def step(self, plan: StepPlan, states: Mapping[str, State], begin: float, end: float) -> None:
        """Record a step. states: the states before the step is committed."""
        for id in self._ended.difference(plan.idle):
            self._leave(id)
        for id in plan.preempted:
            self._leave(id)
            self.wait(id, begin)
        for id in plan.admitted:
            self._join(id, begin)
            self._slots[id] = heapq.heappop(self._free)
        read = {one.id: ("decode", 1 + one.drafted) for one in plan.decodes}
        for one in plan.chunks:
            kind = "recompute" if one.start < states[one.id].peak else "prefill"
            read[one.id] = (kind, one.count)
        if end > begin:
            for id in self._slots:
                kind, tokens = read.get(id, ("idle" if id in self._ended else "stalled", 0))
                self._mark(id, kind, begin, end, tokens)

    def spans(self) -> tuple[Span, ...]:
        """Return all bars so far, ordered by their begin."""
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
