"""What a meter, a sweep or a record says of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go

from labcore.memory import Moment
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.memory.choices import COLORS, in_bytes

__all__ = ["stretches", "timeline"]

_MOST_POINTS = 250  # per timeline, because the page contains each of them five times


def _last_step(moments: Sequence[Moment]) -> Sequence[Moment]:
    """Return the moments starting with the last beginning of a forward."""
    begins = [
        at + 1
        for at, (before, now) in enumerate(pairwise(moments))
        if now.phase == "forward" != before.phase
    ]
    return moments[begins[-1] if begins else 0 :]


def timeline(moments: Sequence[Moment], *, title: str) -> go.Figure:
    """Draw what the last step of `Meter.timeline` held, moment by moment, stacked.

    If a step has too many moments for a page, each point is the highest of several.
    """
    step = _last_step(moments)
    every = -(-len(step) // _MOST_POINTS)
    shown = [
        max(step[at : at + every], key=lambda moment: moment.held.total)
        for at in range(0, len(step), every)
    ]
    places = [every * at for at in range(len(shown))]
    tops = [[0.0] * len(shown)]
    for part in COLORS:
        sizes = [getattr(moment.held, part) / 1e6 for moment in shown]
        tops.append([below + size for below, size in zip(tops[-1], sizes, strict=True)])
    begins = [at for at in range(len(shown)) if not at or shown[at].phase != shown[at - 1].phase]
    edge = {"yref": "paper", "y0": 0, "y1": 1, "line": draw.PREDICTED, "type": "line"}
    word = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    figure = go.Figure(
        [
            {
                "x": places,
                "y": top,
                "mode": "lines",
                "name": part,
                "line": {"color": color, "width": 1, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": color,
                "hoverinfo": "name",
            }
            # Draw from the highest down; each trace covers what is below it.
            for (part, color), top in zip(reversed(COLORS.items()), reversed(tops[1:]), strict=True)
        ],
        {
            "title": title,
            "xaxis": {"title": "storages that came or went"},
            "yaxis": {"title": "MB", "rangemode": "tozero"},
            "legend": {"traceorder": "reversed"},
            "shapes": [{"x0": places[at], "x1": places[at], **edge} for at in begins],
            "annotations": [{"x": places[at], "text": shown[at].phase, **word} for at in begins],
            "height": 460,
            "margin": {"t": 64},
        },
    )
    words = []
    for phase in dict.fromkeys(moment.phase for moment in step):
        totals = [moment.held.total for moment in step if moment.phase == phase]
        words.append(f"{phase}: at most {in_bytes(max(totals))}")
    return describe(figure, f"{title}. {'; '.join(words)}.")


def stretches(
    predicted: Mapping[int, float], measured: Mapping[int, float], *, title: str
) -> go.Figure:
    """Draw bytes of activations by the layers recomputed as one: a line, and measured points."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(predicted), y=[size / 1e3 for size in predicted.values()], mode="lines",
        name="predicted", line=draw.PREDICTED,
    )  # fmt: skip
    figure.add_scatter(
        x=list(measured), y=[size / 1e3 for size in measured.values()], mode="markers",
        name="measured", marker={"color": COLORS["activations"], "size": 11},
    )  # fmt: skip
    ticks = {"tickvals": list(measured), "ticktext": [str(x) for x in measured]}
    figure.update_layout(
        title=title,
        xaxis={"title": "layers recomputed as one", "type": "log", **ticks},
        yaxis={"title": "kB of activations", "rangemode": "tozero"},
    )
    words = ", ".join(f"{size / 1e3:.0f} kB at {x}" for x, size in measured.items())
    return describe(figure, f"{title}. Measured: {words}.")
