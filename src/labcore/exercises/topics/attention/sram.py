"""The largest tile of keys that fits into a multiprocessor's on-chip memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["LARGEST_TILE"]

SMALLEST = 16  # keys; a matrix unit takes no fewer
RATIOS, STAGES = (2, 4, 8), (3, 4, 5)
SINGLE = 4  # bytes of a float32


def largest_tile(
    sram: int, head_dim: int, *, itemsize: int, ratio: int, stages: int
) -> tuple[int, int]:
    """Keys of the largest tile within `sram` bytes, and its bytes; (0, 0) where none fits."""
    width = 1 << (head_dim - 1).bit_length()
    keys, size = 0, 0
    following = SMALLEST
    while True:
        queries = ratio * following
        needed = (queries + 2 * stages * following) * width * itemsize
        needed += queries * (following + width + 2) * SINGLE
        if needed > sram:
            return keys, size
        keys, size = following, needed
        following *= 2


def _faulty_bytes(
    keys: int, head_dim: int, itemsize: int, ratio: int, stages: int, fault: str
) -> int:
    width = head_dim if fault == "width as it is" else 1 << (head_dim - 1).bit_length()
    queries = {"square": keys, "ratio upside down": keys // ratio}.get(fault, ratio * keys)
    staged = {"one stage": 2, "keys alone": stages, "queries in stages": 2 * stages}
    held = staged.get(fault, 2 * stages) * keys
    held += queries * (stages if fault == "queries in stages" else 1)
    score = itemsize if fault == "narrow scores" else SINGLE
    scores = 0 if fault == "no scores" else queries * keys * score
    sums = {"no sums": 0, "narrow sums": itemsize}.get(fault, SINGLE)
    rest = 0 if fault == "no statistics" else 2 * queries * SINGLE
    return held * width * itemsize + scores + queries * width * sums + rest


def _wrongly(fault: str) -> Callable[..., tuple[int, int]]:
    def tile(
        sram: int, head_dim: int, *, itemsize: int, ratio: int, stages: int
    ) -> tuple[int, int]:
        def needed(keys: int) -> int:
            return _faulty_bytes(keys, head_dim, itemsize, ratio, stages, fault)

        def fits(keys: int) -> bool:
            return needed(keys) < sram + int(fault != "less than the budget")

        keys = smallest = 1 if fault == "smaller than 16" else SMALLEST
        if fault == "any multiple of 16":
            while fits(keys + SMALLEST):
                keys += SMALLEST
        while fits(2 * keys) and fault != "any multiple of 16":
            keys *= 2
        if fault == "first that does not fit" and fits(keys):
            keys *= 2
        if keys == smallest and not fits(keys):
            return (0, 0) if fault != "at least 16" else (keys, needed(keys))
        return keys, sram - needed(keys) if fault == "what is left" else needed(keys)

    return tile


def _cases(seed: int) -> list[dict[str, Any]]:
    """For every student's numbers a memory that a tile fills to the last byte, one that 48 or 96
    keys fill, and one that lacks a byte for 16 keys.
    """
    chance = random.Random(seed)
    cases = [{"sram": chance.randint(500, 1500), "head_dim": 200, "itemsize": 2}]
    for ratio, stages in itertools.product(RATIOS, STAGES):
        for keys, missing in (
            (chance.choice((32, 64)), 0), (chance.choice((48, 96)), 0), (SMALLEST, 1),
        ):  # fmt: skip
            head_dim = chance.choice((64, 72, 80, 96, 112, 128))
            itemsize = chance.choice((1, 2))
            sram = _faulty_bytes(keys, head_dim, itemsize, ratio, stages, "") - missing
            cases.append({"sram": sram, "head_dim": head_dim, "itemsize": itemsize})
    chance.shuffle(cases)
    return cases


def _own_shape(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"attention.largest_tile:{student}")
    return {"ratio": chance.choice(RATIOS), "stages": chance.choice(STAGES)}


_HINTS = {
    "first that does not fit": "Your tile is twice too large: it is the first one that does not "
    "fit.",
    "less than the budget": "A tile that fills the memory to the last byte fits. Yours must be "
    "smaller than that.",
    "any multiple of 16": "Your tile is a multiple of 16. It must be a power of two.",
    "smaller than 16": "Your tile has fewer than 16 keys where 16 do not fit. A matrix unit cannot "
    "use it: the answer is (0, 0).",
    "at least 16": "You return 16 keys also where they do not fit.",
    "square": "Your tile has as many queries as keys. It has `ratio` times as many.",
    "ratio upside down": "Your tile has fewer queries than keys. It has `ratio` times as many.",
    "width as it is": "Your rows are `head_dim` wide. The tile's are filled up to the next power "
    "of two, and the empty columns take memory like the others.",
    "one stage": "You count keys and values once. Each of the `stages` holds a tile of its own.",
    "keys alone": "The keys are counted and the values are not: each stage holds both.",
    "queries in stages": "You count the queries once for each stage. They are loaded once and "
    "stay; only keys and values come by.",
    "no scores": "The scores are missing. They are the part that grows with the square of the "
    "tile.",
    "narrow scores": "Your scores have `itemsize` bytes. They are float32, whatever the inputs "
    "are.",
    "no sums": "The weighted sums are missing: one row as wide as the head for each query.",
    "narrow sums": "Your weighted sums have `itemsize` bytes. They are float32, whatever the "
    "inputs are.",
    "no statistics": "The largest score and the total of each query are missing.",
    "what is left": "Your second number is what is left of the memory. The bytes that the tile "
    "takes are asked for.",
}

LARGEST_TILE = Exercise(
    id="attention.largest_tile",
    reference=largest_tile,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_shape,
    returns=("keys", "bytes"),
    explanation="Doubling from the smallest tile finds the largest one, since the bytes grow with "
    "the keys. Queries, keys, values and sums grow in proportion, the scores with the square, so "
    "twice the memory does not always hold twice the tile. The tile decides the traffic: all keys "
    "and values are read once for each tile of queries, so one of twice as many queries halves "
    "that. More stages hide the time that a load takes, and cost tile.",
)
