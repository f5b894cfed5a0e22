"""Colored files on their way through a shuffle buffer and through blocks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from labcore.shuffling import BlockShuffle, BufferShuffle, Order, shards_of
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["BATCH", "FILES", "ROWS", "flow"]

FILES = (24, 40, 16, 48, 28, 36)  # rows of each file
ROWS, BATCH = sum(FILES), 8
_FILE_OF = [number for number, rows in enumerate(FILES) for _ in range(rows)]
_COLORS = [color for name, color in PALETTE.items() if name != "gray"]
_SCALE = [
    [(number + side) / len(_COLORS), color]
    for number, color in enumerate(_COLORS)
    for side in (0, 1)
]
_PANELS = ((0.74, 0.94), (0.37, 0.57), (0.0, 0.2))  # their places on the page, from below


def flow(memory: int, given: int, block: int, seed: int = 0) -> go.Figure:
    """Draw the rows of six files on disk, and batches from a buffer and from blocks.

    memory: rows that each method holds. given: batches that have been given out; the rows that
    wait in memory stand pale after them. block: rows per block. A column is a batch of 8 rows.
    """
    blocks = max(1, memory // block)
    orders: dict[str, Order] = {
        f"A buffer of {memory} rows": BufferShuffle(ROWS, buffer_size=memory, seed=seed),
        f"{blocks} block{'s' * (blocks > 1)} of {block} row{'s' * (block > 1)}": BlockShuffle(
            shards_of(ROWS, block), blocks=blocks, seed=seed
        ),
    }
    figure, said = go.Figure(), []
    shown = given * BATCH
    for number, (name, rows, held) in enumerate(
        (
            ("On disk", list(range(ROWS)), []),
            *(_moved(name, order, memory, shown) for name, order in orders.items()),
        )
    ):
        out = rows if name == "On disk" else rows[:shown]
        files = _files_per_batch(rows[: shown or ROWS])
        axes = {"xaxis": "x", "yaxis": f"y{number + 1 if number else ''}"}
        figure.add_heatmap(z=_columns(out, 0), **axes, **_LOOK)
        if name != "On disk":
            figure.add_heatmap(z=_columns(held, given), opacity=0.35, **axes, **_LOOK)
        per = f": {files:.1f} files per batch" if given or not number else ""
        said.append(f"{name}{per}")
        figure.add_annotation(
            text=said[-1], x=0, xref="paper", xanchor="left", showarrow=False,
            y=_PANELS[number][1], yref="paper", yanchor="bottom", font={"size": 13},
        )  # fmt: skip
        figure.update_layout(
            {
                f"yaxis{number + 1 if number else ''}": {
                    "domain": _PANELS[number],
                    "visible": False,
                    "autorange": "reversed",
                }
            }
        )
    figure.update_layout(
        title="A column is a batch, a color is a file",
        xaxis={"title": "batch", "range": [-0.5, ROWS / BATCH - 0.5], "anchor": "y3"},
        height=440,
    )
    return describe(figure, f"After {given} batches. {'; '.join(said)}.")


_LOOK: dict[str, Any] = {
    "colorscale": _SCALE,
    "zmin": -0.5,
    "zmax": len(FILES) - 0.5,
    "showscale": False,
    "xgap": 1,
    "ygap": 1,
    "hoverinfo": "skip",
}


def _moved(name: str, order: Order, memory: int, shown: int) -> tuple[str, list[int], list[int]]:
    """Return an order's name, its rows, and those in memory after `shown` of them."""
    rows = list(order)
    if isinstance(order, BlockShuffle):
        stop = -(-shown // memory) * memory if shown else memory
        return name, rows, sorted(rows[shown : min(stop, ROWS)])
    gone = set(rows[:shown])
    return name, rows, [row for row in range(min(ROWS, shown + memory)) if row not in gone]


def _columns(rows: Sequence[int], start: int) -> list[list[int | None]]:
    """Return the files of rows as a grid of BATCH lines, the first row in column `start`."""
    grid: list[list[int | None]] = [[None] * (ROWS // BATCH) for _ in range(BATCH)]
    for place, row in enumerate(rows):
        column, line = divmod(place, BATCH)
        if start + column < ROWS // BATCH:
            grid[line][start + column] = _FILE_OF[row]
    return grid


def _files_per_batch(rows: Sequence[int]) -> float:
    starts = range(0, len(rows), BATCH)
    return fmean(len({_FILE_OF[row] for row in rows[at : at + BATCH]}) for at in starts)
