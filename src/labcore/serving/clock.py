"""Clocks for arrivals and deadlines: the machine's, and one that a simulation or a test moves."""

from __future__ import annotations

import time

from labcore.checks import non_negative

__all__ = ["Clock", "ManualClock"]


class Clock:
    """The machine's monotonic clock, which no change of the date moves."""

    def now(self) -> float:
        """Return the seconds since some fixed moment; never less than before."""
        return time.monotonic()


class ManualClock(Clock):
    """A clock that stands still until `advance` moves it.

    start: seconds that it shows first. Raises TypeError or ValueError unless `start` is a finite
    number, at least 0.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(non_negative("start", start))

    def now(self) -> float:
        """Return the seconds shown."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` and return what the clock then shows.

        Raises TypeError or ValueError unless `seconds` is a finite number, at least 0.
        """
        self._now += float(non_negative("seconds", seconds, "a clock never goes back"))
        return self._now
