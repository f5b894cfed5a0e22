"""Which elements of a matrix instruction's matrices lie in a register of a lane."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["HELD"]

# (tile, depth, bits): what CDNA2 and CDNA3 have for fp16 and fp32.
INSTRUCTIONS = ((32, 8, 16), (16, 16, 16), (32, 2, 32), (16, 4, 32))


def held(
    matrix: str, lane: int, register: int, *, tile: int, depth: int, bits: int
) -> list[tuple[int, int]]:
    """The (row, column) of each element in a register of a lane, the lowest bits first."""
    groups = 64 // tile
    line, group = lane % tile, lane // tile
    if matrix == "D":
        return [(4 * groups * (register // 4) + 4 * group + register % 4, line)]
    neighbours = depth // groups  # that a lane holds
    if bits == 32:
        ks = [neighbours * group + register]
    else:
        ks = [neighbours * group + 2 * register, neighbours * group + 2 * register + 1]
    return [(line, k) if matrix == "A" else (k, line) for k in ks]


def _wrongly(fault: str) -> Callable[..., list[tuple[int, int]]]:
    def wrong(
        matrix: str, lane: int, register: int, *, tile: int, depth: int, bits: int
    ) -> list[tuple[int, int]]:
        groups = 64 // tile
        line, group = lane % tile, lane // tile
        if fault == "line and group exchanged":
            line, group = lane // groups, lane % groups
        if matrix == "D":
            row = 4 * groups * (register // 4) + 4 * group + register % 4
            if fault == "rows in order":
                row = tile * tile // 64 * group + register
            if fault == "rows in turn":
                row = groups * register + group
            if fault == "rows of the small tile":
                row = 16 * (register // 4) + 4 * group + register % 4
            return [(line, row) if fault in ("D transposed", "columns first") else (row, line)]
        neighbours = depth // groups
        packed = 32 // bits
        ks = [neighbours * group + packed * register + item for item in range(packed)]
        if fault == "k in turn":
            ks = [groups * (packed * register + item) + group for item in range(packed)]
        if fault == "registers in turn":
            ks = [packed * (groups * register + group) + item for item in range(packed)]
        if fault == "one element a register":
            ks = [neighbours * group + register]
        if fault == "high half first":
            ks.reverse()
        exchanged = ("A and B exchanged", "columns first")
        turned = "B" if fault in exchanged else "AB" if fault == "B as A" else "A"
        return [(line, k) if matrix in turned else (k, line) for k in ks]

    return wrong


def _cases(seed: int) -> list[dict[str, Any]]:
    """All registers of D in one lane of each group and some of A and B, of each instruction."""
    chance = random.Random(seed)
    cases = []
    for tile, depth, bits in INSTRUCTIONS:
        shape = {"tile": tile, "depth": depth, "bits": bits}
        groups = 64 // tile
        for group in range(groups):
            for matrix, registers in (("A", depth // groups), ("B", depth // groups), ("D", 0)):
                # An odd line, which no exchange of line and group leaves where it is.
                lane = tile * group + 2 * chance.randrange(tile // 2) + 1
                count = registers * bits // 32 or tile * tile // 64
                # The middle of D too: the rows of its first registers are alike for many rules.
                some = {chance.randrange(count), count - 1, count // 2}
                cases += [
                    {"matrix": matrix, "lane": lane, "register": register, **shape}
                    for register in sorted(some)
                ]
    chance.shuffle(cases)
    return cases


_HINTS = {
    "line and group exchanged": "Neighbouring lanes hold neighbouring lines with the hardware, "
    "and belong to one group. With you they belong to different groups.",
    "rows in order": "Of D you give each group one block of rows without a gap. The groups take "
    "turns: four rows each, then four registers on comes the next round.",
    "rows in turn": "Of D your groups take turns after every row. They do after four.",
    "rows of the small tile": "Your D is right for a tile of 16. How many rows one round takes "
    "depends on how many groups take part in it.",
    "D transposed": "Your D is transposed: a lane holds elements of one column of it.",
    "k in turn": "Of A and B a lane holds neighbours along the depth. With you the groups take "
    "turns after each.",
    "registers in turn": "Of A and B your groups take turns after each register. Each group has "
    "one share of the depth, of neighbours.",
    "one element a register": "A register has 32 bits. Elements of 16 bits stand two in one.",
    "high half first": "The element in a register's low half comes first.",
    "A and B exchanged": "A has `tile` rows and B has `tile` columns; yours have it the other way.",
    "columns first": "Your pairs are (column, row) throughout; (row, column) is asked for.",
    "B as A": "Your B lies as A does. Its depth runs along its rows, (k, column).",
}

HELD = Exercise(
    id="hip.held",
    reference=held,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    explanation="lane % tile is a row of A, a column of B and a column of D; lane // tile says "
    "which part of it. Along the depth each group holds neighbours, so one load of 8 bytes brings "
    "four halves of a row of keys. Down a column of D the groups take four rows each in turn. "
    "That D holds four neighbours of a column where A and B hold neighbours along the depth is no "
    "accident: computed as keys times queries, the scores of one product lie where the next one "
    "wants its weights, and no lane needs another's. This reference knows elements of 16 and 32 "
    "bits.",
)
