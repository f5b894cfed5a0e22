"""A layout of a tile in LDS that avoids bank conflicts along rows and along columns."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.hip.emulated import EmulatedExercise
from labcore.exercises.wording import describe
from labcore.hip import Program, load

__all__ = ["PLACE_TILE"]

# In each step a wavefront writes or reads the words of LDS that the host lists, one per lane.
WALK = """\
#include "portable.h"

__global__ void __launch_bounds__(64)
walk(Global<const int> places, Global<float> seen, int steps, int writes) {
  SHARED(float, tile, 16384);
  for (int step = 0; step < steps; ++step) {
    const int at = places[step * 64 + threadIdx.x];
    if (writes) tile[at] = 1.0f;
    if (!writes) seen[threadIdx.x] = tile[at];
  }
}
ENTRY(walk, walk)
"""
COLUMNS = (64, 96, 128, 160, 192)
SPARE = 8  # words per row beyond its elements


def place_tile(rows: int, columns: int, spare: int) -> Tensor:
    """[rows, columns] of int64: the word of LDS in which each element stands."""
    del spare
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return row * (columns + 1) + column


@functools.cache
def _walk() -> Program:
    return load(WALK)


@functools.lru_cache(maxsize=256)
def _conflicts(order: tuple[int, ...], *, writes: bool) -> int:
    """Cycles that a wavefront loses to conflicts when it accesses the words in `order`."""
    places = torch.tensor(order, dtype=torch.int32)
    given: dict[str, Tensor | int] = {"places": places, "seen": torch.zeros(64)}
    given |= {"steps": len(order) // 64, "writes": int(writes)}
    launched = _walk().launch("walk", grid=1, block=64, arguments=given, count=True)
    return launched.lds_conflicts if launched else 0


def _found(table: Any, case: Mapping[str, Any]) -> tuple[str, str]:
    """Why a table is not allowed ("" if it is), and the bank conflicts that it causes."""
    shape = rows, columns = case["rows"], case["columns"]
    words = rows * (columns + case["spare"])
    if not isinstance(table, Tensor) or table.dtype != torch.int64 or tuple(table.shape) != shape:
        return f"the result must be an int64 tensor of shape {shape}, got {describe(table)}", ""
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= words:
        return f"the words are {low} to {high}; there are those from 0 to {words - 1}", ""
    if shared := table.numel() - int(table.unique().numel()):
        return f"{shared} elements stand in a word that another one has already", ""
    by_rows = _conflicts(tuple(table.flatten().tolist()), writes=True)
    by_columns = _conflicts(tuple(table.T.flatten().tolist()), writes=False)
    return "", (
        f"with {rows} rows the emulator counts {by_rows} lost cycles when rows are written and "
        f"{by_columns} when columns are read"
    )


def _compare(
    answers: Sequence[Any], wanted: Sequence[Any], cases: Sequence[Mapping[str, Any]]
) -> str | None:
    """A complaint unless each answer is allowed and has the conflicts of the wanted one.

    Every layout without conflicts is therefore right, and the lost cycles tell mistakes apart.
    Nothing is random, so there are no false alarms.
    """
    for at, (came, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        mine, theirs = _found(came, case), _found(right, case)
        if mine != theirs:
            return f"in case {at} of {len(cases)}, {mine[0] or mine[1]}"
    return None


def _cases(seed: int) -> list[dict[str, Any]]:
    """Both numbers of rows, in random order. Each tile fits into LDS with its spare words."""
    rows = random.Random(seed).sample((32, 64), 2)
    return [{"rows": count, "spare": SPARE} for count in rows]


def _own_columns(student: int) -> Mapping[str, Any]:
    return {"columns": random.Random(f"hip.place_tile:{student}").choice(COLUMNS)}


_MISTAKES = [
    Mistake("as it is", ("(columns + 1)", "columns"),
            "Row after row without a gap: a row's length is a multiple of 32, so a column stands "
            "in one bank, and 32 lanes that read it wait for each other."),
    Mistake("transposed", ("row * (columns + 1) + column", "column * rows + row"),
            "Now a column's elements are neighbors, and a row stands in one bank: reading is free "
            "and writing is not."),
    Mistake("two words more", ("+ 1", "+ 2"),
            "A column of yours stands in every second bank, and two lanes share each of them. That "
            "is so where rows are an even number of words apart: its multiples meet half of the 32 "
            "banks at most."),
    Mistake("four words more", ("+ 1", "+ 4"),
            "A column of yours stands in eight of the 32 banks. Four words more for each row do "
            "that, which keep the rows aligned to 16 bytes. Rows that are padded must be apart by "
            "a number with no factor in common with 32."),
    Mistake("eight words more", ("+ 1", "+ 8"),
            "A column of yours stands in four of the 32 banks. All eight spare words in each row "
            "do that: rows that are padded must be apart by a number with no factor in common with "
            "32. You need not use all that there is."),
    Mistake("a round of banks more", ("+ 1", "+ 32"),
            "Your table is larger than it may be, and no better for it: 32 words more bring each "
            "row back to the bank where it was."),
    Mistake("shifted by the row's bank", ("(columns + 1) + column", "columns + column + row % 32"),
            "Each row is shifted by its number modulo 32, and after 32 rows the shift begins anew: "
            "there one row's end and the next one's beginning are in one place."),
]  # fmt: skip

PLACE_TILE = EmulatedExercise(
    id="hip.place_tile",
    points=4,
    beyond=2,
    reference=place_tile,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_columns,
    ready=_walk,
    compare=_compare,
    explanation="32 lanes are served at a time, by 32 banks of one word each. Along a row "
    "neighboring words are in neighboring banks whatever the layout; down a column the lanes are "
    "a row apart, and meet all banks if that distance has no factor in common with 32, which any "
    "odd number has not. One spare word a row is enough. This reference needs it. Where there is "
    "none, look for an order of a row's words that differs from row to row and keeps each word in "
    "its row.",
    hints=(
        "Take 32 neighbors of one column in the plain layout. How many words apart do they stand, "
        "and in which banks are they?",
        "Leave a gap after each row, so that the distance from one row to the next has no factor "
        "in common with 32. Then 32 neighbors of a column meet 32 different banks, and you need "
        "not use all spare words for that.",
        "`row * (columns + 1) + column` is the word of an element: one free word after each row "
        "makes the distance between rows odd.",
    ),
)
