"""What Medusa's heads learn, and the tokens per step they gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "TreeSweep",
    "accuracy_by_distance",
    "against_peers",
    "heads_learn",
    "tokens_by_tree",
]

Table = Tensor | Sequence[Sequence[float]]
Key = tuple[int, int, int, str]
_MOST_POINTS = 250  # per curve, because the page contains each of them


def _rows(table: Table) -> list[list[float]]:
    return [[float(x) for x in row] for row in table]


def accuracy_by_distance(
    accuracies: Mapping[str, Table],
    *,
    title: str,
    top: int = 5,
) -> go.Figure:
    """Draw how often each head is right, with one guess (solid) and with `top` guesses (dashed).

    accuracies: name -> [K, R], as from `head_accuracies`: the share of head i's token of rank r.
    Head i predicts the token i + 2 places after the last one read.
    """
    figure, words, most = go.Figure(), [], 0
    for at, (name, table) in enumerate(accuracies.items()):
        rows = _rows(table)
        places, most = list(range(2, len(rows) + 2)), max(most, len(rows))
        best = [row[0] for row in rows]
        several = [list(accumulate(row))[min(top, len(row)) - 1] for row in rows]
        color = draw.COLORS[at % len(draw.COLORS)]
        marker = {"size": 10, "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)], "color": color}
        for label, y, dash in (
            (f"{name}, first guess", best, "solid"),
            (f"{name}, best {top}", several, "dash"),
        ):
            figure.add_scatter(
                x=places, y=y, mode="lines+markers", name=label, marker=marker,
                line={"color": color, "dash": dash},
            )  # fmt: skip
        words.append(
            f"{name}, first guess and best {top}: "
            + ", ".join(
                f"head {i} {one:.1%} and {more:.1%}"
                for i, (one, more) in enumerate(zip(best, several, strict=True))
            )
        )
    places = list(range(2, most + 2))
    figure.update_layout(
        title=title,
        xaxis={
            "title": "places after the last token read",
            "tickvals": places,
            "ticktext": [f"{place}<br>head {place - 2}" for place in places],
            "range": [1.7, most + 1.3],
        },
        yaxis={"title": "right tokens", "range": [0, 1], "tickformat": ".0%"},
        height=480,
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSweep:
    """The data for `tokens_by_tree`.

    tokens: (heads, branching, nodes, temperature) -> expected tokens per step, and the measured
    ones as (middle, low, high) or None. costs: tokens of one forward -> its time, in one-token
    forwards; values in between, starting from 1, are interpolated linearly. draft_cost: the heads'
    time per step in the same unit: one number, or one for each number of heads.
    """

    tokens: Mapping[Key, tuple[float, tuple[float, float, float] | None]]
    costs: Mapping[int, float]
    draft_cost: float | Mapping[int, float] = 0.0
    top: float = field(init=False)

    def __post_init__(self) -> None:
        ends = [max((expected, *(found or ()))) for expected, found in self.tokens.values()]
        object.__setattr__(self, "top", 1.1 * max(1.0, *ends))

    def curve(self, heads: int, branching: int, temperature: str) -> dict[int, Any]:
        """Return nodes -> (expected, measured), in order. Raises ValueError if there are none."""
        found = {
            nodes: self.tokens[key]
            for key in sorted(self.tokens)
            if (key[0], key[1], key[3]) == (heads, branching, temperature)
            for nodes in (key[2],)
        }
        if not found:
            raise ValueError(
                f"tokens must hold trees of {heads} heads, {branching} ranks and temperature "
                f"{temperature!r}, got none; offer only what was measured"
            )
        return found

    def step_cost(self, heads: int, nodes: int) -> float:
        """Return the time of a step with a tree of `nodes`. Raises ValueError beyond the costs."""
        drafting = self.draft_cost
        if isinstance(drafting, Mapping):
            if heads not in drafting:
                raise ValueError(f"draft_cost must have {heads} heads, got {sorted(drafting)}")
            drafting = drafting[heads]
        return _between({1: 1.0, **self.costs}, nodes + 1) + drafting


def _between(costs: Mapping[int, float], tokens: int) -> float:
    """Return v(tokens): measured, or interpolated between the two measured neighbors."""
    below = max((n for n in costs if n <= tokens), default=None)
    above = min((n for n in costs if n >= tokens), default=None)
    if below is None or above is None:
        raise ValueError(
            f"costs must reach {tokens} tokens of one forward, got {min(costs)} to {max(costs)}"
        )
    if below == above:
        return costs[below]
    share = (tokens - below) / (above - below)
    return (1 - share) * costs[below] + share * costs[above]


def tokens_by_tree(
    nodes: int = 8,
    heads: int = 4,
    branching: int = 4,
    temperature: str = "0",
    *,
    data: TreeSweep,
) -> go.Figure:
    """Draw tokens per step by the nodes of a tree, expected and measured, and the resulting speed.

    nodes: the budget, marked; a tree with fewer nodes also serves larger budgets. heads, branching,
    temperature: as in the keys of data.tokens. Speed is tokens divided by the time of a step.
    """
    curve = data.curve(heads, branching, temperature)
    at = max((n for n in curve if n <= nodes), default=min(curve))
    measured = {n: found for n, (_, found) in curve.items() if found is not None}
    cost = {n: data.step_cost(heads, n) for n in curve}
    expected = {n: value for n, (value, _) in curve.items()}
    middles = {n: found[0] for n, found in measured.items()}
    lower = {"xaxis": "x2", "yaxis": "y2"}
    sizes = sorted({key[2] for key in data.tokens})
    ends = [0, 1.04 * sizes[-1]]
    chosen = middles.get(at, expected[at])
    told = _said(at, expected, middles, cost)
    figure = go.Figure(
        [
            _line("expected", expected, draw.PREDICTED),
            {
                **_line("measured", middles, {"color": draw.MEASURED}),
                "error_y": {
                    "array": [high - middle for middle, _, high in measured.values()],
                    "arrayminus": [middle - low for middle, low, _ in measured.values()],
                    "thickness": 1.2,
                },
            },
            _ring(at, chosen, showlegend=False),
            _line("if every forward cost 1", expected,
                  {"color": PALETTE["green"], "dash": "dot"}, **lower),
            _line("speed, expected", _over(expected, cost), draw.PREDICTED, showlegend=False,
                  **lower),
            _line("speed, measured tokens", _over(middles, cost), {"color": draw.MEASURED},
                  showlegend=False, **lower),
            _ring(at, chosen / cost[at], name="chosen tree", **lower),
            {"x": ends, "y": [1, 1], "mode": "lines", "line": {**draw.PREDICTED, "dash": "dot"},
             "showlegend": False, "hoverinfo": "skip", **lower},
        ],
        {
            "title": told,
            "xaxis": {"anchor": "y", "range": ends, "showticklabels": False},
            "yaxis": {"domain": [0.54, 1], "title": "tokens per step", "range": [0.9, data.top]},
            "xaxis2": {"anchor": "y2", "range": ends, "title": "nodes of the tree"},
            "yaxis2": {"domain": [0, 0.46], "anchor": "x2", "title": "speed over plain",
                       "range": [0, data.top]},
            "height": 544,
        },
    )  # fmt: skip
    tree = f"{at} {'node' if at == 1 else 'nodes'}"
    return describe(figure, f"{tree}: {told}, {expected[at]:.2f} tokens per step expected.")


def _said(
    at: int, expected: Mapping[int, float], middles: Mapping[int, float], cost: Mapping[int, float]
) -> str:
    tokens = middles.get(at, expected[at])
    kind = "measured" if at in middles else "expected"
    return f"{tokens / cost[at]:.2f}x plain: {tokens:.2f} {kind} at cost {cost[at]:.2f}"


def _over(tokens: Mapping[int, float], cost: Mapping[int, float]) -> dict[int, float]:
    return {n: value / cost[n] for n, value in tokens.items()}


def _line(
    name: str, points: Mapping[int, float], line: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "type": "scatter", "x": list(points), "y": list(points.values()), "name": name,
        "mode": "lines+markers", "marker": {"size": 4 if line is draw.PREDICTED else 6},
        "line": line, **more,
    }  # fmt: skip


def _ring(x: float, y: float, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter", "x": [x], "y": [y], "mode": "markers",
        "marker": {"symbol": "circle-open", "size": 18, "color": PALETTE["gray"],
                   "line": {"width": 3}},
        **more,
    }  # fmt: skip


def heads_learn(
    per_head: Table,
    *,
    title: str,
    levels: Mapping[str, float] | None = None,
) -> go.Figure:
    """Draw each head's loss during its training.

    per_head: [steps, K] in nats per token, as in `HeadsCurve`; of more than 250 steps, every n-th
    and the last are drawn. levels: name -> a loss to compare with, dashed.
    """
    rows = _rows(per_head)
    stride = -(-len(rows) // _MOST_POINTS)
    kept = sorted({*range(0, len(rows), stride), len(rows) - 1})
    figure, words = go.Figure(), []
    for i in range(len(rows[0])):
        figure.add_scatter(
            x=[step + 1 for step in kept], y=[rows[step][i] for step in kept], mode="lines",
            name=f"head {i}", line={"color": draw.COLORS[i % len(draw.COLORS)]},
        )  # fmt: skip
        words.append(f"head {i} from {rows[0][i]:.2f} to {rows[-1][i]:.2f}")
    for (name, level), dash in zip(
        (levels or {}).items(), ("dash", "dot", "dashdot"), strict=False
    ):
        figure.add_scatter(
            x=[1, len(rows)],
            y=[level] * 2,
            mode="lines",
            name=name,
            line={**draw.PREDICTED, "dash": dash},
        )
        words.append(f"{name} {level:.2f}")
    figure.update_layout(
        title=title, xaxis={"title": "steps"}, yaxis={"title": "loss (nats per token)"}, height=440
    )
    return describe(draw.named_at_ends(figure), f"{title}. {', '.join(words)}.")


def against_peers(
    speeds: Mapping[str, Sequence[float]],
    tokens: Mapping[str, Sequence[float]],
    *,
    title: str,
) -> go.Figure:
    """Draw tokens per step and speedup over plain decoding for each way; the gap is the way's cost.

    speeds: way -> samples of tokens per second relative to plain decoding; tokens: way -> samples
    of tokens per step. Both show their median and middle 60 %, with a dashed line at 1.
    """
    figure, words = go.Figure(), []
    names = list(dict.fromkeys((*speeds, *tokens)))
    for label, rows, color, symbol in (
        ("tokens per step", tokens, "blue", "circle"),
        ("speed over plain", speeds, "vermillion", "x"),
    ):
        middles, bars = draw.medians(list(rows.values()))
        figure.add_scatter(
            x=middles, y=list(rows), error_x=bars, mode="markers", name=label,
            marker={"color": PALETTE[color], "size": 12, "symbol": symbol},
        )  # fmt: skip
        words.append(
            f"{label}: " + ", ".join(f"{n} {x:.2f}" for n, x in zip(rows, middles, strict=True))
        )
    figure.add_vline(x=1, line=draw.PREDICTED)
    figure.update_layout(
        title=title,
        xaxis={"title": "over plain decoding (times)", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "categoryarray": names, "categoryorder": "array"},
        legend={"xref": "container"},  # no room on a phone beside the names
        height=200 + 40 * len(names),
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")
