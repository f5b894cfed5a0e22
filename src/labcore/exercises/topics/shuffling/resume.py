"""What is still to come after a job of several workers was stopped."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["RESUME"]


def still_to_come(
    order: Sequence[int],
    taken: int,
    *,
    batch: int,
    workers: int,
    prefetch: int,
    workers_after: int,
) -> list[list[int]]:
    """The batches, as lists of rows, that the training loop has yet to get.

    Where `workers_after` differs from `workers`, the rows that are left are dealt anew.
    """

    def dealt(rows: Sequence[int], count: int) -> list[list[int]]:
        lanes = [rows[worker::count] for worker in range(count)]
        return [
            list(lane[start : start + batch])
            for start in range(0, len(rows), batch)  # more turns than any lane has batches
            for lane in lanes
            if start < len(lane)
        ]

    del prefetch  # nobody trained on what lay in the queues
    batches = dealt(order, workers)
    if workers_after == workers:
        return batches[taken:]
    trained_on = {row for rows in batches[:taken] for row in rows}
    return dealt([row for row in order if row not in trained_on], workers_after)


def _cut(rows: Sequence[int], batch: int) -> list[list[int]]:
    return [list(rows[start : start + batch]) for start in range(0, len(rows), batch)]


def _in_turn(lanes: Sequence[Sequence[Sequence[int]]], first: int = 0) -> list[list[int]]:
    """Lanes of batches, one batch of each in turn from lane `first` on."""
    turned = [*lanes[first:], *lanes[:first]]
    longest = max(map(len, turned))
    return [list(lane[at]) for at in range(longest) for lane in turned if at < len(lane)]


def _resumed_wrongly(
    order: Sequence[int],
    taken: int,
    *,
    batch: int,
    workers: int,
    prefetch: int,
    workers_after: int,
    fault: str,
) -> list[list[int]]:
    del workers_after  # the cases of the check keep the number
    lanes = [_cut(order[worker::workers], batch) for worker in range(workers)]
    batches = _in_turn(lanes)
    given = [len(range(worker, taken, workers)) for worker in range(workers)]
    left = [lane[done:] for lane, done in zip(lanes, given, strict=True)]
    if fault == "read ahead lost":
        unread = [lane[prefetch:] for lane in left]
        return _in_turn(unread, taken % workers)
    if fault == "turn begins with worker 0":
        return _in_turn(left)
    if fault == "dealt anew":
        trained_on = {row for rows in batches[:taken] for row in rows}
        rest = [row for row in order if row not in trained_on]
        return _in_turn([_cut(rest[worker::workers], batch) for worker in range(workers)])
    if fault == "pieces of the order":
        share = -(-len(order) // workers)
        pieces = [order[start : start + share] for start in range(0, len(order), share)]
        return _in_turn([_cut(piece, batch) for piece in pieces])[taken:]
    if fault == "short batches dropped":
        return [rows for rows in batches[taken:] if len(rows) == batch]
    return {
        "one reader": _cut(order, batch)[taken:],
        "the last batch again": batches[taken - 1 :],
        "one batch too far": batches[taken + 1 :],
        "the epoch again": batches,
        "taken by each worker": batches[taken * workers :],
        "worker after worker": [rows for lane in lanes for rows in lane][taken:],
        "worker after worker, the rest": [rows for lane in left for rows in lane],
    }[fault]


def _resume_cases(seed: int) -> list[dict[str, Any]]:
    """Orders whose epoch ends in a short batch of one worker and, mostly, in the middle of a turn.

    A turn of the longest variant takes 5 batches of 5 rows, so that no case is near its end.
    """
    chance = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for rows, prefetch in ((83, 1), (97, 2), (110 + chance.randrange(40), 1), (101, 2)):
        order = list(range(rows))
        if cases:  # the first case stays in order: it can be followed by hand
            chance.shuffle(order)
        cases.append({"order": order, "taken": chance.randint(2, 5), "prefetch": prefetch})
    cases[0]["taken"] = 3
    cases[-1]["taken"] = 7
    return cases


def _own_workers(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"workers:{student}")
    workers, batch = (chance.choice((3, 4, 5)), chance.choice((3, 4, 5))) if student else (2, 4)
    return {"workers": workers, "workers_after": workers, "batch": batch}


_HINTS = {
    "read ahead lost": "Rows are missing. Each worker goes on where it stopped reading, but of "
    "what it had read some batches lay in its queue, and they died with the job.",
    "turn begins with worker 0": "No row is lost and none comes twice, but the turn begins with "
    "the first worker again. Whose turn was it when the job was stopped?",
    "dealt anew": "No row is lost and none comes twice, but the rows that are left were dealt to "
    "the workers anew. With the same number of workers the batches should be those of a run that "
    "was never stopped.",
    "one reader": "Your batches are consecutive pieces of `order`, as if one reader made them all. "
    "Each worker makes batches of its own rows, so other rows have been trained on than you count.",
    "pieces of the order": "Each of your workers reads one piece of `order` from end to end. The "
    "rows are dealt like cards: look at the positions that a worker gets.",
    "short batches dropped": "Every full batch is there, but the last batch of a worker may be "
    "short, and yours are gone.",
    "the last batch again": "One batch comes twice: the last one that was taken. `taken` counts it "
    "already.",
    "one batch too far": "One batch is lost: the first that was not taken.",
    "the epoch again": "The whole epoch comes once more, with the rows that were trained on.",
    "taken by each worker": "Rows are missing: you let each worker pass over `taken` batches. "
    "`taken` counts the batches of all workers together.",
    "worker after worker": "Your first worker gives all of its batches before the second one "
    "begins. They take turns, batch by batch.",
    "worker after worker, the rest": "The right rows are left, but your first worker gives all "
    "that it has before the second one begins. They take turns, batch by batch.",
}

RESUME = Exercise(
    id="shuffling.resume",
    reference=still_to_come,
    mistakes=[
        Mistake(name, functools.partial(_resumed_wrongly, fault=name), hint)
        for name, hint in _HINTS.items()
    ],
    cases=_resume_cases,
    variant=_own_workers,
    explanation="What counts is what the training loop received, not what the workers read: so "
    "`prefetch` has no part in it. The batches of the whole epoch follow from the order and the "
    "number of workers alone; with as many workers the rest is the end of that list. With another "
    "number that list does not exist. Then the rows that were trained on are taken out of the "
    "order, and the rest is an epoch of its own, dealt to the new workers.",
)
