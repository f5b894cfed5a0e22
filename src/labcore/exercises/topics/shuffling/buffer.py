"""A shuffle buffer whose choices are given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["BUFFER"]

SIZES = (3, 5, 6, 7, 8)  # student 0 has 4


def buffered(rows: int, picks: Sequence[int], *, size: int) -> list[int]:
    """The rows 0, 1, ... in the order in which a buffer of `size` slots lets them out."""
    slots: list[int] = []
    out: list[int] = []
    for row in range(rows):
        if len(slots) < size:
            slots.append(row)
            continue
        slot = picks[len(out)] % size
        out.append(slots[slot])
        slots[slot] = row
    while slots:
        slot = picks[len(out)] % len(slots)
        out.append(slots.pop(slot))
    return out


def _buffer_cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    cases = []
    for rows in (11, 40, 3, 25, 1):
        picks = [chance.randrange(100) for _ in range(rows)]
        if rows == 3:  # fewer rows than slots must still change places
            picks[0] = 3 * chance.randrange(33) + chance.choice((1, 2))
        if rows == 40:  # the waiting rows never leave in their stored order
            picks[-2] |= 1
        cases.append({"rows": rows, "picks": picks})
    # Zeros empty every buffer of 3 to 9 rows.
    return [*cases, {"rows": 25, "picks": [1] * 12 + [0] * 13}]


_LAST_INTO_THE_GAP = (
    "out.append(slots.pop(slot))",
    "slots[slot], slots[-1] = slots[-1], slots[slot]\n        out.append(slots.pop())",
)
_EDITS: dict[str, Change] = {
    "rows left behind": ("while slots:", "while False:"),
    "the rest unmixed": ("slots.pop(slot)", "slots.pop(0)"),
    "new row goes out": ("out.append(slots[slot])", "out.append(row)"),
    "rows move up": [
        ("slots[slot])", "slots.pop(slot))"),
        ("slots[slot] = row", "slots.append(row)"),
    ],
    "new row among the drawn": [
        ("% size", "% (size + 1)"),
        ("out.append(slots[slot])", "slots.append(row)"),
        ("slots[slot] = row", "out.append(slots.pop(slot))"),
    ],
    "new row can be picked": [
        ("% size", "% (size + 1)"),
        (
            "out.append(slots[slot])\n        slots[slot] = row",
            "slots.append(row)\n        slots[slot], slots[-1] = row, slots[slot]\n"
            "        out.append(slots.pop())",
        ),
    ],
    "picks begun anew": ("len(out)] % len(slots)", "len(out) - max(0, rows - size)] % len(slots)"),
    "few rows unmixed": (
        "while slots:",
        "while slots and rows <= size:\n        return slots\n    while slots:",
    ),
    "last row into the gap": [
        ("slots[slot] = row", "slots[slot], slots[-1] = slots[-1], row"),
        _LAST_INTO_THE_GAP,
    ],
    "the rest: last row into the gap": _LAST_INTO_THE_GAP,
    "emptied and filled": (
        "slot = picks[len(out)] % size\n        out.append(slots[slot])\n        slots[slot] = row",
        "while slots:\n            out.append(slots.pop(picks[len(out)] % len(slots)))\n"
        "        slots.append(row)",
    ),
}
_HINTS = {
    "rows left behind": "Rows are missing: those that still wait when the last row has come in "
    "never go out. With a buffer of 10,000 rows that is a loss of 10,000 rows an epoch.",
    "the rest unmixed": "All is right until the last row has come in. The rows that wait then go "
    "out as they stand; a pick decides there too.",
    "new row goes out": "Each row that arrives goes straight out again, so that the order is the "
    "order of the data with the first rows at its end. Which of the two has to happen first: the "
    "new row in, or the old one out?",
    "rows move up": "After a row has left, the rows behind it move up and the next one goes to the "
    "end, as list.pop and append do it. While rows arrive, each takes the very slot that was left.",
    "new row among the drawn": "The row that arrives is among those that are drawn from: there is "
    "a slot more than `size`, and a row may go out in the step in which it came.",
    "new row can be picked": "Your pick chooses among `size` + 1 rows, and the one that has just "
    "arrived is one of them. It must not go out in the step in which it arrives.",
    "picks begun anew": "The rows go out rightly until the last one has come in; then the picks "
    "are used from the first one again. Each pick serves once.",
    "few rows unmixed": "With no more rows than slots the rows go out as they came. The buffer "
    "then holds them all, and could mix them best.",
    "last row into the gap": "The row in the last slot is moved into the one that was left. That "
    "mixes as well, but it is another order: the task says who takes an empty slot.",
    "the rest: last row into the gap": "All is right until the last row has come in. Then you "
    "fill the gap with the last row that waits, where the rows behind it move up by one.",
    "emptied and filled": "The buffer is emptied to the last row before new ones come in. Rows of "
    "two fillings never mix: that is a shuffle of blocks.",
}

BUFFER = Exercise(
    id="shuffling.buffer",
    points=2,
    reference=buffered,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_buffer_cases,
    variant=lambda student: {
        "size": random.Random(f"size:{student}").choice(SIZES) if student else 4
    },
    explanation="Every row goes in once and out once, so the result is a permutation; that is "
    "the first thing to test. A row can come out as late as chance will have it, but at most "
    "`size` places early: row r is not in before r − size rows are out. So class-sorted "
    "data stays sorted in the large whatever the picks are, unless the buffer is as long as "
    "a class is. Chance stands outside as a list of picks, and so the order can be tested, and "
    "repeated after a crash.",
    hints=(
        "Follow the example and write down the slots after each row that goes out. Which rows "
        "change their slots while rows still arrive, and which do once no more arrive?",
        "While rows arrive and all slots are full, take the row out of the picked slot and then "
        "put the new row into the same slot. After that, go on with the next pick, now modulo the "
        "number of rows that still wait, and let the rows after the gap move up.",
        "`out.append(slots.pop(picks[len(out)] % len(slots)))` lets out one row once no more "
        "arrive. `slots` is the list of the rows that wait, and the length of `out`, the list of "
        "the rows that are out, tells which pick is next.",
    ),
)
