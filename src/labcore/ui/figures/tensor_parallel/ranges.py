"""What a graph gains and what a fork hides, as bands over all that is assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.studies.tensor_parallel.ranges import Range
from labcore.ui import draw
from labcore.ui.explorer import describe

__all__ = ["added_view", "gain_view"]


def _band(x: Sequence[float], found: Sequence[Range], name: str, color: str) -> list[dict]:
    """Return a line through the middles, and a band from the smallest to the largest values."""
    around = [*x, *reversed(x)]
    edge = [one.high for one in found] + [one.low for one in reversed(found)]
    return [
        {
            "type": "scatter", "x": around, "y": edge, "mode": "none", "fill": "toself",
            "fillcolor": draw.pale(color), "hoverinfo": "skip", "showlegend": False,
            "legendgroup": name,
        },
        {
            "type": "scatter", "x": list(x), "y": [one.middle for one in found], "name": name,
            "mode": "lines+markers", "line": {"color": color, "width": 2}, "marker": {"size": 7},
            "legendgroup": name,
        },
    ]  # fmt: skip


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    ticks = [
        one for one in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if min(values) / 2 < one < 2 * max(values)
    ]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{one:g}" for one in ticks]}


def gain_view(
    gains: Mapping[str, Mapping[float, Range]], marks: Mapping[str, float], rule: float
) -> go.Figure:
    """Draw eager over graph by the host's cost per launch.

    gains: name -> host seconds per launch -> range. marks: name -> seconds, drawn as vertical
    lines. rule: drawn as a horizontal line.
    """
    traces, words = [], []
    for (name, by_launch), color in zip(gains.items(), draw.COLORS, strict=False):
        found = list(by_launch.values())
        traces += _band([1e6 * one for one in by_launch], found, name, color)
        words.append(
            f"{name}: "
            + ", ".join(
                f"{draw.seconds(at)} {one.low:.2f} to {one.high:.2f}"
                for at, one in by_launch.items()
            )
        )
    figure = go.Figure(traces)
    highs = [one.high for by_launch in gains.values() for one in by_launch.values()]
    for name, at in marks.items():
        figure.add_vline(
            x=1e6 * at, line={"dash": "dot", "width": 1.5}, annotation_text=name,
            annotation_position="top left",
        )  # fmt: skip
    figure.add_hline(y=rule, line={"dash": "dash", "width": 1.5})
    ticks = [1, 2, 5, 10, 20, 50, 100]
    figure.update_layout(
        title="a graph gains what launches cost",
        xaxis={
            "title": "host time per launch (µs), assumed", "type": "log", "tickvals": ticks,
            "ticktext": [str(tick) for tick in ticks],
        },
        yaxis={"title": "eager / graph, simulated", **_log_ticks([1, *highs])},
        height=440,
        legend={"xref": "container"},
    )  # fmt: skip
    return describe(figure, f"Eager over graph. {'; '.join(words)}. The rule: {rule:g}.")


def added_view(
    link: str = "NVLink 4", *, data: Mapping[str, Mapping[str, Mapping[int, Range]]]
) -> go.Figure:
    """Draw what the wire still adds to a token, over what it adds to a graph on one stream.

    data: link -> way -> rows -> range, as from `studies.tensor_parallel.ranges.added`.
    """
    traces, words = [], []
    for (way, by_batch), color in zip(data[link].items(), draw.COLORS, strict=False):
        traces += _band(list(by_batch), list(by_batch.values()), way, color)
        words.append(
            f"{way}: "
            + ", ".join(
                f"{batch} rows {one.low:.2f} to {one.high:.2f}" for batch, one in by_batch.items()
            )
        )
    every = [
        one
        for ways in data.values()
        for by_batch in ways.values()
        for each in by_batch.values()
        for one in (each.low, each.high)
    ]
    batches = sorted({batch for ways in data.values() for one in ways.values() for batch in one})
    figure = go.Figure(
        traces,
        {
            "title": f"{link}: below 1, the way pays",
            "xaxis": {
                "title": "batch (rows)", "type": "log", "tickvals": batches,
                "ticktext": [str(batch) for batch in batches],
            },
            "yaxis": {"title": "added by the wire / on one stream", **_log_ticks(every)},
            "height": 460,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    figure.add_hline(y=1, line={"dash": "dash", "width": 1.5})
    return describe(figure, f"{link}. {'; '.join(words)}.")
