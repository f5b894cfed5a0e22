"""The cost of all-reduces by their size, from the alpha-beta model and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from labcore.parallel.cost import AlphaBetaFit, Link, all_reduce_seconds
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.tensor_parallel.sketch import ALGORITHMS
from labcore.ui.theme import PALETTE

__all__ = ["SIZES", "all_reduce_curves", "fit_view"]

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Sizes in bytes of the all-reduces that are drawn: 1 KiB to 64 MiB."""

_COLORS = {
    "ring": PALETTE["blue"],
    "halving_doubling": PALETTE["orange"],
    "one_shot": PALETTE["vermillion"],
    "two_shot": PALETTE["green"],
}
_STROKES: Mapping[str, dict[str, Any]] = {  # overlapping curves all stay visible
    "ring": {"width": 5.5},
    "halving_doubling": {"width": 3.5},
    "one_shot": {"width": 2},
    "two_shot": {"width": 2, "dash": "dash"},
}
_REACH = (6e-8, 1.6)  # seconds, for links from 900 down to 1 GB/s
_SYMBOLS = ("circle-open", "square-open", "diamond-open", "x", "triangle-up-open")


def _size(nbytes: float) -> str:
    """Format bytes in powers of 1024, with three digits."""
    power = min(3, int(math.log2(max(nbytes, 1)) // 10))
    return f"{draw.digits(nbytes / 1024**power)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def all_reduce_curves(
    ranks: int = 8,
    alpha_us: float = 0.6,
    gb_per_s: float = 450.0,
    *,
    data: Mapping[str, Mapping[int, Sequence[float]]] | None = None,
) -> go.Figure:
    """Draw the seconds of an all-reduce by its size, for each algorithm by the alpha-beta model.

    ranks: N; halving_doubling has no curve unless it's a power of two. alpha_us: µs per step;
    gb_per_s: GB/s per rank in one direction. data: name -> bytes -> samples of measured seconds. A
    key of `ALL_REDUCES` is drawn in its color; "backend" or another name is gray. The time axis is
    the same for every link, 60 ns to 1.6 s; data extends it to a decade more than needed.
    """
    link = Link(name="chosen", alpha=alpha_us * 1e-6, beta=1e-9 / gb_per_s, source="chosen")
    figure = go.Figure()
    curves: dict[str, list[float]] = {}
    measured = {size: None for by_size in (data or {}).values() for size in by_size}
    sizes = _sizes(min([*measured, SIZES[0]]))
    nothing = [None] * len(sizes)
    middles: list[float] = []
    for name, color in _COLORS.items():
        if name != "halving_doubling" or not ranks & (ranks - 1):
            curves[name] = [all_reduce_seconds(name, ranks, size, link) for size in sizes]
        figure.add_scatter(
            x=sizes, y=[1e6 * one for one in curves[name]] if name in curves else nothing,
            mode="lines", name=_words(name), line={"color": color, **_STROKES[name]},
        )  # fmt: skip
    title = _fastest(sizes, curves)
    words = [
        f"{_words(name)} {draw.seconds(y[0])} to {draw.seconds(y[-1])}"
        for name, y in curves.items()
    ]
    for at, (name, by_size) in enumerate((data or {}).items()):
        rows = [quantiles(list(samples)) for samples in by_size.values()]
        middles += [middle for _, middle, _ in rows]
        figure.add_scatter(
            x=list(by_size), y=[1e6 * middle for _, middle, _ in rows], mode="markers",
            name=f"{_words(name)}, measured", error_y=_bars(rows),
            marker={
                "color": _COLORS.get(name, PALETTE["gray"]), "size": 10, "line": {"width": 2},
                "symbol": _SYMBOLS[at % len(_SYMBOLS)],
            },
        )  # fmt: skip
        words.append(f"{_words(name)} measured: " + ", ".join(
            f"{_size(size)} {draw.seconds(middle)}"
            for size, (_, middle, _) in zip(by_size, rows, strict=True)
        ))  # fmt: skip
    low, high = (min(middles) / 10, 10 * max(middles)) if middles else _REACH
    figure.update_layout(
        title=title,
        xaxis={"title": "size of the tensor", **_size_axis(sizes)},
        yaxis={
            "title": "time", "type": "log", **_time_ticks(low, high, (1,)),
            "range": [math.log10(1e6 * low), math.log10(1e6 * high)],
        },
        height=444,
        legend={"xref": "container"},
    )  # fmt: skip
    chosen = f"{ranks} ranks, {draw.digits(alpha_us)} µs, {draw.digits(gb_per_s)} GB/s"
    return describe(figure, f"{chosen}, {title}. {'; '.join(words)}.")


def _words(algorithm: str) -> str:
    return ALGORITHMS.get(algorithm, algorithm)


def _sizes(least: float) -> list[int]:
    """Return powers of 4 from at most `least` bytes to the largest of SIZES."""
    first = math.floor(math.log(max(least, 1), 4) + 1e-9)
    return [4**power for power in range(first, round(math.log(SIZES[-1], 4)) + 1)]


def _fastest(sizes: Sequence[int], curves: Mapping[str, Sequence[float]]) -> str:
    """Return the fastest algorithm for the smallest size, and the first that overtakes it."""
    best = [min((curve[at], name) for name, curve in curves.items())[1] for at in range(len(sizes))]
    changes = [(sizes[at + 1], now) for at, (was, now) in enumerate(pairwise(best)) if was != now]
    if not changes:
        return f"fastest: {_words(best[0])} at every size"
    size, name = changes[0]
    return f"fastest: {_words(best[0])}, {_words(name)} from {_size(size)}"


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
