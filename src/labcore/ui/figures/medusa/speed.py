"""What a tree of n nodes yields, what a step with it costs, and which speed follows where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.medusa.picker import HEAD_SHARE, hundredths, machine, step_cost
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["TreeSweep", "speed_by_tree"]

Key = tuple[int, int, int, str]
_HERE, _THERE = {"color": draw.OURS}, {"color": PALETTE["green"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSweep:
    """The data for `speed_by_tree`.

    tokens: (heads, branching, nodes, temperature) -> expected tokens per step, and the replayed
    ones as (middle, low, high); each curve has all its trees from one node up. costs: v(1), v(2),
    ... of this CPU, in forwards over one token. drafting: the time of 0, 1, ... K heads in the same
    unit.
    """

    tokens: Mapping[Key, tuple[float, tuple[float, float, float]]]
    costs: Sequence[float]
    drafting: Sequence[float]

    def curve(self, heads: int, branching: int, temperature: str) -> list[list[float]]:
        """Return expected, middle, low and high by nodes, from 1 up. ValueError for no curve."""
        rows: list[list[float]] = []
        while (key := (heads, branching, len(rows) + 1, temperature)) in self.tokens:
            expected, found = self.tokens[key]
            rows.append([expected, *found])
        if not rows:
            raise ValueError(
                f"tokens must hold trees of {heads} heads, {branching} ranks and temperature "
                f"{temperature!r}, got none; offer only what was measured"
            )
        return rows

    def formula(self) -> Formula:
        """Return what the page needs to draw `speed_by_tree` itself."""
        return Formula("medusaSpeed", self._packed)

    def _packed(self) -> dict[str, Any]:
        keys = {(heads, ranks, warmth) for heads, ranks, _, warmth in self.tokens}
        return {
            "curves": {" ".join(map(str, key)): self.curve(*key) for key in sorted(keys)},
            "costs": list(self.costs),
            "drafting": list(self.drafting),
            "share": HEAD_SHARE,
        }


def speed_by_tree(
    nodes: int = 8,
    ridge: float = 300.0,
    batch: int = 1,
    heads: int = 4,
    branching: int = 4,
    temperature: str = "0",
    *,
    data: TreeSweep,
) -> go.Figure:
    """Draw tokens per step by the nodes of a tree, the step's cost on two machines, and the speed.

    nodes: the budget, marked; a tree with fewer nodes also serves larger budgets. ridge, batch: of
    the chosen machine, as in `Roofline.at_ridge`. heads, branching, temperature: as in the keys of
    data.tokens. Both speeds are replayed tokens over the step's cost in plain passes.
    """
    rows = data.curve(heads, branching, temperature)
    sizes = [*range(1, len(rows) + 1)]
    expected, middle, low, high = ([*column] for column in zip(*rows, strict=True))
    here = [data.costs[n] + data.drafting[heads] for n in sizes]
    there = [step_cost(n + 1, heads, ridge=ridge, batch=batch) for n in sizes]
    at = min(nodes, len(rows))
    fast = [[y / cost for y, cost in zip(middle, costs, strict=True)] for costs in (here, there)]
    spread = {
        "array": [h - m for h, m in zip(high, middle, strict=True)],
        "arrayminus": [m - lo for m, lo in zip(middle, low, strict=True)],
        "thickness": 1.2,
    }
    traces = [
        _line("expected if independent", sizes, expected, draw.PREDICTED, ""),
        {**_line("replayed", sizes, middle, {"color": draw.MEASURED}, ""), "error_y": spread},
        _ring(at, middle[at - 1], ""),
        _line("this CPU, measured", sizes, here, _HERE, "2"),
        _line(f"{machine(ridge, batch)}, by formula", sizes, there, _THERE, "2"),
        _ring(at, there[at - 1], "2"),
        _line("", sizes, fast[0], _HERE, "3", showlegend=False),
        _line("", sizes, fast[1], _THERE, "3", showlegend=False),
        _ring(at, fast[1][at - 1], "3"),
    ]
    told = f"{at} node{'' if at == 1 else 's'}: {hundredths(fast[0][at - 1])}x on this CPU, "
    told += f"{hundredths(fast[1][at - 1])}x there"
    figure = go.Figure(traces, {"title": told, "height": 640, **_axes(data)})
    return describe(
        figure,
        f"{told}. Replayed {middle[at - 1]:.2f} tokens per step at {here[at - 1]:.2f} plain passes "
        f"on this CPU and {there[at - 1]:.2f} on the chosen machine.",
    )


def _axes(data: TreeSweep) -> dict[str, Any]:
    most = max(nodes for _, _, nodes, _ in data.tokens)
    top = max(high for _, (_, _, high) in data.tokens.values())
    ends, passes = [0, 1.04 * most], [0, 1.05 * (data.costs[-1] + data.drafting[-1])]
    line = {"type": "line", "xref": "x3", "yref": "y3", "x0": 0, "x1": ends[1], "y0": 1, "y1": 1}
    return {
        "xaxis": {"anchor": "y", "range": ends, "showticklabels": False},
        "yaxis": {"domain": [0.69, 1], "title": "tokens per step", "range": [0.9, 1.05 * top]},
        "xaxis2": {"anchor": "y2", "range": ends, "showticklabels": False},
        "yaxis2": {"domain": [0.36, 0.64], "anchor": "x2", "title": "passes", "range": passes},
        "xaxis3": {"anchor": "y3", "range": ends, "title": "nodes of the tree"},
        "yaxis3": {"domain": [0, 0.31], "anchor": "x3", "title": "speed", "range": [0, 2.6]},
        "shapes": [{**line, "line": {"dash": "dot", "width": 1.5}}],
    }


def _line(
    name: str,
    x: Sequence[int],
    y: Sequence[float],
    line: Mapping[str, Any],
    axis: str,
    **more: Any,
) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [*x], "y": [*y], "name": name, "mode": "lines+markers",
        "marker": {"size": 4}, "line": line, "xaxis": f"x{axis}", "yaxis": f"y{axis}", **more,
    }  # fmt: skip


def _ring(x: float, y: float, axis: str) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [x], "y": [y], "mode": "markers", "showlegend": False,
        "marker": {"symbol": "circle-open", "size": 16, "color": PALETTE["gray"],
                   "line": {"width": 3}},
        "xaxis": f"x{axis}", "yaxis": f"y{axis}", "hoverinfo": "skip",
    }  # fmt: skip
