"""What number formats do to an update: one weight, sixteen weights, and the second moment."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from labcore.studies.adamw_epsilon import epsilon
from labcore.studies.adamw_epsilon.divergence import FORMATS
from labcore.studies.adamw_epsilon.switches import Formats, Path
from labcore.studies.lion import traps
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["COLORS", "DTYPES", "matrices", "second_moments", "switches", "trap"]

DTYPES = FORMATS
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


def _two(number: float) -> str:
    """Format a weight with two decimals."""
    return f"{number:.2f}".replace("-", "−") if math.isfinite(number) else _word(number)


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
    """Return the traces of the first update: one per format, and exact arithmetic."""
    sizes = torch.tensor(_GRADIENTS, dtype=torch.float64)
    law = epsilon.predict_attenuation(sizes, eps).tolist()
    traces = [
        {"x": _GRADIENTS, "y": [_row(y) for y in _first(eps, dtype)], "name": dtype, **_ink(dtype)}
        for dtype in DTYPES
    ]
    return [
        *traces,
        {"x": _GRADIENTS, "y": law, "mode": "lines", "name": "exact", "line": draw.PREDICTED},
    ]


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
        f"At epsilon {_power(eps)} and gradient {_power(gradient)}, exact arithmetic gives an "
        f"update of {law:.3g} learning rates. After {_STEPS} steps, {'; '.join(said.values())}.",
    )


def switches(
    weight: str,
    state: str,
    arithmetic: str,
    eps: float,
    data: Mapping[float, Mapping[Formats, Path]],
) -> go.Figure:
    """Draw a weight under a constant gradient, and its updates, with a format for each part.

    data: what `switches.all_paths` returns. Dashed: exact arithmetic. A line ends where its number
    isn't finite.
    """
    path = data[eps][weight, state, arithmetic]
    steps = len(path.updates)
    every = max(1, steps // 50)
    shown = [0, *range(every, steps + 1, every)]
    weights, updates = path.weights.tolist(), path.updates.tolist()
    exact = data[eps]["fp32", "fp32", "fp32"].weights.tolist()
    line: dict[str, Any] = {"mode": "lines", "line": {"color": PALETTE["vermillion"], "width": 3}}
    place: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    later = [max(step, 1) for step in shown]
    rounded = [_finite(updates[step - 1]) for step in later]
    figure = go.Figure(
        [
            {"x": shown, "y": [_finite(weights[n]) for n in shown], "name": "weight", **line},
            {
                "x": shown,
                "y": [round(exact[n], 4) for n in shown],
                "name": "all in fp32",
                "mode": "lines",
                "line": draw.PREDICTED,
            },
            {"x": later, "y": rounded, **line, **place},
            {"x": [1, steps], "y": [1, 1], "mode": "lines", "line": draw.PREDICTED, **place},
        ],
        {
            "title": f"Ends at {_two(weights[-1])}; in fp32 at {_two(exact[-1])}",
            "yaxis": {"title": "weight", "range": [-1.05, 1.15], "domain": [0.5, 1]},
            "xaxis": {"range": [0, steps]},
            "xaxis2": {"title": "step", "anchor": "y2", "range": [0, steps]},
            "yaxis2": {
                "title": "update, rates",
                "type": "log",
                "range": [-1, 4.2],
                "dtick": 1,
                "exponentformat": "power",
                "domain": [0, 0.38],
                "anchor": "x2",
            },
            "height": 560,
        },
    )
    return describe(
        figure,
        f"Weight {weight}, state {state}, arithmetic {arithmetic}, epsilon {_power(eps)}. After "
        f"{steps} steps the weight is {_two(weights[-1])}; in fp32 it is {_two(exact[-1])}. The "
        f"first update is {_word(updates[0])} learning rates, the last {_word(updates[-1])}.",
    )


def _finite(number: float) -> float | None:
    """Return the number with four digits, or None for one that an axis can't show."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def matrices(panels: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw small matrices as tables of numbers, two in a row.

    panels: title -> rows. An infinite number and NaN have a color of their own. The others are
    darker the larger they are; 1 and above are the darkest.
    """
    figure, across, down = go.Figure(), 2, (len(panels) + 1) // 2
    for place, (title, rows) in enumerate(panels.items()):
        row, column = divmod(place, across)
        number = "" if place == 0 else str(place + 1)
        left, top = column * 0.52, 1 - row * (1 / down + 0.03)
        figure.add_heatmap(
            z=[
                [min(abs(one), 1.0) if math.isfinite(one) else 2.0 for one in line] for line in rows
            ],
            text=[[_cell(one) for one in line] for line in rows],
            texttemplate="%{text}",
            textfont={"size": 12, "color": "#222832"},
            zmin=0,
            zmax=2,
            colorscale=[[0, "#ffffff"], [0.5, "#9ecae9"], [0.51, "#f5a97f"], [1, "#f5a97f"]],
            showscale=False,
            hoverinfo="skip",
            xgap=2,
            ygap=2,
            xaxis=f"x{number}",
            yaxis=f"y{number}",
        )
        bare = {"visible": False, "fixedrange": True}
        figure.layout[f"xaxis{number}"] = {**bare, "domain": [left, left + 0.48]}
        figure.layout[f"yaxis{number}"] = {
            **bare,
            "domain": [max(0, top - 1 / down + 0.06), top - 0.06],
            "autorange": "reversed",
            "anchor": f"x{number}",
        }
        figure.add_annotation(
            text=title, x=left, y=top - 0.05, xref="paper", yref="paper",
            xanchor="left", yanchor="bottom", showarrow=False,
        )  # fmt: skip
    figure.update_layout(height=230 * down, margin={"l": 12, "r": 12, "t": 12, "b": 12})
    said = "; ".join(
        f"{title}: " + " | ".join(" ".join(map(_cell, line)) for line in rows)
        for title, rows in panels.items()
    )
    return describe(figure, f"Matrices by rows. {said}.")


def _cell(number: float) -> str:
    """Format a number of a matrix in at most six characters."""
    if not math.isfinite(number):
        return _word(number)
    size = abs(number)
    digits = f"{size:.2g}" if size < 0.1 else f"{size:.3g}"
    text = "0" if number == 0 else _power(size) if size < 0.005 else digits
    return f"−{text}" if number < 0 else text


def second_moments(paths: Mapping[str, Sequence[float]], ceiling: float) -> go.Figure:
    """Draw the second moment by step, one line per format: first with gradients, then without.

    ceiling: where the format predicts that a second moment gets stuck; a dotted line.
    """
    figure = go.Figure()
    for (name, path), color in zip(paths.items(), draw.COLORS, strict=False):
        figure.add_scatter(y=list(path), mode="lines", name=name, line={"color": color})
    figure.add_hline(y=ceiling, line={"dash": "dot", "width": 1.5})
    figure.update_layout(
        title="The second moment under a pulse",
        xaxis={"title": "step"},
        yaxis={"title": "second moment v", "range": [0, 1.05]},
    )
    ends = ", ".join(f"{name} {path[-1]:.3g}" for name, path in paths.items())
    return describe(
        draw.named_at_ends(figure),
        f"The second moment by step. At the end: {ends}. Predicted ceiling: {ceiling:g}.",
    )
