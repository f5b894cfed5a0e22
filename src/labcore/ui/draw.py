"""Drawing helpers shared by several chapters' figures: lines, axes, titles, numbers and tokens."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import plotly.graph_objects as go

from labcore.timing import quantiles
from labcore.ui.theme import HEIGHT, PALETTE

__all__ = [
    "COLORS",
    "MEASURED",
    "OURS",
    "PEER",
    "PREDICTED",
    "SYMBOLS",
    "ceiling",
    "deviation",
    "digits",
    "escaped",
    "label",
    "letters",
    "medians",
    "named_at_ends",
    "pale",
    "seconds",
    "seconds_axis",
    "token",
]

OURS, PEER, MEASURED = (PALETTE[name] for name in ("blue", "orange", "vermillion"))
"""The colors of this package's code, of another library's, and of what was measured."""
PREDICTED = {"color": PALETTE["gray"], "dash": "dash", "width": 1.5}
"""The line style of a prediction, drawn beside measurements."""
COLORS = tuple(PALETTE[name] for name in ("blue", "vermillion", "green", "orange", "purple", "sky"))
SYMBOLS = ("circle", "square", "diamond", "x", "triangle-up", "cross")
_MOST, _LONGEST = 4, 12  # a longer name would take a quarter of a phone's width
# Pixels: of the key before a name, of a letter, of a row, around the plot.
_KEY, _LETTER, ROW, _AROUND = 40.0, 8.0, 18.0, 110.0
_LETTERS = {"\n": "↵", "\t": "⇥", "\r": "\\r", "\ufffd": "\ufffd"}


def pale(color: str) -> str:
    """Return a pale fill of that hex color; text on it is readable on light and dark pages."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.28)"


def digits(value: float) -> str:
    """Format to three significant digits, without a power of ten for larger numbers."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Format a time with three digits and its unit, from ns to s."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value * 1e9)} ns"


def ceiling(value: float) -> float:
    """Return the smallest of 1, 1.25, 1.6, 2, 2.5, ... that is at least `value`.

    Axes that end there rarely change.
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    steps = (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8, 10)
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


def seconds_axis(low: float, high: float, steps: Sequence[int] = (1,)) -> dict[str, Any]:
    """Return a logarithmic axis in seconds whose ticks have units."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [seconds(one * (1 + 1e-9)) for one in ticks],
        "range": [math.log10(low), math.log10(high)],
    }


def deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation over seeds; 0 for one seed."""
    return stdev(samples) if len(samples) > 1 else 0.0


def medians(samples: Sequence[Sequence[float]]) -> tuple[list[float], dict[str, Any]]:
    """Return medians, and error bars from the 20th to the 80th percentile."""
    rows = [quantiles([*one]) for one in samples]
    return [middle for _, middle, _ in rows], {
        "array": [high - middle for _, middle, high in rows],
        "arrayminus": [middle - low for low, middle, _ in rows],
        "thickness": 1.2,
    }


def token(text: str, most: int = 10) -> str:
    """Format a token for a figure: visible spaces, no control characters, at most `most` long.

    Leading spaces are dots. Three or more in a token without a visible character are counted.
    """
    if not text.strip():
        counted = re.sub(r" {3,}", lambda run: f" {len(run[0])} spaces ", text)
        whole = letters(counted if counted != text else text.replace(" ", "·")).strip()
        most = max(most, len("↵↵ 12 spaces"))
    else:
        start = len(text) - len(text.lstrip(" "))
        whole = "·" * start + letters(text[start:])
    return whole if len(whole) <= most else whole[: most - 1] + "…"


def letters(text: str) -> str:
    """Replace characters that the fonts of pages and pictures may not have."""
    return "".join(
        _LETTERS.get(c)
        or (c if c.isprintable() and ord(c) < 0x250 else c.encode("unicode_escape").decode())
        for c in text
    )


def escaped(text: str) -> str:
    """Escape text for a title, so that plotly reads no HTML in it."""
    return html.escape(text, quote=False)


def label(text: str) -> str:
    """Escape a whole label, but only if plotly would read HTML in it."""
    return escaped(text) if re.search(r"<[^<>]*>|&#?\w+;", text) else text


def named_at_ends(figure: go.Figure) -> go.Figure:
    """Write the names of at most four lines at their right ends, in place of the legend.

    Lines of one legend group share a name, at the mean of their ends. Names move apart where they
    would overlap. The legend stays if there are more lines, a longer name than 12 characters, a
    second vertical axis or a line that ends outside of its axis. Call this last: it reads the axes.
    """
    lines = [one for one in figure.data if "lines" in (getattr(one, "mode", None) or "")]
    named = [one for one in lines if one.name and one.showlegend is not False]
    axis = figure.layout.yaxis
    ends = [_end(one, lines, log=axis.type == "log") for one in named]
    low, high = axis.range or _span(lines, log=axis.type == "log")
    fit = all(end is not None and low <= _place(end, axis) <= high for end in ends)
    if (
        not 1 <= len(named) <= _MOST
        or not fit
        or any(len(one.name) > _LONGEST for one in named)
        or any(getattr(one, "yaxis", None) not in (None, "y") for one in figure.data)
    ):
        return figure
    scale = ((figure.layout.height or HEIGHT) - _AROUND) / ((high - low) or 1.0)
    pixels = [scale * (_place(end, axis) - low) for end in ends]
    for one, end, pixel, place in zip(named, ends, pixels, _apart(pixels), strict=True):
        one.showlegend = False
        color = one.line.color or [*PALETTE.values()][figure.data.index(one) % len(PALETTE)]
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
    room = _KEY + _LETTER * max(len(one.name) for one in named)
    return figure.update_layout(margin_r=max(figure.layout.margin.r or 0, round(room)))


def _place(value: Any, axis: Any) -> Any:
    return math.log10(value) if axis.type == "log" else value


def _values(trace: Any) -> Sequence[Any]:
    return () if trace.y is None else trace.y  # a tuple or a numpy array


def _drawn(values: Sequence[Any], *, log: bool) -> list[float]:
    """Return the values that an axis can show."""
    found = (float(one) for one in values if one is not None and math.isfinite(one))
    return [one for one in found if one > 0 or not log]


def _end(trace: Any, lines: Sequence[Any], *, log: bool) -> float | None:
    """Return where the lines of a trace's group end, None if the axis cannot show one end."""
    group = [one for one in lines if one.legendgroup and one.legendgroup == trace.legendgroup]
    last = [value for one in group or [trace] for value in [None, *_values(one)][-1:]]
    return mean(found) if len(found := _drawn(last, log=log)) == len(last) else None


def _span(lines: Sequence[Any], *, log: bool) -> tuple[float, float]:
    found = [y for one in lines for y in _drawn(_values(one), log=log)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return (math.log10(low), math.log10(high)) if log else (low, high)


def _apart(pixels: Sequence[float]) -> list[float]:
    """Return the places nearest to `pixels`, in their order, that are at least ROW apart."""
    from scipy.optimize import isotonic_regression  # here, because it is slow to import

    order = sorted(range(len(pixels)), key=pixels.__getitem__)
    near = isotonic_regression([pixels[at] - ROW * rank for rank, at in enumerate(order)]).x
    places = [0.0] * len(pixels)
    for rank, at in enumerate(order):
        places[at] = near[rank] + ROW * rank
    return places
