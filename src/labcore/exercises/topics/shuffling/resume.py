"""The batches that remain after a job with several workers stops."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

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
        starts = range(0, len(rows), batch)  # more turns than any lane has batches
        return [
            list(lane[start : start + batch])
            for start in starts
            for lane in lanes
            if start < len(lane)
        ]

    del prefetch  # nobody trained on what lay in the queues
    batches = dealt(order, workers)
    if workers_after == workers:
        return batches[taken:]
    trained_on = {row for rows in batches[:taken] for row in rows}
    return dealt([row for row in order if row not in trained_on], workers_after)


def _resume_cases(seed: int) -> list[dict[str, Any]]:
    """Orders whose epoch ends in a short batch of one worker and, mostly, in the middle of a turn.

    A turn of the largest variant is 5 batches of 5 rows, so no case is near its end.
    """
    chance = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for rows, prefetch in ((83, 1), (97, 2), (110 + chance.randrange(40), 1), (101, 2)):
        order = list(range(rows))
        if cases:  # the first case stays in order, to be followed by hand
            chance.shuffle(order)
        cases.append({"order": order, "taken": chance.randint(2, 5), "prefetch": prefetch})
    cases[0]["taken"] = 3
    cases[-1]["taken"] = 7
    return cases


def _own_workers(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"workers:{student}")
    workers, batch = (chance.choice((3, 4, 5)), chance.choice((3, 4, 5))) if student else (2, 4)
    return {"workers": workers, "workers_after": workers, "batch": batch}


_EDITS: dict[str, Change] = {
    "read ahead lost": [("del prefetch", ""), ("[taken:]", "[taken + prefetch * workers :]")],
    "turn begins with worker 0": [
        ("worker::count]", "worker::count][len(range(worker, taken, count)) * batch :]"),
        ("batches[taken:]", "batches"),
    ],
    "dealt anew": ("if workers_after == workers", "if False"),
    "first rows dropped": ("batches[taken:]", "dealt(order[taken * batch :], workers)"),
    "one reader": ("dealt(order, workers)", "dealt(order, 1)"),
    "pieces of the order": (
        "lanes = [rows[worker::count] for worker in range(count)]",
        "share = -(-len(rows) // count)\n"
        "        lanes = [rows[first : first + share] for first in range(0, len(rows), share)]",
    ),
    "short batches dropped": (
        "return batches[taken:]",
        "return [rows for rows in batches[taken:] if len(rows) == batch]",
    ),
    "the last batch again": ("batches[taken:]", "batches[taken - 1 :]"),
    "one batch too far": ("batches[taken:]", "batches[taken + 1 :]"),
    "the epoch again": ("batches[taken:]", "batches"),
    "taken by each worker": ("batches[taken:]", "batches[taken * workers :]"),
    "worker after worker": (
        "for start in starts\n            for lane in lanes",
        "for lane in lanes\n            for start in starts",
    ),
    "worker after worker, the rest": (
        "batches[taken:]",
        "sorted(batches[taken:], key=lambda rows: order.index(rows[0]) % workers)",
    ),
}
_HINTS = {
    "read ahead lost": "Rows are missing. Each worker goes on where it stopped reading, but of "
    "what it had read some batches lay in its queue, and they died with the job.",
    "turn begins with worker 0": "No row is lost and none comes twice, but the turn begins with "
    "the first worker again. Whose turn was it when the job was stopped?",
    "dealt anew": "No row is lost and none comes twice, but the rows that are left were dealt to "
    "the workers anew. With the same number of workers the batches should be those of a run that "
    "was never stopped.",
    "first rows dropped": "You drop as many rows as were trained on, but from the front of "
    "`order`, and deal the rest anew. The rows of a batch are all one worker's, so they do not "
    "stand side by side in `order`.",
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
    points=5,
    beyond=2,
    reference=still_to_come,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_resume_cases,
    variant=_own_workers,
    explanation="What counts is what the training loop received, not what the workers read: so "
    "`prefetch` has no part in it. The batches of the whole epoch follow from the order and the "
    "number of workers alone; with as many workers the rest is the end of that list. With another "
    "number that list does not exist. Then the rows that were trained on are taken out of the "
    "order, and the rest is an epoch of its own, dealt to the new workers.",
    hints=(
        "In the example, suppose that worker 1 had [5, 7] and [9] ready in its queue when the job "
        "stopped after 3 batches. Which rows has the loop trained on?",
        "Build the list of all batches of the epoch as if the job had never stopped: deal the "
        "rows to the workers, cut each worker's rows into batches, and take one batch of each "
        "worker per turn. Then drop the batches that were taken, whatever `prefetch` is.",
        "`[lane[start : start + batch] for start in range(0, len(order), batch) for lane in lanes "
        "if start < len(lane)]` lists the batches in turn, where `lanes` is `[order[k::workers] "
        "for k in range(workers)]`.",
    ),
)
