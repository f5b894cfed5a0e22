"""How well two small schedulers fill a batch, by its rows, the lengths, and the queue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from labcore.serving.engine.blocks import blocks_for
from labcore.serving.simulation.workload import long_tail
from labcore.studies.inflight.stages import Job, in_flight, static

__all__ = ["QUEUES", "ROWS", "TAILS", "Filled", "filled", "sweep"]

ROWS = (2, 4, 8, 16, 32)
"""Rows of the batch."""

TAILS = (0.5, 1.0, 2.0, 4.0)
"""Tails of the output lengths, from `long_tail`: the smaller, the more lengths differ."""

QUEUES = (32, 320)
"""Requests that all wait from the start."""

_PROMPT, _LEAST, _MOST, _PAGE = 24, 8, 256, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """steps: under static batching and in flight. used: the share of rows that a request needed."""

    steps: tuple[int, int]
    used: tuple[float, float]


def filled(rows: int, tail: float, queue: int, seed: int = 0) -> Filled:
    """Run both schedulers, without pressure on memory, on outputs of 8 to 256 tokens."""
    outputs = long_tail(_LEAST, queue, seed, tail=tail, most=_MOST)
    jobs = [Job(str(at), _PROMPT, length, _MOST) for at, length in enumerate(outputs)]
    room = rows * blocks_for(_PROMPT + _MOST - 1, _PAGE)
    plans = static(deque(jobs), rows), in_flight(deque(jobs), rows, room, _PAGE)
    batched, flying = ([len(reads) for reads in each] for each in plans)
    return Filled(
        steps=(len(batched), len(flying)),
        used=(sum(batched) / (rows * len(batched)), sum(flying) / (rows * len(flying))),
    )


@lru_cache(maxsize=1)
def sweep() -> dict[tuple[int, float, int], Filled]:
    """Return `filled` by rows, tail and queue."""
    return {setting: filled(*setting) for setting in product(ROWS, TAILS, QUEUES)}
