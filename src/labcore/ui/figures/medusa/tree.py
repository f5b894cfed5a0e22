"""Where Medusa's heads sit, and the tree of their candidates beside its mask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import plotly.graph_objects as go

from labcore.checks import one_of, positive_int
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["branches", "tree_view", "where_the_heads_sit"]

_KINDS = {
    "read": PALETTE["gray"],
    "frozen": PALETTE["blue"],
    "trained": PALETTE["orange"],
    "said": PALETTE["green"],
}
_CELLS = {"not seen": "rgba(128,128,128,0.14)", "ancestor": "#56B4E9", "itself": "#0072B2"}
_CHANCE = [[0, "#f4e3c4"], [1, "#D55E00"]]
_HIDDEN = {"visible": False}


class TreeLike(Protocol):
    """The parts of a `labcore.decoding.medusa.Tree` that are drawn."""

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """The path of ranks of each node."""

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node, -1 for children of the root."""


class _Sketch:
    """Boxes by kind, lines, arrowheads and words, collected into a fixed number of traces."""

    def __init__(self) -> None:
        self.boxes: dict[str, tuple[list[float | None], list[float | None]]] = {
            kind: ([], []) for kind in _KINDS
        }
        self.lines: tuple[list[float | None], list[float | None]] = ([], [])
        self.ends: list[tuple[float, float, str]] = []
        self.words: list[tuple[float, float, str]] = []

    def box(self, kind: str, left: float, right: float, low: float, high: float, text: str) -> None:
        x, y = self.boxes[kind]
        gap = [None] if x else []
        x += [*gap, left, right, right, left, left]
        y += [*gap, low, low, high, high, low]
        self.words.append(((left + right) / 2, (low + high) / 2, text))

    def line(self, *points: tuple[float, float], arrow: str | None = None) -> None:
        for along, values in zip(self.lines, zip(*points, strict=True), strict=True):
            along += [*([None] if along else []), *values]
        if arrow:
            self.ends.append((*points[-1], arrow))

    def traces(self, size: int) -> list[dict[str, Any]]:
        """Return the same traces for every sketch; size: font size of the words."""
        quiet: dict[str, Any] = {"type": "scatter", "hoverinfo": "skip"}
        ink = {"color": PALETTE["gray"], "width": 1.5}
        x, y = self.lines
        found = [{**quiet, "x": x, "y": y, "mode": "lines", "line": ink}]
        for kind, (x, y) in self.boxes.items():
            found.append(
                {
                    **quiet, "x": x, "y": y, "mode": "lines", "fill": "toself", "name": kind,
                    "fillcolor": draw.pale(_KINDS[kind]),
                    "line": {"color": _KINDS[kind], "width": 2},
                }
            )  # fmt: skip
        for symbol in ("triangle-up", "triangle-down"):
            ends = [(x, y) for x, y, one in self.ends if one == symbol]
            found.append(
                {
                    **quiet, "x": [x for x, _ in ends], "y": [y for _, y in ends],
                    "mode": "markers",
                    "marker": {"symbol": symbol, "size": 9, "color": PALETTE["gray"]},
                }
            )  # fmt: skip
        found.append(
            {
                **quiet, "x": [x for x, _, _ in self.words], "y": [y for _, y, _ in self.words],
                "mode": "text", "text": [text for _, _, text in self.words],
                "textposition": "middle center", "textfont": {"size": size},
            }
        )  # fmt: skip
        return found


def where_the_heads_sit(heads: int = 4, projection: str = "tied") -> go.Figure:
    """Sketch which token each head predicts after token t: the backbone's t + 1, head i t + 2 + i.

    heads: K, at least 1; projection: tied, low_rank or full, as in `MedusaHeads`. Raises
    ValueError for others.
    """
    positive_int("heads", heads)
    one_of("projection", projection, ("tied", "low_rank", "full"))
    sketch, half, last = _Sketch(), 0.43, heads + 2
    for column, text in enumerate(("t−1", "t")):
        sketch.box("read", column - half, column + half, 0, 0.7, text)
        sketch.line((column, 0.7), (column, 1.2), arrow="triangle-up")
    sketch.box("frozen", -half, 1 + half, 1.3, 2.7, "backbone")
    sketch.line((0.5, 2.7), (0.5, 3.2), arrow="triangle-up")
    sketch.box("frozen", -half, 1 + half, 3.3, 4.0, "hidden at t")
    sketch.line((0.5, 4.0), (0.5, 4.4), (last, 4.4))
    if projection != "full":
        sketch.box("frozen", 2 - half, last + half, 2.1, 2.7, "the backbone's projection")
    else:
        sketch.box("frozen", 2 - half, 2 + half, 2.1, 2.7, "V×C")
    for column in range(2, last + 1):
        head, foot = column - 3, 2.1
        sketch.line((column, 4.4), (column, 4.1 if head >= 0 else 2.8), arrow="triangle-down")
        if head >= 0:
            sketch.box("trained", column - half, column + half, 3.3, 4.0, "block")
            sketch.line((column, 3.3), (column, 2.8), arrow="triangle-down")
            if projection == "full":
                sketch.box("trained", column - half, column + half, 2.1, 2.7, "V×C")
            if projection == "low_rank":
                foot = 1.3
                sketch.box("trained", column - half, column + half, foot, 1.9, "+ A B")
                sketch.line((column, 2.1), (column, 1.9))
        sketch.line((column, foot), (column, 0.8), arrow="triangle-down")
        sketch.box("said", column - half, column + half, 0, 0.7, f"t+{column - 1}")
        sketch.words.append((column, -0.6, "own<br>head" if head < 0 else f"head<br>{head}"))
    wide = (last + 1 - 0.06) / len(_KINDS)
    for at, kind in enumerate(_KINDS):
        left = at * wide - half
        sketch.box(kind, left, left + 0.94 * wide, -1.75, -1.3, kind)
    title = f"one pass, {heads + 1} tokens said"
    figure = go.Figure(
        sketch.traces(12 if heads <= 4 else 11),  # narrow boxes on a phone
        {
            "title": title,
            "xaxis": {"range": [-0.6, last + 0.6], **_HIDDEN},
            "yaxis": {"range": [-1.9, 4.6], **_HIDDEN},
            "showlegend": False,
            "height": 440,
            "margin": {"l": 8, "r": 8, "b": 8},
        },
    )
    shares = {
        "tied": "the heads share the backbone's frozen projection to the vocabulary",
        "low_rank": "each head adds a trained product A B to the backbone's frozen projection",
        "full": "each head has a trained projection to the vocabulary of its own",
    }
    return describe(
        figure,
        f"A frozen backbone has read up to token t. From its hidden state there its own head says "
        f"token t+1, and {heads} trained heads say t+2 to t+{heads + 1}; {shares[projection]}.",
    )


def branches(parents: Sequence[int]) -> list[int]:
    """Return the nodes branch by branch: each parent, then all nodes below its first child, etc."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    found, waiting = [], children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += children.get(node, [])[::-1]
    return found


def _ancestors(parents: Sequence[int]) -> list[set[int]]:
    found: list[set[int]] = []
    for parent in parents:
        found.append({parent, *found[parent]} if parent >= 0 else set())
    return found


def _share(chance: float) -> str:
    """Format a share in whole percent, without the sign."""
    return "<1" if 0 < chance < 0.005 else f"{100 * chance:.0f}"


def tree_view(
    tree: TreeLike,
    chances: Sequence[float],
    measured: Sequence[float] | None = None,
    tokens: Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> go.Figure:
    """Draw a tree of candidates, one node per row, and beside it which nodes each node sees.

    chances: each node's probability of acceptance, shown by its color; measured: how often each was
    accepted; both [N] and written after the node, in percent. tokens: the nodes' texts; by default
    their ranks. Rows go branch by branch under the root; their numbers are the nodes' places in the
    draft. Raises ValueError if the lengths differ.
    """
    size = positive_int("nodes of the tree", len(tree.parents))
    for name, values in (("chances", chances), ("measured", measured), ("tokens", tokens)):
        if values is not None and len(values) != size:
            raise ValueError(
                f"{name} must have one entry for each of the {size} nodes, got {len(values)}"
            )
    told = _told(chances, measured)
    figure = _drawn(tree, chances, measured, tokens, title or told)
    edges = ", ".join(
        f"{node} after {'the root' if parent < 0 else parent} ({chances[node]:.1%}"
        + ("" if measured is None else f", measured {measured[node]:.1%}")
        + ")"
        for node, parent in enumerate(tree.parents)
    )
    return describe(figure, f"{f'{title}. ' if title else ''}{told}. Nodes: {edges}.")


def _told(chances: Sequence[float], measured: Sequence[float] | None) -> str:
    """Return both sums: at most one node per level is accepted, and the target adds a token."""
    title = f"{1 + math.fsum(chances):.2f} tokens/step expected"
    return title if measured is None else f"{title}, {1 + math.fsum(measured):.2f} measured"


def _drawn(
    tree: TreeLike,
    chances: Sequence[float],
    measured: Sequence[float] | None,
    tokens: Sequence[str] | None,
    title: str,
) -> go.Figure:
    parents, choices = tree.parents, tree.choices
    room = len(parents)
    order = branches(parents)
    deep = max((len(choice) for choice in choices), default=1)
    places: dict[int, tuple[int, int]] = {-1: (-1, -1)}  # node -> depth and row
    places |= {node: (len(choices[node]) - 1, row) for row, node in enumerate(order)}
    down = {"range": [room - 0.4, -1.6], "zeroline": False, "showgrid": False}
    behind = 1.1 if tokens is None else 1.8  # space for the words, in units of depth
    few = room <= 12  # the numbers of more columns would overlap
    return go.Figure(
        [
            _edges(parents, order, places),
            _nodes(order, places, choices, chances, measured, tokens),
            _mask(parents, order, gap=int(room <= 16)),
            *(
                {
                    "type": "scatter", "x": [None], "y": [None], "mode": "markers", "name": name,
                    "marker": {"symbol": "square", "size": 12, "color": color},
                }
                for name, color in _CELLS.items() if name != "not seen"
            ),
        ],
        {
            "title": title,
            "xaxis": {
                "domain": [0, 0.56], "anchor": "y", "range": [-1.5, deep - 0.4 + behind * deep],
                "title": "head", "tickvals": list(range(deep)), "zeroline": False,
                "showgrid": False,
            },
            "yaxis": {
                **down, "anchor": "x", "title": "node", "tickvals": list(range(room)),
                "ticktext": [str(node) for node in order], "tickfont": {"size": 11},
            },
            "xaxis2": {
                "domain": [0.6, 1], "anchor": "y2", "range": [-0.5, room - 0.5],
                "title": "sees node",
                "tickvals": list(range(room)) if few else [],
                "ticktext": [str(node) for node in order] if few else [], "tickangle": 0,
                "tickfont": {"size": 11}, "zeroline": False, "showgrid": False,
            },
            "yaxis2": {**down, "anchor": "x2", "showticklabels": False, "ticks": ""},
            "height": 134 + 19 * (room + 1),
            "margin": {"l": 44},
        },
    )  # fmt: skip


def _edges(
    parents: Sequence[int], order: Sequence[int], places: Mapping[int, tuple[int, int]]
) -> dict[str, Any]:
    """Return edges that go down from the parent, then across to the node; None between edges."""
    x: list[float | None] = []
    y: list[float | None] = []
    for node in order:
        (from_x, from_y), (to_x, to_y) = places[parents[node]], places[node]
        x += [*([None] if x else []), from_x, from_x, to_x]
        y += [*([None] if y else []), from_y, to_y, to_y]
    return {
        "type": "scatter", "x": x, "y": y, "mode": "lines", "hoverinfo": "skip", "name": "edges",
        "line": {"color": PALETTE["gray"], "width": 1.5}, "showlegend": False,
    }  # fmt: skip


def _nodes(
    order: Sequence[int],
    places: Mapping[int, tuple[int, int]],
    choices: Sequence[tuple[int, ...]],
    chances: Sequence[float],
    measured: Sequence[float] | None,
    tokens: Sequence[str] | None,
) -> dict[str, Any]:
    words, hovers = ["root"], ["the last token of the text"]
    for node in order:
        name = str(choices[node][-1]) if tokens is None else draw.label(draw.token(tokens[node], 8))
        shares = _share(chances[node]) + ("" if measured is None else f"/{_share(measured[node])}")
        words.append(f"<b>{name}</b>  {shares} %")
        ranks = ", ".join(map(str, choices[node]))
        hovers.append(
            f"node {node}: ranks {ranks}"
            + ("" if tokens is None else f"<br>token {name}")
            + f"<br>expected {chances[node]:.2%}"
            + ("" if measured is None else f"<br>measured {measured[node]:.2%}")
        )
    shown = [places[node] for node in (-1, *order)]
    return {
        "type": "scatter", "x": [x for x, _ in shown], "y": [y for _, y in shown],
        "mode": "markers+text", "text": words, "textposition": "middle right", "name": "nodes",
        "hovertext": hovers, "hoverinfo": "text", "showlegend": False, "cliponaxis": False,
        "textfont": {"size": 11},
        "marker": {
            "size": 11, "cmin": 0, "cmax": 1, "colorscale": _CHANCE,
            # Chances are products and become small; their square roots still differ visibly.
            "color": [1.0, *(math.sqrt(chances[node]) for node in order)],
            "line": {"width": 1, "color": PALETTE["gray"]},
        },
    }  # fmt: skip


def _mask(parents: Sequence[int], order: Sequence[int], *, gap: int) -> dict[str, Any]:
    """Return the mask in row order, rows seeing columns: 0 not seen, 1 an ancestor, 2 the node."""
    above = _ancestors(parents)
    cells = [[2 if b == a else int(b in above[a]) for b in order] for a in order]
    colors = list(_CELLS.values())
    return {
        "type": "heatmap", "z": cells, "x": list(range(len(order))), "y": list(range(len(order))),
        "xaxis": "x2", "yaxis": "y2", "zmin": -0.5, "zmax": 2.5, "showscale": False,
        "colorscale": [
            [edge / 3, color] for i, color in enumerate(colors) for edge in (i, i + 1)
        ],
        "xgap": gap, "ygap": gap, "name": "mask", "hoverinfo": "skip",
    }  # fmt: skip
