"""Names of lines at their right ends, where a reader would otherwise look them up in a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

import plotly.graph_objects as go
from scipy.optimize import isotonic_regression

from labcore.ui.theme import HEIGHT, PALETTE

__all__ = ["named_at_ends"]

MOST, LONGEST = 4, 12  # a longer name would take a quarter of a phone's width
# Pixels: of the key before a name, of a letter, of a row, around the plot.
KEY, LETTER, ROW, AROUND = 40.0, 8.0, 18.0, 110.0


def named_at_ends(figure: go.Figure) -> go.Figure:
    """Write the names of at most four lines at their right ends, in place of the legend.

    Lines of one legend group share a name, at the mean of their ends. Names move apart where they
    would overlap. The legend stays if there are more lines, a longer name than 12 characters, a
    second vertical axis or a line that ends outside of its axis. Call this last: it reads the axes.
    """
    lines = [one for one in figure.data if "lines" in (getattr(one, "mode", None) or "")]
    named = [one for one in lines if one.name and one.showlegend is not False]
    ends = [_end(one, lines) for one in named]
    axis = figure.layout.yaxis
    low, high = axis.range or _span(lines, log=axis.type == "log")
    fit = all(end is not None and low <= _place(end, axis) <= high for end in ends)
    if (
        not 1 <= len(named) <= MOST
        or not fit
        or any(len(one.name) > LONGEST for one in named)
        or any(getattr(one, "yaxis", None) not in (None, "y") for one in figure.data)
    ):
        return figure
    scale = ((figure.layout.height or HEIGHT) - AROUND) / ((high - low) or 1.0)
    pixels = [scale * (_place(end, axis) - low) for end in ends]
    for one, end, pixel, place in zip(named, ends, pixels, _apart(pixels), strict=True):
        one.showlegend = False
        color = one.line.color or PALETTE[[*PALETTE][figure.data.index(one)]]
        figure.add_annotation(
            x=1,
            xref="paper",  # an axis would make room for the name a second time
            y=_place(end, axis),
            xanchor="left",
            xshift=5,
            yshift=round(place - pixel),
            showarrow=False,
            text=f'<span style="color:{color}">■</span> {one.name}',
        )
    room = KEY + LETTER * max(len(one.name) for one in named)
    return figure.update_layout(margin_r=max(figure.layout.margin.r or 0, round(room)))


def _place(value: Any, axis: Any) -> Any:
    return math.log10(value) if axis.type == "log" else value


def _finite(values: Sequence[Any]) -> list[float]:
    return [float(one) for one in values if one is not None and math.isfinite(one)]


def _end(trace: Any, lines: Sequence[Any]) -> float | None:
    """Return where the lines of a trace's group end, None if one has no finite end."""
    group = [one for one in lines if one.legendgroup and one.legendgroup == trace.legendgroup]
    last = [one.y[-1] for one in group or [trace]]
    return mean(found) if len(found := _finite(last)) == len(last) else None


def _span(lines: Sequence[Any], *, log: bool) -> tuple[float, float]:
    found = [y for one in lines for y in _finite(one.y) if y > 0 or not log]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return (math.log10(low), math.log10(high)) if log else (low, high)


def _apart(pixels: Sequence[float]) -> list[float]:
    """Return the places nearest to `pixels`, in their order, that are at least ROW apart."""
    order = sorted(range(len(pixels)), key=pixels.__getitem__)
    near = isotonic_regression([pixels[at] - ROW * rank for rank, at in enumerate(order)]).x
    places = [0.0] * len(pixels)
    for rank, at in enumerate(order):
        places[at] = near[rank] + ROW * rank
    return places
