"""What was counted and timed, by length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import plotly.graph_objects as go

from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.attention.blocks import size_of
from labcore.ui.theme import PALETTE

__all__ = ["memory", "rates"]

COLORS = {
    "naive": PALETTE["vermillion"],
    "labcore": draw.OURS,
    "flash": draw.OURS,
    "SDPA FLASH": draw.PEER,
}
_SPARE = ("green", "purple", "sky", "orange")
_LAW = {"dash": "dash", "width": 1.5}


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name: that of the part before its comma, or the next unused one."""
    own = {COLORS.get(name.split(",")[0]) for name in names}
    spare = (name for name in _SPARE if PALETTE[name] not in own)
    return {name: COLORS.get(name.split(",")[0]) or PALETTE[next(spare, "gray")] for name in names}


def _lengths(values: Sequence[int]) -> dict[str, object]:
    """Return a logarithmic axis with one tick per length, and room at both ends."""
    text = [f"{x // 1024}k" if x >= 1024 else str(x) for x in values]
    first, last = math.log10(values[0]), math.log10(values[-1])
    room = 0.06 * (last - first)
    return {
        "title": "tokens", "type": "log", "tickvals": list(values), "ticktext": text,
        "range": [first - room, last + room],
    }  # fmt: skip


def memory(
    predicted: Mapping[str, Mapping[int, float]],
    measured: Mapping[str, Mapping[int, float]],
    *,
    title: str,
) -> go.Figure:
    """Draw bytes by length on logarithmic axes: predictions as dashed lines, measurements as dots.

    Both: form -> tokens -> bytes.
    """
    figure, words = go.Figure(), []
    colors = _colors([*predicted, *measured])
    for name, curve in predicted.items():
        line = {"color": colors[name], **_LAW}
        figure.add_scatter(
            x=list(curve), y=list(curve.values()), mode="lines", name=f"{name}, model", line=line
        )
    for name, points in measured.items():
        marker = {"color": colors[name], "size": 10}
        figure.add_scatter(
            x=list(points), y=list(points.values()), mode="markers", name=name, marker=marker
        )
        first, last = min(points), max(points)
        words.append(
            f"{name}: {size_of(points[first])} at {first} tokens, {size_of(points[last])} at {last}"
        )
    every = sorted({x for curve in (*predicted.values(), *measured.values()) for x in curve})
    figure.update_layout(
        title=title,
        xaxis=_lengths(every),
        yaxis={"title": "bytes", "type": "log", "dtick": 1, "exponentformat": "power"},
        height=460,
    )
    return describe(figure, f"{title}. Measured: {'; '.join(words)}.")


def rates(
    curves: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    unit: str,
    title: str,
    limits: Mapping[str, float] | None = None,
) -> go.Figure:
    """Draw median rates by length, with the 20th and 80th percentile for several samples.

    curves: form -> tokens -> samples, in `unit`; limits: name -> a level, dashed.
    """
    figure, colors = go.Figure(), _colors(list(curves))
    for name, by_length in curves.items():
        spread = [quantiles(list(samples)) for samples in by_length.values()]
        bars = {
            "array": [high - middle for _, middle, high in spread],
            "arrayminus": [middle - low for low, middle, _ in spread],
            "thickness": 1.2,
        }
        figure.add_scatter(
            x=list(by_length), y=[middle for _, middle, _ in spread], error_y=bars,
            mode="lines+markers", name=name, line={"color": colors[name]},
        )  # fmt: skip
    every = sorted({x for by_length in curves.values() for x in by_length})
    for (name, level), dash in zip((limits or {}).items(), ("dash", "dot"), strict=False):
        line = {"color": PALETTE["gray"], "dash": dash, "width": 1.5}
        ends = [every[0], every[-1]]
        figure.add_scatter(x=ends, y=[level] * 2, mode="lines", name=name, line=line)
    figure.update_layout(
        title=title, xaxis=_lengths(every), yaxis={"title": unit, "rangemode": "tozero"}, height=460
    )
    words = "; ".join(
        f"{name}: " + ", ".join(f"{median(samples):.3g} at {x}" for x, samples in by_length.items())
        for name, by_length in curves.items()
    )
    words += "".join(f"; {name} {level:.3g}" for name, level in (limits or {}).items())
    return describe(figure, f"{title}, in {unit}. {words}.")
