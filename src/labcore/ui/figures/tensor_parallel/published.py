"""The model beside what others measured on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from labcore.parallel.published import Comparison
from labcore.ui import draw
from labcore.ui.explorer import describe

__all__ = ["residuals_view", "tokens_by_gpus"]


def tokens_by_gpus(lines: Mapping[str, Mapping[int, float]]) -> go.Figure:
    """Draw tokens per second by the number of GPUs. lines: name -> GPUs -> tokens per second.

    A name that begins with "published" is drawn as dots.
    """
    figure, words = go.Figure(), []
    for (name, by_gpus), color in zip(lines.items(), draw.COLORS, strict=False):
        dots = name.startswith("published")
        figure.add_scatter(
            x=list(by_gpus), y=list(by_gpus.values()), name=name,
            mode="markers" if dots else "lines+markers",
            line={"color": color, "width": 2},
            marker={
                "color": draw.MEASURED if dots else color, "size": 11 if dots else 7,
                "symbol": "diamond" if dots else "circle",
            },
        )  # fmt: skip
        words.append(
            f"{name}: " + ", ".join(f"{rate:.1f} with {gpus}" for gpus, rate in by_gpus.items())
        )
    counts = sorted({gpus for by_gpus in lines.values() for gpus in by_gpus})
    figure.update_layout(
        xaxis={
            "title": "GPUs", "type": "log", "tickvals": counts,
            "ticktext": [str(count) for count in counts],
        },
        yaxis={"title": "tokens per second", "rangemode": "tozero"},
        height=440,
        legend={"xref": "container"},
    )  # fmt: skip
    return describe(figure, f"Tokens per second by GPUs. {'; '.join(words)}.")


def residuals_view(comparisons: Sequence[Comparison]) -> go.Figure:
    """Draw each published time and the model's, one row each, with the residual in words."""
    names = [f"{one.name}<br>{one.residual:+.0%}" for one in comparisons]
    links: list[float | None] = []
    rows: list[str | None] = []
    for name, one in zip(names, comparisons, strict=True):
        links += [one.predicted, one.measured, None]
        rows += [name, name, None]
    every = [seconds for one in comparisons for seconds in (one.predicted, one.measured)]
    figure = go.Figure(
        [
            {
                "type": "scatter", "x": links, "y": rows, "mode": "lines", "showlegend": False,
                "hoverinfo": "skip", "line": {"color": draw.MEASURED, "width": 1},
            },
            {
                "type": "scatter", "x": [one.predicted for one in comparisons], "y": names,
                "mode": "markers", "name": "model",
                "marker": {"color": draw.COLORS[0], "size": 10, "symbol": "circle-open"},
            },
            {
                "type": "scatter", "x": [one.measured for one in comparisons], "y": names,
                "mode": "markers", "name": "published",
                "marker": {"color": draw.MEASURED, "size": 10, "symbol": "diamond"},
            },
        ],
        {
            "title": "residual: (published − model) / published",
            "xaxis": {**draw.seconds_axis(min(every) * 0.8, max(every) * 1.25)},
            "yaxis": {"type": "category", "autorange": "reversed", "categoryarray": names},
            "height": 140 + 44 * len(names),
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    words = "; ".join(
        f"{one.name}: model {draw.seconds(one.predicted)}, published "
        f"{draw.seconds(one.measured)}, residual {one.residual:+.0%}"
        for one in comparisons
    )
    return describe(figure, f"Published times and the model's. {words}.")
