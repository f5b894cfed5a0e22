"""The cost of all-reduces by their size: by protocol, and a fit to what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from labcore.parallel.cost import AlphaBetaFit, all_reduce_seconds
from labcore.parallel.protocols import protocol_links
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["fit_view", "protocol_curves"]

_COLORS = {"LL": PALETTE["vermillion"], "LL128": PALETTE["orange"], "Simple": PALETTE["blue"]}


def _size(nbytes: float) -> str:
    """Format bytes in powers of 1024, with three digits."""
    power = min(3, int(math.log2(max(nbytes, 1)) // 10))
    return f"{draw.digits(nbytes / 1024**power)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def protocol_curves(
    link: str, ranks: int, measured: Mapping[str, Mapping[int, float]]
) -> go.Figure:
    """Draw the seconds of a ring by its size under each of NCCL's protocols, by NCCL's own table.

    link: a key of LINKS. measured: name -> bytes -> published seconds, drawn as dots.
    """
    links, sizes = protocol_links(link), [2**power for power in range(10, 29)]
    figure = go.Figure()
    curves = {
        name: [all_reduce_seconds("ring", ranks, size, one) for size in sizes]
        for name, one in links.items()
    }
    for name, seconds in curves.items():
        figure.add_scatter(
            x=sizes, y=[1e6 * one for one in seconds], mode="lines", name=name,
            line={"color": _COLORS[name], "width": 2},
        )  # fmt: skip
    for (name, by_size), symbol in zip(measured.items(), ("circle-open", "diamond"), strict=False):
        figure.add_scatter(
            x=list(by_size), y=[1e6 * one for one in by_size.values()], mode="markers", name=name,
            marker={"color": draw.MEASURED, "size": 9, "symbol": symbol},
        )  # fmt: skip
    fastest = [min(curves, key=lambda name: curves[name][at]) for at in range(len(sizes))]
    changes = [
        f"{now} from {_size(sizes[at + 1])}"
        for at, (was, now) in enumerate(pairwise(fastest))
        if was != now
    ]
    title = ", ".join([f"fastest: {fastest[0]}", *changes])
    every = [one for seconds in curves.values() for one in seconds]
    figure.update_layout(
        title=title,
        xaxis={"title": "size of the tensor", **_size_axis(sizes)},
        yaxis={"title": "time", "type": "log", **_time_ticks(min(every), max(every), (1,))},
        height=444,
        legend={"xref": "container"},
    )  # fmt: skip
    words = [f"{name} {draw.seconds(y[0])} to {draw.seconds(y[-1])}" for name, y in curves.items()]
    words += [
        f"{name}: " + ", ".join(
            f"{_size(size)} {draw.seconds(one)}" for size, one in by_size.items()
        )
        for name, by_size in measured.items()
    ]  # fmt: skip
    return describe(figure, f"{link}, {ranks} ranks, {title}. {'; '.join(words)}.")


def _size_axis(sizes: Sequence[int]) -> dict[str, Any]:
    """Return a logarithmic axis of bytes with at most five ticks, which fit on a phone."""
    ticks = sizes[:: -(-(len(sizes) - 1) // 4)]
    return {
        "type": "log", "tickvals": ticks, "ticktext": [_size(tick) for tick in ticks],
        "range": [math.log10(sizes[0] / 2), math.log10(2 * sizes[-1])],
    }  # fmt: skip


def _time_ticks(low: float, high: float, steps: Sequence[int]) -> dict[str, Any]:
    """Return ticks at `steps` of every power of ten from low to high seconds, on an axis in µs."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {
        "tickvals": [1e6 * tick for tick in ticks],
        "ticktext": [
            draw.seconds(tick * (1 + 1e-9)) for tick in ticks
        ],  # 0.001 s is 1 ms, not 1000 µs
    }


def fit_view(
    sizes: Sequence[int],
    seconds: Sequence[float] | Sequence[Sequence[float]],
    fit: AlphaBetaFit,
    *,
    title: str,
) -> go.Figure:
    """Draw measured times of messages, the line alpha + beta * bytes, and the residuals below it.

    sizes: bytes, above 0. seconds: for each size a time or its repeats, shown by their median and
    middle 60 %. fit: as from `cost.fit_alpha_beta`; a residual is
    (measured - line) / measured, in percent.
    title: what was measured; the legend gives the line's alpha and beta.
    Raises ValueError if the lengths differ or are 0.
    """
    if len(sizes) != len(seconds) or not sizes or min(sizes) <= 0:
        raise ValueError(
            f"sizes must be above 0 with seconds for each of them, got {list(sizes)} and "
            f"{len(seconds)} times"
        )
    rows = [quantiles([*one] if isinstance(one, Sequence) else [float(one)]) for one in seconds]
    middles = [middle for _, middle, _ in rows]
    residuals = [
        100 * (1 - fit.at(size) / middle) for size, middle in zip(sizes, middles, strict=True)
    ]
    low, high = min(sizes), max(sizes)
    line = [low * (high / low) ** (at / 40) for at in range(41)]
    reach = {"type": "log", "range": [math.log10(low / 2), math.log10(2 * high)]}
    every = -(-len(sizes) // 5)  # five ticks fit on a phone
    ticks = list(sizes)[::every]
    told = f"alpha {draw.seconds(fit.alpha)}, beta {1e9 * fit.beta:.3g} ns per byte"
    figure = go.Figure(
        [
            {
                "type": "scatter", "x": line, "y": [1e6 * fit.at(size) for size in line],
                "mode": "lines", "line": draw.PREDICTED,
                "name": f"{draw.seconds(fit.alpha)} + {1e9 * fit.beta:.3g} ns × bytes",
            },
            {
                "type": "scatter", "x": list(sizes), "y": [1e6 * one for one in middles],
                "mode": "markers", "name": "measured", "error_y": _bars(rows),
                "marker": {"color": draw.MEASURED, "size": 10},
            },
            *_stems(sizes, residuals),
        ],
        {
            "title": title,
            "xaxis": {"anchor": "y", "showticklabels": False, "tickvals": ticks, **reach},
            "yaxis": {
                "domain": [0.44, 1], "title": "time", "type": "log",
                **_time_ticks(min(middles), max(middles), (1, 2, 5)),
            },
            "xaxis2": {
                "anchor": "y2", "title": "size of the tensor", **reach,
                "tickvals": ticks, "ticktext": [_size(size) for size in ticks],
            },
            "yaxis2": {"domain": [0, 0.34], "anchor": "x2", "title": "residual (%)"},
            "height": 532,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    found = ", ".join(
        f"{_size(size)} {left:+.0f} %" for size, left in zip(sizes, residuals, strict=True)
    )
    return describe(figure, f"{title}. {told}. Residuals: {found}.")


def _bars(rows: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return error bars in µs from 20th, 50th and 80th percentiles in seconds."""
    return {
        "array": [1e6 * (high - middle) for _, middle, high in rows],
        "arrayminus": [1e6 * (middle - low) for low, middle, _ in rows],
        "thickness": 1.2,
    }


def _stems(sizes: Sequence[int], residuals: Sequence[float]) -> list[dict[str, Any]]:
    """Return residuals in percent as diamonds on stems, in the lower panel."""
    x: list[float | None] = []
    y: list[float | None] = []
    for size, left in zip(sizes, residuals, strict=True):
        x += [size, size, None]
        y += [0, left, None]
    panel = {"type": "scatter", "xaxis": "x2", "yaxis": "y2"}
    return [
        {
            **panel, "x": x, "y": y, "mode": "lines", "showlegend": False, "hoverinfo": "skip",
            "line": {"color": draw.MEASURED, "width": 2},
        },
        {
            **panel, "x": list(sizes), "y": list(residuals), "mode": "markers",
            "name": "residual", "showlegend": False,
            "marker": {"color": draw.MEASURED, "size": 8, "symbol": "diamond"},
        },
    ]  # fmt: skip
