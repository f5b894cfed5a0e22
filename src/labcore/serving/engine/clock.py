"""Clocks: the real one, and one that a simulation or a test moves by hand."""

from __future__ import annotations

import time
from typing import Protocol

from labcore.checks import non_negative

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """Anything with a `now`."""

    def now(self) -> float:
        """Seconds since some fixed moment; never less than before."""


class MonotonicClock:
    """The machine's monotonic clock: seconds that no change of the date moves."""

    def now(self) -> float:
        """Seconds since a moment that differs from machine to machine."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to advance.

    start: seconds that it shows first. Raises TypeError or ValueError unless `start` is a finite
    number, at least 0.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(non_negative("start", start))

    def now(self) -> float:
        """Seconds shown."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds`, at least 0; what the clock then shows.

        Raises TypeError or ValueError for anything else: a clock never goes back.
        """
        self._now += float(non_negative("seconds", seconds, "a clock never goes back"))
        return self._now
