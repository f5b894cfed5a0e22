"""Figures for the chapter `adamw_epsilon`: numbers in, plotly figures out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import torch

from labcore.studies.adamw_epsilon import epsilon
from labcore.studies.lion import traps
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "DTYPES",
    "attenuation",
    "first_updates",
    "loss_by_eps",
    "remedies",
    "rms_by_width",
    "scales",
    "second_moments",
    "trap",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLORS = {"fp32": PALETTE["blue"], "bf16": PALETTE["orange"], "fp16": PALETTE["vermillion"]}
_GRADIENTS = tuple(10 ** (exponent / 4) for exponent in range(-48, 5))
# Values that don't fit on a logarithmic axis get separate rows.
_ROWS = {"0": 1e-9, "∞": 1e7, "NaN": 1e8}
_TICKS = {**_ROWS, "10⁻⁶": 1e-6, "10⁻³": 1e-3, "1": 1.0, "10³": 1e3}
_STEPS, _RATE = 50, 1e-3
_X = {
    "title": "size of the gradient",
    "type": "log",
    "dtick": 3,
    "exponentformat": "power",
}
_Y = {
    "title": "update, in learning rates",
    "type": "log",
    "range": [-9.6, 8.6],
    "tickvals": list(_TICKS.values()),
    "ticktext": list(_TICKS),
}


def _row(size: float) -> float:
    """Return an update's position on the axis: its size, or the row for 0, ∞ or NaN."""
    if math.isnan(size):
        return _ROWS["NaN"]
    if math.isinf(size):
        return _ROWS["∞"]
    return size if size else _ROWS["0"]


def _word(number: float) -> str:
    """Format a number for a title."""
    if math.isnan(number):
        return "NaN"
    size = "∞" if math.isinf(number) else f"{abs(number):.3g}"
    return f"−{size}" if number < 0 else size


def _power(number: float) -> str:
    """Format as 1e-8 rather than 1e-08, and as 1 rather than 1e0."""
    digits, power = f"{number:.1e}".split("e")
    digits = digits.removesuffix(".0")
    return f"{digits}e{int(power)}" if int(power) else digits


@functools.lru_cache(maxsize=256)
def _first(eps: float, dtype: str) -> tuple[float, ...]:
    """Return the first update, in learning rates, at each of _GRADIENTS."""
    gradients = torch.tensor(_GRADIENTS, dtype=torch.float64)
    return tuple(epsilon.update_sizes(gradients, eps=eps, dtype=DTYPES[dtype]).tolist())


def _path(eps: float, gradient: float, dtype: str) -> list[float]:
    """Return the path of a weight from 1.0 under a constant gradient, all arithmetic in `dtype`."""
    make = functools.partial(epsilon.NaiveAdamW, lr=_RATE, eps=eps, weight_decay=0.0)
    start = torch.ones(1, dtype=DTYPES[dtype])
    return traps.weight_path(
        make, lambda _, weights: torch.full_like(weights, gradient), start=start, steps=_STEPS
    )[:, 0].tolist()


def _ink(dtype: str) -> dict[str, Any]:
    """Return line styles whose widths differ, so that overlapping lines all show."""
    width = {"fp32": 7, "bf16": 4, "fp16": 2.5}[dtype]
    return {"mode": "lines", "line": {"color": COLORS[dtype], "width": width}}


def _updates(eps: float) -> list[dict[str, Any]]:
    """Return the traces of the first update, one per format, and of the law."""
    sizes = torch.tensor(_GRADIENTS, dtype=torch.float64)
    law = epsilon.predict_attenuation(sizes, eps).tolist()
    traces = [
        {"x": _GRADIENTS, "y": [_row(y) for y in _first(eps, dtype)], "name": dtype, **_ink(dtype)}
        for dtype in DTYPES
    ]
    return [
        *traces,
        {"x": _GRADIENTS, "y": law, "mode": "lines", "name": "the law", "line": draw.PREDICTED},
    ]


def first_updates(eps: float = 1e-8) -> go.Figure:
    """Draw the first AdamW update by the gradient's size, computed in three formats.

    Dashed: the law, gradient / (gradient + eps). Updates that are 0, infinite or NaN are in rows at
    the ends of the axis.
    """
    title = f"The first update of AdamW, ε = {_power(eps)}"
    figure = go.Figure(_updates(eps), {"title": title, "xaxis": _X, "yaxis": _Y})
    lost = [
        gradient
        for gradient, size in zip(_GRADIENTS, _first(eps, "fp16"), strict=True)
        if not (math.isfinite(size) and size > 0)
    ]
    words = f" up to a gradient of {max(lost):.0e}, of those drawn" if lost else " nowhere"
    return describe(
        figure,
        f"Update against gradient at epsilon {eps:g}, in fp32, bf16 and fp16, with the law. In "
        f"fp16 it is infinite, zero or not a number{words}.",
    )


def trap(eps: float = 1e-8, gradient: float = 1e-3) -> go.Figure:
    """Draw the first update by gradient size above, and below it 50 steps at the chosen gradient.

    The lower panel's weight starts at 1.0 with learning rate 0.001; a path ends where it isn't
    finite.
    """
    one = torch.tensor([gradient], dtype=torch.float64)
    sizes = {
        name: epsilon.update_sizes(one, eps=eps, dtype=dtype).item()
        for name, dtype in DTYPES.items()
    }
    paths = {name: _path(eps, gradient, name) for name in DTYPES}
    law = epsilon.predict_attenuation(gradient, eps)
    chosen = {
        "x": [gradient] * len(sizes),
        "y": [_row(size) for size in sizes.values()],
        "mode": "markers",
        "marker": {"color": list(COLORS.values()), "size": 11, "line": {"width": 1}},
    }
    below = [{"y": [_finite(w) for w in path], **_ink(name)} for name, path in paths.items()]
    below.append({"x": [0, _STEPS], "y": [1, 1 - _STEPS * _RATE * law], "line": draw.PREDICTED})
    place = {"xaxis": "x2", "yaxis": "y2", "mode": "lines"}
    said = {
        name: f"{name}: update {_word(sizes[name])}, weight {_word(path[-1])}"
        for name, path in paths.items()
    }
    figure = go.Figure(
        [
            *_updates(eps),
            {**chosen, "showlegend": False, "hoverinfo": "skip"},
            *({**trace, **place, "showlegend": False} for trace in below),
        ],
        {
            "title": said["fp16"],
            "xaxis": _X,
            "yaxis": {**_Y, "domain": [0.46, 1]},
            "xaxis2": {"title": f"step, learning rate {_RATE:g}", "anchor": "y2"},
            "yaxis2": {
                "title": "weight",
                "range": [0.944, 1.004],
                "domain": [0, 0.3],
                "anchor": "x2",
            },
            "height": 592,
        },
    )
    return describe(
        figure,
        f"At epsilon {_power(eps)} and gradient {_power(gradient)}, the law's update, in "
        f"learning rates, is {law:.3g}. After {_STEPS} steps, {'; '.join(said.values())}.",
    )


def _finite(weight: float) -> float | None:
    return weight if math.isfinite(weight) else None


def attenuation(
    ratios: Sequence[float], measured: Mapping[str, Sequence[float]], predicted: Sequence[float]
) -> go.Figure:
    """Draw how much of an update epsilon leaves, by the gradient's RMS over epsilon.

    measured: kind of gradient -> shares, one per ratio; predicted: the law's, as a line.
    """
    figure = go.Figure()
    figure.add_scatter(
        x=list(ratios), y=list(predicted), mode="lines", name="RMS / (RMS + ε)", line=draw.PREDICTED
    )
    for number, (name, shares) in enumerate(measured.items()):
        # Draw the largest points first, so that overlapping ones all show.
        marker = {"size": max(5, 13 - 6 * number), "symbol": "circle" if number else "circle-open"}
        figure.add_scatter(x=list(ratios), y=list(shares), mode="markers", name=name, marker=marker)
    figure.update_layout(
        title="What ε leaves of an update",
        xaxis={
            "title": "RMS of the gradient over ε",
            "type": "log",
            "dtick": 2,
            "exponentformat": "power",
        },
        yaxis={"title": "share of the update", "range": [-0.03, 1.05]},
    )
    gaps = ", ".join(
        f"{name} {max(abs(m - p) for m, p in zip(shares, predicted, strict=True)):.1e}"
        for name, shares in measured.items()
    )
    return describe(
        figure, f"The share rises from 0 to 1 around a ratio of 1. Largest gap to the law: {gaps}."
    )


def second_moments(paths: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw the second moment by step, one line per format: first with gradients, then without."""
    figure = go.Figure()
    for name, path in paths.items():
        color = next((COLORS[key] for key in COLORS if key in name), PALETTE["gray"])
        figure.add_scatter(y=list(path), mode="lines", name=name, line={"color": color})
    figure.update_layout(
        title="The second moment under a pulse",
        xaxis={"title": "step"},
        yaxis={"title": "second moment v", "rangemode": "tozero"},
    )
    ends = ", ".join(f"{name} {path[-1]:.3g}" for name, path in paths.items())
    return describe(draw.named_at_ends(figure), f"The second moment by step. At the end: {ends}.")


def _over_seeds(
    x: Sequence[float], curves: Mapping[str, Sequence[Sequence[float]]], *, unit: str
) -> tuple[go.Figure, str]:
    """Return a figure of means over seeds with their spread, one curve per name, and a text.

    The text lists the means. A point with a seed that ended in NaN is a gap.
    """
    figure = go.Figure()
    for name, points in curves.items():
        figure.add_scatter(
            x=list(x),
            y=[fmean(samples) for samples in points],
            error_y={"array": [draw.deviation(samples) for samples in points], "thickness": 1.2},
            mode="lines+markers",
            name=name,
        )
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{fmean(ys):.3g} at {place:g}" for place, ys in zip(x, points, strict=True))
        for name, points in curves.items()
    )
    return figure, f"{unit}. {words}."


def scales(rms: Sequence[float], accuracy: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw test accuracy on digits by the gradients' RMS; accuracy: name -> [rms, seeds]."""
    figure, words = _over_seeds(rms, accuracy, unit="Test accuracy by gradient RMS")
    figure.update_layout(
        title="The same task, its loss scaled down",
        xaxis={"title": "RMS of the gradients", "type": "log", "exponentformat": "power"},
        yaxis={"title": "test accuracy", "range": [0, 1.02]},
    )
    return describe(draw.named_at_ends(figure), words)


def rms_by_width(
    widths: Sequence[int], rms: Mapping[str, Sequence[Sequence[float]]], title: str
) -> go.Figure:
    """Draw the RMS of a Llama's gradients by width, one curve per group; rms: [widths, seeds]."""
    figure, words = _over_seeds(widths, rms, unit="Gradient RMS by width")
    ticks = {"tickvals": list(widths), "ticktext": [str(width) for width in widths]}
    figure.update_layout(
        title=title,
        xaxis={"title": "width C", "type": "log", **ticks},
        yaxis={
            "title": "RMS of the gradient",
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
        },
    )
    return describe(draw.named_at_ends(figure), words)


def loss_by_eps(eps: Sequence[float], loss: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw the loss after a short training by epsilon, one curve per width; loss: [eps, seeds]."""
    figure, words = _over_seeds(eps, loss, unit="Loss by epsilon")
    figure.update_layout(
        title="Where a fixed ε begins to bite",
        xaxis={"title": "ε", "type": "log", "dtick": 2, "exponentformat": "power"},
        yaxis={"title": "loss, nats per byte"},
    )
    return describe(draw.named_at_ends(figure), words)


def remedies(accuracy: Mapping[str, Mapping[str, Sequence[float]]]) -> go.Figure:
    """Draw test accuracy by remedy, one symbol per failure (failure -> remedy -> seeds)."""
    figure = go.Figure()
    symbols = itertools.cycle(("circle", "x", "diamond", "square"))
    for (failure, rows), symbol in zip(accuracy.items(), symbols, strict=False):
        figure.add_scatter(
            x=[fmean(samples) for samples in rows.values()],
            y=list(rows),
            error_x={
                "array": [draw.deviation(samples) for samples in rows.values()],
                "thickness": 1.2,
            },
            mode="markers",
            marker={"size": 11, "symbol": symbol},
            name=failure,
        )
    figure.update_layout(
        title="Remedies on digits",
        xaxis={"title": "test accuracy", "range": [0, 1.02]},
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},  # no room on a phone beside the long names
        height=520,
    )
    words = "; ".join(
        f"{failure}: " + ", ".join(f"{name} {fmean(xs):.3f}" for name, xs in rows.items())
        for failure, rows in accuracy.items()
    )
    return describe(figure, f"Test accuracy by remedy. {words}.")
