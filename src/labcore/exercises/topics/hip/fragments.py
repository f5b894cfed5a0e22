"""The matrix elements that a register of a lane holds in a matrix instruction."""

from __future__ import annotations

import random
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["HELD"]

# (tile, depth, bits) of the fp16 and fp32 instructions of CDNA2 and CDNA3.
INSTRUCTIONS = ((32, 8, 16), (16, 16, 16), (32, 2, 32), (16, 4, 32))


def held(
    matrix: str, lane: int, register: int, *, tile: int, depth: int, bits: int
) -> list[tuple[int, int]]:
    """The (row, column) of each element in a register of a lane, the lowest bits first."""
    groups = 64 // tile
    line, group = lane % tile, lane // tile
    if matrix == "D":
        row = 4 * groups * (register // 4) + 4 * group + register % 4
        return [(row, line)]
    packed = 1 if bits == 32 else 2
    first = depth // groups * group + packed * register  # neighbors along the depth
    ks = [first + item for item in range(packed)]
    return [(line, k) if matrix == "A" else (k, line) for k in ks]


def _cases(seed: int) -> list[dict[str, Any]]:
    """Some registers of A, B, and D in one lane of each group, for each instruction."""
    chance = random.Random(seed)
    cases = []
    for tile, depth, bits in INSTRUCTIONS:
        shape = {"tile": tile, "depth": depth, "bits": bits}
        groups = 64 // tile
        for group in range(groups):
            for matrix, registers in (("A", depth // groups), ("B", depth // groups), ("D", 0)):
                # Exchanging line and group moves every odd line.
                lane = tile * group + 2 * chance.randrange(tile // 2) + 1
                count = registers * bits // 32 or tile * tile // 64
                # Many wrong rules agree on the first registers of D, so the middle is tested too.
                some = {chance.randrange(count), count - 1, count // 2}
                cases += [
                    {"matrix": matrix, "lane": lane, "register": register, **shape}
                    for register in sorted(some)
                ]
    chance.shuffle(cases)
    return cases


_MISTAKES = [
    Mistake("line and group exchanged",
            ("lane % tile, lane // tile", "lane // groups, lane % groups"),
            "Neighboring lanes hold neighboring lines with the hardware, and belong to one "
            "group. With you they belong to different groups."),
    Mistake("rows in order", ("(row, line)", "(tile * tile // 64 * group + register, line)"),
            "Of D you give each group one block of rows without a gap. The groups take turns: four "
            "rows each, then four registers on comes the next round."),
    Mistake("rows in turn", ("(row, line)", "(groups * register + group, line)"),
            "Of D your groups take turns after every row. They do after four."),
    Mistake("rows of the small tile", ("4 * groups", "16"),
            "Your D is right for a tile of 16. How many rows one round takes depends on how many "
            "groups take part in it."),
    Mistake("D transposed", ("(row, line)", "(line, row)"),
            "Your D is transposed: a lane holds elements of one column of it."),
    Mistake("k in turn", ("first + item", "groups * (packed * register + item) + group"),
            "Of A and B a lane holds neighbors along the depth. With you the groups take turns "
            "after each."),
    Mistake("registers in turn", ("first + item", "packed * (groups * register + group) + item"),
            "Of A and B your groups take turns after each register. Each group has one share of "
            "the depth, of neighbors."),
    Mistake("one element a register", ("1 if bits == 32 else 2", "1"),
            "A register has 32 bits. Elements of 16 bits stand two in one."),
    Mistake("high half first", ("range(packed)", "reversed(range(packed))"),
            "The element in a register's low half comes first."),
    Mistake("A and B exchanged", ('"A"', '"B"'),
            "A has `tile` rows and B has `tile` columns; yours have it the other way."),
    Mistake("columns first", [("(row, line)", "(line, row)"), ('"A"', '"B"')],
            "Your pairs are (column, row) throughout; (row, column) is asked for."),
    Mistake("B as A", ('(line, k) if matrix == "A" else (k, line)', "(line, k)"),
            "Your B lies as A does. Its depth runs along its rows, (k, column)."),
]  # fmt: skip

HELD = Exercise(
    id="hip.held",
    points=4,
    beyond=2,
    reference=held,
    mistakes=_MISTAKES,
    cases=_cases,
    explanation="lane % tile is a row of A, a column of B and a column of D; lane // tile says "
    "which part of it. Along the depth each group holds neighbors, so one load of 8 bytes brings "
    "four halves of a row of keys. Down a column of D the groups take four rows each in turn. "
    "That D holds four neighbors of a column where A and B hold neighbors along the depth is no "
    "accident: computed as keys times queries, the scores of one product lie where the next one "
    "wants its weights, and no lane needs another's. This reference knows elements of 16 and 32 "
    "bits.",
    hints=(
        "First split `lane` into its group and its place in that group. For `tile` 32, which rows "
        "of D do registers 0, 3, and 4 of lane 0 hold?",
        "In A and B, the share of a group starts where the share of the group before it ends, and "
        "each register continues where the one before it stopped. In D, a lane fills four "
        "registers in each turn, and one turn of all groups covers four rows for each group.",
        "`row = 4 * groups * (register // 4) + 4 * group + register % 4` is the row of D, with "
        "`groups = 64 // tile` and `group = lane // tile`. It adds up the earlier turns, the "
        "groups before this one, and the place in the turn.",
    ),
)
