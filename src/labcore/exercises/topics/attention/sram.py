"""Find the largest tile of keys that fits into a multiprocessor's on-chip memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["LARGEST_TILE"]

SMALLEST = 16  # keys: the least that a matrix unit takes
POWERS, OTHERS = (64, 128), (72, 80, 96, 112)  # widths of a head
RATIOS, STAGES = (2, 4, 8), (3, 4, 5)
SINGLE = 4  # bytes per float32


def largest_tile(
    sram: int, head_dim: int, *, itemsize: int, ratio: int, stages: int
) -> tuple[int, int]:
    """Return the keys and bytes of the largest tile in `sram` bytes; (0, 0) if none fits."""
    width = 1 << (head_dim - 1).bit_length()
    keys, size, following = 0, 0, SMALLEST
    while True:
        queries = ratio * following
        needed = (queries + 2 * stages * following) * width * itemsize
        needed += queries * (following + width + 2) * SINGLE
        if needed > sram:
            return keys, size
        keys, size = following, needed
        following *= 2


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw memories for each ratio and number of stages.

    A power of two of keys fills one to the last byte, 48 or 96 keys fill another, and a third is
    one byte short of 16 keys. One of the first two has a head as wide as a power of two.
    """
    chance = random.Random(seed)
    cases = [{"sram": chance.randint(500, 1500), "head_dim": 200, "itemsize": 2}]
    for ratio, stages in itertools.product(RATIOS, STAGES):
        one, other = chance.sample((POWERS, OTHERS), 2)
        for keys, missing, widths in (
            (chance.choice((32, 64)), 0, one), (chance.choice((48, 96)), 0, other),
            (SMALLEST, 1, POWERS + OTHERS),
        ):  # fmt: skip
            head_dim = chance.choice(widths)
            itemsize = chance.choice((1, 2))
            width = 1 << (head_dim - 1).bit_length()
            needed = (ratio + 2 * stages) * keys * width * itemsize
            needed += ratio * keys * (keys + width + 2) * SINGLE
            cases.append({"sram": needed - missing, "head_dim": head_dim, "itemsize": itemsize})
    chance.shuffle(cases)
    return cases


def _own_shape(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"attention.largest_tile:{student}")
    return {"ratio": chance.choice(RATIOS), "stages": chance.choice(STAGES)}


_MISTAKES = [
    Mistake("first that does not fit",
            ("return keys, size", "return (following, needed) if keys else (0, 0)"),
            "Your tile is twice too large: it is the first one that does not fit."),
    Mistake("less than the budget", ("needed > sram", "needed >= sram"),
            "A tile that fills the memory to the last byte fits. Yours must be smaller than that."),
    Mistake("any multiple of 16", ("following *= 2", "following += SMALLEST"),
            "Your tile is a multiple of 16. It must be a power of two."),
    Mistake("smaller than 16", ("0, 0, SMALLEST", "0, 0, 1"),
            "Your tile has fewer than 16 keys where 16 do not fit. A matrix unit cannot use it: "
            "the answer is (0, 0)."),
    Mistake("at least 16", ("return keys, size", "return max(keys, SMALLEST), size or needed"),
            "You return 16 keys also where they do not fit."),
    Mistake("square", ("ratio * following", "following"),
            "Your tile has as many queries as keys. It has `ratio` times as many."),
    Mistake("ratio upside down", ("ratio * following", "following // ratio"),
            "Your tile has fewer queries than keys. It has `ratio` times as many."),
    Mistake("width as it is", ("1 << (head_dim - 1).bit_length()", "head_dim"),
            "Your rows are `head_dim` wide. The tile's are filled up to the next power of two, "
            "and the empty columns take memory like the others."),
    Mistake("powers doubled", ("(head_dim - 1).bit_length()", "head_dim.bit_length()"),
            "You make a head of 64 columns 128 wide. A width that is already a power of two stays "
            "as it is."),
    Mistake("one stage", ("2 * stages * following", "2 * following"),
            "You count keys and values once. Each of the `stages` holds a tile of its own."),
    Mistake("keys alone", ("2 * stages * following", "stages * following"),
            "The keys are counted and the values are not: each stage holds both."),
    Mistake("queries in stages", ("(queries + 2", "(stages * queries + 2"),
            "You count the queries once for each stage. They are loaded once and stay; only keys "
            "and values come by."),
    Mistake("no scores", ("(following + width + 2)", "(width + 2)"),
            "The scores are missing. They are the part that grows with the square of the tile."),
    Mistake("narrow scores",
            ("(following + width + 2) * SINGLE", "(following * itemsize + (width + 2) * SINGLE)"),
            "Your scores have `itemsize` bytes. They are float32, whatever the inputs are."),
    Mistake("no sums", ("(following + width + 2)", "(following + 2)"),
            "The weighted sums are missing: one row as wide as the head for each query."),
    Mistake("narrow sums",
            ("(following + width + 2) * SINGLE", "(width * itemsize + (following + 2) * SINGLE)"),
            "Your weighted sums have `itemsize` bytes. They are float32, whatever the inputs are."),
    Mistake("no statistics", ("(following + width + 2)", "(following + width)"),
            "The largest score and the total of each query are missing."),
    Mistake("what is left", ("return keys, size", "return keys, sram - size if keys else 0"),
            "Your second number is what is left of the memory. The bytes that the tile takes are "
            "asked for."),
]  # fmt: skip

LARGEST_TILE = Exercise(
    id="attention.largest_tile",
    points=3,
    reference=largest_tile,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_shape,
    returns=("keys", "bytes"),
    explanation="Doubling from the smallest tile finds the largest one, since the bytes grow with "
    "the keys. Queries, keys, values and sums grow in proportion, the scores with the square, so "
    "twice the memory does not always hold twice the tile. The tile decides the traffic: all keys "
    "and values are read once for each tile of queries, so one of twice as many queries halves "
    "that. More stages hide the time that a load takes, and cost tile.",
    hints=(
        "Get the 26,880 bytes of the example by hand, one item of the list at a time. Which items "
        "depend on `ratio`, and which on `stages`?",
        "Start with 16 keys and double them as long as the tile fits. Each query brings its own "
        "row, one score for each key, a weighted sum, and two more numbers, and only the keys and "
        "values are multiplied by `stages`.",
        "`needed = (queries + 2 * stages * n) * width * itemsize + queries * (n + width + 2) * 4` "
        "counts the bytes of a tile. Here `queries` is `ratio * n`, and `width` is the smallest "
        "power of two that is at least `head_dim`.",
    ),
)
