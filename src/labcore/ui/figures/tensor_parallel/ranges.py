"""Simulated ranges beside the rule that judges them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.studies.tensor_parallel.ranges import Range
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["gain_view", "ranges_view"]

_ROW, _AROUND = 46, 150  # pixels: of a range, and around all of them
_KINDS = {
    "holds": PALETTE["blue"],
    "undecided": PALETTE["orange"],
    "does not hold": PALETTE["vermillion"],
    "explored, not judged": PALETTE["gray"],
}
_RULE, _SHADE = {"width": 2, "color": PALETTE["gray"]}, "rgba(0,158,115,0.13)"
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def ranges_view(
    judged: Mapping[str, Range],
    explored: Mapping[str, Range] | None = None,
    *,
    rule: float,
    above: bool,
    quantity: str,
) -> go.Figure:
    """Draw ranges as bars, the values in their middles as dots, and the rule as a line.

    judged: by name; a bar holds if all of it is on the shaded side of the rule, and is undecided if
    the rule cuts it. explored: ranges without a verdict. above: the rule is a least value on a
    linear axis from 0 to 1; else it is a largest value on a logarithmic axis. quantity: the axis's
    title.
    """
    rows = [(name, one, True) for name, one in judged.items()]
    rows += [(name, one, False) for name, one in (explored or {}).items()]
    low, high = min(one.low for _, one, _ in rows), max(one.high for _, one, _ in rows)
    left = 0.0 if above else low / 1.2
    axis: dict[str, Any] = {"title": quantity, "zeroline": False}
    if above:
        axis |= {"range": [0, 1], "tickformat": ".0%", "dtick": 0.25}
    else:
        ticks = [one for one in _TICKS if left <= one <= 1.2 * high]
        axis |= {
            "type": "log", "range": [math.log10(left), math.log10(1.2 * high)],
            "tickvals": ticks, "ticktext": [f"{one:g}" for one in ticks],
        }  # fmt: skip
    traces, words = [], []
    for kind, color in _KINDS.items():
        here = [at for at, row in enumerate(rows) if _kind(row[1], row[2], rule, above) == kind]
        if here:
            traces += _bars([(at, rows[at][1]) for at in here], kind, color)
        for at in here:
            name, one, _ = rows[at]
            words.append(f"{name}: {one.low:.2f} to {one.high:.2f}, {kind}")
    figure = go.Figure(traces, {
        "title": f"the rule: at {'least' if above else 'most'} {rule:g}",
        "xaxis": axis,
        "yaxis": {
            "range": [len(rows) - 0.4, -0.8], "showticklabels": False, "showgrid": False,
            "zeroline": False, "ticks": "",
        },
        "height": _AROUND + _ROW * len(rows),
        "margin": {"r": 28},  # room for half of "100%"
        "legend": {"xref": "container"},
    })  # fmt: skip
    for at, (name, _, _) in enumerate(rows):
        figure.add_annotation(  # not a point at the axis's end, which rounding may put outside
            x=0, xref="paper", y=at - 0.38, text=name, showarrow=False, xanchor="left",
            yanchor="middle",
        )  # fmt: skip
        figure.add_shape(  # beside the bar alone, so that it doesn't cross the name
            type="line", x0=rule, x1=rule, y0=at - 0.15, y1=at + 0.35, line=_RULE, layer="below"
        )  # fmt: skip
    edge = 1.0 if above else left
    figure.add_vrect(x0=rule, x1=edge, fillcolor=_SHADE, line_width=0, layer="below")
    return describe(figure, f"{quantity}. The rule: {rule:g}. {'; '.join(words)}.")


def _kind(one: Range, judged: bool, rule: float, above: bool) -> str:
    return one.verdict(rule, above=above) if judged else "explored, not judged"


def _bars(rows: Sequence[tuple[int, Range]], kind: str, color: str) -> list[dict[str, Any]]:
    """Return thick lines from the lowest to the highest values, and dots in the middles."""
    x: list[float | None] = []
    y: list[float | None] = []
    for at, one in rows:
        x += [one.low, one.high, None]
        y += [at, at, None]
    shared = {"type": "scatter", "name": kind, "legendgroup": kind}
    return [
        {
            **shared, "x": x, "y": y, "mode": "lines", "line": {"color": color, "width": 9},
            "hoverinfo": "x",
        },
        {
            **shared, "x": [one.middle for _, one in rows], "y": [at for at, _ in rows],
            "mode": "markers", "showlegend": False, "hoverinfo": "x",
            "marker": {"color": "white", "size": 8, "line": {"color": color, "width": 2}},
        },
    ]  # fmt: skip


def gain_view(
    gains: Mapping[str, Mapping[float, Range]], marks: Mapping[str, float], *, rule: float
) -> go.Figure:
    """Draw eager over graph by the host's cost per launch, a band for each name.

    gains: name -> host seconds per launch -> range. marks: name -> seconds per launch, at which the
    rule was set. rule: the least gain that counts.
    """
    traces, words = [], []
    for (name, by_launch), color in zip(gains.items(), draw.COLORS, strict=False):
        traces += _band(by_launch, name, color)
        words.append(
            f"{name}: "
            + ", ".join(
                f"{draw.seconds(at)} {one.low:.2f} to {one.high:.2f}"
                for at, one in by_launch.items()
            )
        )
    figure = go.Figure(traces)
    gray = PALETTE["gray"]
    for (name, at), anchor in zip(marks.items(), ("left", "right"), strict=True):
        figure.add_vline(x=1e6 * at, line={"dash": "dot", "width": 1.5, "color": gray})
        figure.add_annotation(
            x=math.log10(1e6 * at), y=1, yref="paper", text=name, showarrow=False,
            xanchor=anchor, yanchor="top",
        )  # fmt: skip
    figure.add_hline(y=rule, line=_RULE | {"dash": "dash"})
    most = max(one.high for by_launch in gains.values() for one in by_launch.values())
    figure.add_hrect(y0=rule, y1=1.1 * most, fillcolor=_SHADE, line_width=0, layer="below")
    ticks = [at for at in (1, 2, 5, 10, 20, 50, 100) if any(1e6 * x >= at for x in marks.values())]
    figure.update_layout(
        title=f"the rule: at least {rule:g}",
        xaxis={
            "title": "host time per fused kernel (µs)", "type": "log", "tickvals": ticks,
            "ticktext": [str(tick) for tick in ticks],
        },
        yaxis={
            "title": "eager over graph", "type": "log", "tickvals": [1, 2, 5, 10],
            "ticktext": ["1", "2", "5", "10"], "range": [-0.04, math.log10(1.1 * most)],
        },
        height=440,
        legend={"xref": "container"},
    )  # fmt: skip
    return describe(figure, f"Eager over graph. The rule: {rule:g}. {'; '.join(words)}.")


def _band(by_launch: Mapping[float, Range], name: str, color: str) -> list[dict[str, Any]]:
    """Return a band from the lowest to the highest values, and a line through the middles."""
    x, found = [1e6 * at for at in by_launch], list(by_launch.values())
    shared = {"type": "scatter", "legendgroup": name}
    return [
        {
            **shared, "x": [*x, *reversed(x)], "mode": "none", "fill": "toself",
            "y": [one.high for one in found] + [one.low for one in reversed(found)],
            "fillcolor": draw.pale(color), "hoverinfo": "skip", "showlegend": False,
        },
        {
            **shared, "x": x, "y": [one.middle for one in found], "name": name, "mode": "lines",
            "line": {"color": color, "width": 2},
        },
    ]  # fmt: skip
