"""A tree of candidates into which a reader clicks nodes, and what a step with it yields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labcore.decoding.medusa import Tree, node_chances, replay_text
from labcore.decoding.theory.speedup import Roofline
from labcore.ui import draw
from labcore.ui.controls import Nodes
from labcore.ui.explorer import describe
from labcore.ui.figures.medusa.tree import branches
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["HEAD_SHARE", "Guesses", "hundredths", "step_cost", "tree_picker"]

HEAD_SHARE = 0.022
"""Bytes of one head with a matrix of its own over those of Llama 2 7B: 148 M of 6.74 B weights."""
_CHANCE = [[0, "#E69F00"], [1, "#D55E00"]]
_BARS = ("expected", "replayed", "speed here")  # and that on the chosen machine
_COLORS = (PALETTE["gray"], draw.MEASURED, draw.OURS, PALETTE["green"])
_TOP = 3.2  # of the bars' axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Guesses:
    """What `tree_picker` draws.

    tree: the nodes that can be chosen. accuracies: temperature -> [K, R]. ranks: temperature -> the
    `output_ranks` of each text, [T, K]. costs: v(1), v(2), ... of this CPU, in forwards over one
    token, one more than the nodes. drafting: the time of 0, 1, ... K heads in the same unit.
    """

    tree: Tree
    accuracies: Mapping[str, Sequence[Sequence[float]]]
    ranks: Mapping[str, Sequence[Sequence[Sequence[int]]]]
    costs: Sequence[float]
    drafting: Sequence[float]

    def nodes(self, default: Sequence[int]) -> Nodes:
        """Return the control that chooses nodes, named by their paths of ranks."""
        names = ["·".join(map(str, choice)) for choice in self.tree.choices]
        label = "nodes (click them)"
        return Nodes(parents=self.tree.parents, default=default, names=names, label=label)

    def formula(self) -> Formula:
        """Return what the page needs to draw `tree_picker` itself."""
        return Formula("medusaTree", self._packed)

    def _packed(self) -> dict[str, Any]:
        last = max(self.tree.ranks)
        return {
            "parents": self.tree.parents,
            "ranks": self.tree.ranks,
            "order": branches(self.tree.parents),
            "chances": {
                warmth: node_chances(self.tree, shares)
                for warmth, shares in self.accuracies.items()
            },
            # A character for each rank; "-" stands for ranks that no node has.
            "texts": {
                warmth: [
                    ["".join(str(r) if r <= last else "-" for r in row) for row in text]
                    for text in texts
                ]
                for warmth, texts in self.ranks.items()
            },
            "costs": list(self.costs),
            "drafting": list(self.drafting),
            "share": HEAD_SHARE,
        }


def step_cost(rows: int, heads: int, *, ridge: float, batch: int) -> float:
    """Return the time of a 7B's step in plain passes: `Roofline.cost` and the heads' bytes."""
    return Roofline.at_ridge(ridge).cost(rows, batch=batch) + HEAD_SHARE * heads


def hundredths(value: float) -> str:
    """Format with two digits after the point; a half rounds up, as on the page."""
    return f"{value + 1e-9:.2f}"


def machine(ridge: float, batch: int) -> str:
    """Return the name of a chosen machine and batch; a half rounds up, as on the page."""
    return f"ridge {ridge + 1e-9:.0f}, batch {batch}"


def tree_picker(
    nodes: Sequence[int] = (),
    temperature: str = "0",
    ridge: float = 300.0,
    batch: int = 1,
    *,
    data: Guesses,
) -> go.Figure:
    """Draw the candidates, with the chosen nodes filled, above the tokens and speeds that follow.

    nodes: the chosen ones, as numbers in data.tree. Each node says how often it's right if heads
    were independent, and the share of replayed steps that accepted it. ridge, batch: of the chosen
    machine, as in `Roofline.at_ridge`.
    """
    tree = Tree(tuple(data.tree.choices[node] for node in nodes))
    chances = node_chances(data.tree, data.accuracies[temperature])
    steps = [path for one in data.ranks[temperature] for path in replay_text(tree, one)]
    counted = Counter(nodes[at] for path in steps for at in path)
    shares = {node: counted[node] / len(steps) for node in nodes}
    expected = 1 + math.fsum(chances[node] for node in nodes)
    replayed = 1 + math.fsum(shares.values())
    here = data.costs[tree.size] + data.drafting[tree.depth]
    there = step_cost(tree.size + 1, tree.depth, ridge=ridge, batch=batch)
    values = (expected, replayed, replayed / here, replayed / there)
    title = f"{hundredths(replayed)} tokens per step, {hundredths(replayed / there)}x plain"
    figure = go.Figure(
        [*_tree_traces(data.tree, nodes, chances, shares), *_bars(values, machine(ridge, batch))],
        {
            "title": title,
            "showlegend": False,
            "height": 208 + 19 * (data.tree.size + 5),
            "margin": {"l": 8},
            **_axes(data.tree),
        },
    )
    return describe(
        figure,
        f"A tree of {tree.size} nodes: {expected:.2f} tokens per step if heads were independent, "
        f"{replayed:.2f} replayed, {replayed / here:.2f} times plain decoding on this CPU and "
        f"{replayed / there:.2f} times on the chosen machine.",
    )


def _axes(tree: Tree) -> dict[str, Any]:
    bare: dict[str, Any] = {"zeroline": False, "showgrid": False}
    split = 128 / (128 + 19 * (tree.size + 1))
    return {
        "xaxis": {
            "anchor": "y", "range": [-1.3, tree.depth + 0.2], "title": "head",
            "tickvals": list(range(tree.depth)), **bare,
        },
        "yaxis": {
            "anchor": "x", "domain": [split + 0.1, 1], "range": [tree.size - 0.4, -1.6],
            "visible": False, **bare,
        },
        "xaxis2": {"anchor": "y2", "range": [0, _TOP], "title": "tokens per step; times plain"},
        "yaxis2": {
            "anchor": "x2", "domain": [0, split], "autorange": "reversed", "showline": False,
            "ticks": "",
        },
        "shapes": [{
            "type": "line", "xref": "x2", "yref": "y2", "x0": 1, "x1": 1, "y0": -0.5, "y1": 3.5,
            "line": {"dash": "dot", "width": 1.5},
        }],
    }  # fmt: skip


def _bars(values: Sequence[float], machine: str) -> list[dict[str, Any]]:
    names = [*_BARS, machine]
    return [{
        "type": "bar", "orientation": "h", "x": list(values), "y": names, "xaxis": "x2",
        "yaxis": "y2", "marker": {"color": list(_COLORS)}, "hoverinfo": "none",
        "width": 0.7, "text": [hundredths(value) for value in values], "textposition": "outside",
        "cliponaxis": False,
    }]  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share + 1e-9:.0f}"


def _tree_traces(
    tree: Tree, chosen: Sequence[int], chances: Sequence[float], shares: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Return the edges of other nodes, those of chosen ones, and the nodes themselves."""
    order = branches(tree.parents)
    places = {-1: (-1, -1)} | {node: (tree.depths[node], row) for row, node in enumerate(order)}
    traces: list[dict[str, Any]] = []
    for inside, dash in ((False, "dot"), (True, "solid")):
        x: list[float | None] = []
        y: list[float | None] = []
        for node in order:
            if (node in chosen) is inside:
                (from_x, from_y), (to_x, to_y) = places[tree.parents[node]], places[node]
                x += [from_x, from_x, to_x, None]
                y += [from_y, to_y, to_y, None]
        line = {"color": PALETTE["gray"], "width": 2 if inside else 1, "dash": dash}
        traces.append(
            {"type": "scatter", "x": x, "y": y, "mode": "lines", "hoverinfo": "skip", "line": line}
        )
    shown = [-1, *order]
    traces.append(
        {
            "type": "scatter", "meta": "nodes", "customdata": shown, "mode": "markers+text",
            "x": [places[node][0] for node in shown], "y": [places[node][1] for node in shown],
            "text": ["the text so far", *(
                f"<b>{tree.ranks[node]}</b>  {_percent(chances[node])}/{_percent(shares[node])} %"
                if node in shares else f"{tree.ranks[node]}  {_percent(chances[node])} %"
                for node in order
            )],
            "textposition": "middle right", "textfont": {"size": 12}, "hoverinfo": "none",
            "cliponaxis": False,
            "marker": {
                "size": 14, "cmin": 0, "cmax": 1, "colorscale": _CHANCE,
                "symbol": ["circle", *(
                    "circle" if node in shares else "circle-open" for node in order
                )],
                # Chances are products and become small; their square roots still differ visibly.
                "color": [1.0, *(math.sqrt(chances[node]) for node in order)],
                "opacity": [1.0, *(1.0 if node in shares else 0.55 for node in order)],
            },
        }
    )  # fmt: skip
    return traces
