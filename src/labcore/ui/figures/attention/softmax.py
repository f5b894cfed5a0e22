"""One row of online softmax by hand: the largest score, the sum and the output, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.ui.theme import PALETTE

__all__ = ["SCORES", "THRESHOLD", "Step", "steps", "walk"]

SCORES = (1.0, 3.0, 2.0, 0.0, 4.0, 2.0, 5.0, 1.0)  # of keys 1 to 8; a key's value is its number
THRESHOLD = 8 * math.log(2)  # FlashAttention-4 rescales if a score grew by more than a factor 2^8
_LARGEST = 6  # the place of the score that a reader sets
_TILES = 4  # the columns of the table
_LINES = ("m", "factor", "sum ℓ", "output a", "a / ℓ")
_SEEN, _NOW, _LATER = PALETTE["blue"], PALETTE["orange"], "#c4c9ce"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The state after a tile. top: the reference m. factor: what the earlier sums were scaled by.

    grown: whether the tile has a larger score than all before.
    """

    top: float
    factor: float
    total: float
    acc: float
    grown: bool


def walk(
    scores: Sequence[float], values: Sequence[float], width: int, *, threshold: float = 0.0
) -> list[Step]:
    """Return the running softmax of one row after each tile of `width` keys.

    threshold: by how much the largest score may exceed m before m follows it and the sums are
    rescaled. 0 is the usual rule; a larger one gives the same output, as any m does.
    """
    top, total, acc, highest = -math.inf, 0.0, 0.0, -math.inf
    found = []
    for first in range(0, len(scores), width):
        tile = scores[first : first + width]
        largest = max(tile)
        grown, highest = first > 0 and largest > highest, max(highest, largest)
        new = largest if largest > top + threshold else top
        factor = math.exp(top - new) if top > -math.inf else 1.0
        weights = [math.exp(score - new) for score in tile]
        total = factor * total + sum(weights)
        pairs = zip(weights, values[first:], strict=False)
        acc = factor * acc + sum(weight * value for weight, value in pairs)
        top = new
        found.append(Step(top=top, factor=factor, total=total, acc=acc, grown=grown))
    return found


def steps(
    after: int = 3, largest: float = 5.0, width: int = 2, conditional: bool = False
) -> go.Figure:
    """Draw the row with the tiles seen so far, and m, the factor, the sum and the output of each.

    after: the tiles seen. largest: the score of key 7. conditional: FlashAttention-4's rule.
    """
    scores = [*SCORES]
    scores[_LARGEST] = largest
    values = [float(key) for key in range(1, len(scores) + 1)]
    states = walk(scores, values, width, threshold=THRESHOLD if conditional else 0.0)
    after = min(after, len(states))
    seen, now = after * width, (after - 1) * width
    colors = [
        _LATER if key >= seen else _NOW if key >= max(now, 0) else _SEEN
        for key in range(len(scores))
    ]
    figure = make_subplots(rows=2, cols=1, row_heights=[0.46, 0.54], vertical_spacing=0.16)
    figure.add_bar(
        x=[*range(1, 9)], y=scores, marker={"color": colors}, text=[f"{x:g}" for x in scores],
        textposition="outside", cliponaxis=False, hoverinfo="skip", row=1, col=1,
    )  # fmt: skip
    line = [states[after - 1].top] * 2 if after else [None, None]
    figure.add_scatter(
        x=[0.5, 8.5], y=line, mode="lines", hoverinfo="skip", row=1, col=1,
        line={"color": PALETTE["vermillion"], "dash": "dash", "width": 1.5},
    )  # fmt: skip
    words, shade = _table(states[:after], len(states))
    figure.add_heatmap(
        z=shade, x=[*range(_TILES)], y=[*range(len(_LINES))], showscale=False, xgap=2, ygap=2,
        zmin=0, zmax=1, colorscale=[[0, "rgba(128,128,128,0.1)"], [1, "rgba(230,159,0,0.4)"]],
        hoverinfo="skip", row=2, col=1,
    )  # fmt: skip
    figure.add_scatter(
        x=[*range(_TILES)] * len(_LINES),
        y=[line for line in range(len(_LINES)) for _ in range(_TILES)],
        mode="text", text=[word for row in words for word in row], textfont={"size": 12},
        hoverinfo="skip", row=2, col=1,
    )  # fmt: skip
    figure.update_layout(title=_title(states, after, scores, values), showlegend=False, height=470)
    figure.update_xaxes(title="key; its value is its number", dtick=1, row=1, col=1)
    figure.update_yaxes(title="score", range=[0, 1.25 * max(scores)], row=1, col=1)
    ends = [f"tile {at + 1}" for at in range(_TILES)]
    bare = {"showgrid": False, "zeroline": False}
    figure.update_xaxes(tickvals=[*range(_TILES)], ticktext=ends, **bare, row=2, col=1)
    figure.update_yaxes(
        tickvals=[*range(len(_LINES))], ticktext=_LINES, range=[len(_LINES) - 0.5, -0.5], **bare,
        row=2, col=1,
    )  # fmt: skip
    return figure


def _table(states: Sequence[Step], tiles: int) -> tuple[list[list[str]], list[list[float]]]:
    """Return the table's words and, as 1, the cells in which the earlier sums were rescaled."""
    words = [["" if at < tiles else "·" for at in range(_TILES)] for _ in _LINES]
    shade = [[0.0] * _TILES for _ in _LINES]
    for at, one in enumerate(states):
        for line, number in enumerate(
            (one.top, one.factor, one.total, one.acc, one.acc / one.total)
        ):
            words[line][at] = f"{number:.3g}" if at or line != 1 else "–"
        shade[1][at] = float(one.factor < 1)
    return words, shade


def _title(
    states: Sequence[Step], after: int, scores: Sequence[float], values: Sequence[float]
) -> str:
    if after < len(states):
        return f"After {after} of {len(states)} tiles"
    weights = [math.exp(score - max(scores)) for score in scores]
    exact = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    grown, scaled = sum(s.grown for s in states), sum(s.factor < 1 for s in states)
    return f"Softmax: {exact:.4g}. m grew {grown}×, rescaled {scaled}×"
