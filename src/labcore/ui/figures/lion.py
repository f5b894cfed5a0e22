"""Figures for the chapter `lion`: numbers in, plotly figures out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from labcore.studies.digits_runs import STATE_TENSORS
from labcore.studies.lion import landscape
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.controls import Choice, Slider
from labcore.ui.explorer import Explorer, describe, explore
from labcore.ui.theme import PALETTE

__all__ = [
    "drift",
    "memory",
    "nan_paths",
    "opening",
    "stall",
    "step_times",
    "update_size",
    "update_steps",
    "walk",
]

COLORS = {
    "Lion": PALETTE["vermillion"],
    "AdamW": PALETTE["blue"],
    "momentum": PALETTE["green"],
    "gradient descent": PALETTE["gray"],
    "AdaGrad": PALETTE["purple"],
    "RMSProp": PALETTE["orange"],
    "Adam": PALETTE["sky"],
}
_PARTS = {"weights": "gray", "gradients": "sky", "optimizer state": "vermillion"}


def _color(name: str) -> str:
    """Return the color of the first known optimizer that `name` contains, or gray."""
    known = (color for key, color in COLORS.items() if key.lower() in name.lower())
    return next(known, PALETTE["gray"])


def _key(name: str) -> str:
    """Return the key in STATE_TENSORS for an optimizer's displayed name."""
    return name.lower().replace(" ", "_")


@functools.cache
def _contour(surface: str) -> go.Contour:
    shape = landscape.SURFACES[surface]
    x, y, loss = landscape.grid(shape, cells=40)
    return go.Contour(
        x=[round(v, 3) for v in x.tolist()],
        y=[round(v, 3) for v in y.tolist()],
        z=[[round(v, 3) for v in row] for row in torch.log10(loss + 1e-2).tolist()],
        ncontours=18,
        showscale=False,
        colorscale="Greys",
        reversescale=True,
        line={"width": 0.5},
        opacity=0.55,
        hoverinfo="skip",
        name="loss",
    )


BOTH = "Lion and AdamW"


def opening() -> Explorer:
    """Return the explorer with which the chapter opens: Lion's and AdamW's paths, overlaid."""
    return explore(
        functools.partial(walk, BOTH, surface="valley"),
        alt="Lion's and AdamW's paths down a bent valley, and the box that Lion's decay draws.",
        weight_decay=Choice(options=(0.0, 0.5, 1.0, 2.0), default=0.0, label="weight decay"),
        noise=Slider(low=0.0, high=10.0, default=0.0, step=2.0, label="gradient noise"),
        lr=Choice(options=(0.01, 0.03, 0.1), default=0.03, label="learning rate"),
        beta1=Choice(options=(0.5, 0.9, 0.99), default=0.9, label="beta1"),
    )


def walk(
    optimizer: str = BOTH,
    lr: float = 0.03,
    noise: float = 0.0,
    surface: str = "bowl",
    steps: int = 100,
    **settings: Any,
) -> go.Figure:
    """Draw the paths of one optimizer, or of Lion and AdamW, as in `landscape.trajectory`.

    settings: of the rules, such as beta1. With weight_decay, the box that holds Lion's weights is
    drawn too.
    A drawn path ends at the first point far outside the window, even if the walk comes back.
    """
    shape = landscape.SURFACES[surface]
    names = BOTH.split(" and ") if optimizer == BOTH else [optimizer]
    figure, said = go.Figure(_contour(surface)), []
    for name in names:
        path = landscape.trajectory(name, shape, lr=lr, noise=noise, steps=steps, **settings)
        margin = 4 * max(shape.x_range[1] - shape.x_range[0], shape.y_range[1] - shape.y_range[0])
        inside = (path.points.abs() <= margin).all(-1)
        kept = path.points[: int(inside.long().cumprod(0).sum())]
        x, y = ([round(v, 4) for v in column] for column in kept.T.tolist())
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=name,
            line={"color": COLORS[name], "width": 2},
            marker={"size": 4},
        )
        end = float(path.losses[-1])
        said.append(f"{name} {end:.3g}" if end < 1e6 else f"{name} diverges")
    figure.add_scatter(
        x=[shape.start[0], shape.minimum[0]],
        y=[shape.start[1], shape.minimum[1]],
        mode="markers+text",
        text=["start", "minimum"],
        textposition="top center",
        marker={"size": 10, "symbol": ["circle-open", "x"], "color": PALETTE["green"]},
        hoverinfo="skip",
        showlegend=False,
    )
    if "Lion" in names and settings.get("weight_decay"):
        edge = 1 / settings["weight_decay"]
        figure.add_shape(
            type="rect", x0=-edge, x1=edge, y0=-edge, y1=edge,
            line={"color": COLORS["Lion"], "dash": "dot", "width": 2},
        )  # fmt: skip
    title = f"Final loss: {', '.join(said)}"
    figure.update_layout(
        title=title,
        xaxis={"title": "x", "range": shape.x_range},
        yaxis={"title": "y", "range": shape.y_range},
        showlegend=len(names) > 1,
    )
    return describe(figure, f"{title}, after {steps} steps at learning rate {lr:.3g}.")


def memory(
    parameters: float,
    bytes_per_number: int,
    optimizers: Sequence[str] = ("AdamW", "Lion", "momentum", "gradient descent"),
) -> go.Figure:
    """Draw gigabytes (1e9) of weights, gradients and optimizer state, stacked per optimizer.

    Every number takes `bytes_per_number` bytes; activations aren't counted.
    """
    unit = parameters * bytes_per_number / 1e9
    figure = go.Figure()
    for part, color in _PARTS.items():
        copies = [
            STATE_TENSORS[_key(name)] if part == "optimizer state" else 1 for name in optimizers
        ]
        figure.add_bar(
            x=list(optimizers),
            y=[unit * count for count in copies],
            name=part,
            marker={"color": PALETTE[color]},
            texttemplate="%{y:.3g}",
            textposition="inside",
        )
    figure.update_layout(
        title=f"Memory of {parameters / 1e9:g} billion weights at {bytes_per_number} bytes each",
        barmode="stack",
        yaxis={"title": "GB, activations not counted"},
    )
    totals = ", ".join(
        f"{name} {unit * (2 + STATE_TENSORS[_key(name)]):.3g} GB" for name in optimizers
    )
    return describe(figure, f"Stacked bars of weights, gradients and optimizer state: {totals}.")


def update_size(
    signals: Sequence[float], measured: Sequence[float], predicted: Sequence[float]
) -> go.Figure:
    """Draw the RMS of an AdamW update, in learning rates, by signal over noise; Lion's is 1."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(signals), y=[1.0] * len(signals), name="Lion", mode="lines",
        line={"color": COLORS["Lion"]},
    )  # fmt: skip
    figure.add_scatter(
        x=list(signals), y=list(predicted), name="AdamW, predicted", mode="lines",
        line={"color": COLORS["AdamW"]},
    )  # fmt: skip
    figure.add_scatter(
        x=list(signals), y=list(measured), name="AdamW, measured", mode="markers",
        marker={"color": COLORS["AdamW"], "size": 10},
    )  # fmt: skip
    figure.update_layout(
        title="How far one update moves a weight",
        xaxis={"title": "mean of the gradient over its noise"},
        yaxis={"title": "update, in learning rates", "range": [0, 1.08]},
    )
    return describe(
        draw.named_at_ends(figure),
        f"AdamW's update grows from {measured[0]:.2f} learning rates at signal {signals[0]:g} to "
        f"{measured[-1]:.2f} at signal {signals[-1]:g}; Lion's is 1 throughout.",
    )


def update_steps(curves: Mapping[str, Sequence[tuple[int, float]]]) -> go.Figure:
    """Draw the size of updates over training runs. curves: name -> (share of the run, RMS)."""
    figure = go.Figure()
    seen: list[str] = []
    for name, points in curves.items():
        dash = ("solid", "dash", "dot")[seen.count(_color(name)) % 3]
        seen.append(_color(name))
        figure.add_scatter(
            x=[place for place, _ in points],
            y=[size for _, size in points],
            mode="lines",
            name=name,
            line={"color": _color(name), "dash": dash},
        )
    figure.update_layout(
        title="Size of the updates on digits",
        xaxis={"title": "share of the run", "tickformat": ".0%"},
        yaxis={"title": "update, in learning rates", "range": [0, 1.05]},
    )
    last = ", ".join(f"{name} {points[-1][1]:.2f}" for name, points in curves.items())
    return describe(
        draw.named_at_ends(figure), f"Update size by step, at the end of the run: {last}."
    )


def _lines(paths: Mapping[str, Sequence[float | None]], *, title: str, y: str) -> go.Figure:
    figure = go.Figure()
    for name, path in paths.items():
        figure.add_scatter(y=list(path), mode="lines", name=name, line={"color": _color(name)})
    figure.update_layout(title=title, xaxis={"title": "step"}, yaxis={"title": y})
    ends = ", ".join(f"{name} {_last(path)}" for name, path in paths.items())
    return describe(figure, f"{title}. Last {y}: {ends}.")


def _last(path: Sequence[float | None]) -> str:
    """Return the last number of a path in words, or that the path ends earlier."""
    return "none, the path ends early" if path[-1] is None else f"{path[-1]:.3g}"


def drift(paths: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw weights after a single gradient. paths: optimizer -> weight by step."""
    title = "One gradient at the first step, none after it"
    return draw.named_at_ends(_lines(paths, title=title, y="weight"))


def nan_paths(paths: Mapping[str, Sequence[float]], at: int) -> go.Figure:
    """Draw a weight with one NaN gradient, at step `at`; a path ends when its weight is NaN."""
    finite = {
        name: [None if math.isnan(weight) else weight for weight in path]
        for name, path in paths.items()
    }
    figure = _lines(finite, title=f"The gradient is NaN once, at step {at}", y="weight")
    dashes = itertools.cycle(("solid", "dash", "dot"))  # paths that coincide stay visible
    for trace, color, dash in zip(figure.data, PALETTE.values(), dashes, strict=False):
        trace.line.update(color=color, dash=dash)  # all of them are Lion
    for name, path in finite.items():
        last = next((step for step, weight in enumerate(path) if weight is None), 0) - 1
        if last >= 0:
            figure.add_scatter(
                x=[last],
                y=[path[last]],
                mode="markers",
                marker={"symbol": "x", "size": 12, "color": PALETTE["vermillion"]},
                name=f"{name}: NaN from here",
            )
    figure.add_vline(x=at, line={"dash": "dot", "width": 1.5})
    return figure


def stall(
    learning_rates: Sequence[float], measured: Sequence[float], predicted: Sequence[float]
) -> go.Figure:
    """Draw the share of weights that a step of the learning rate changes; also its prediction."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(learning_rates),
        y=list(predicted),
        mode="lines",
        name="predicted from the spacing",
        line=draw.PREDICTED,
    )
    figure.add_scatter(
        x=list(learning_rates),
        y=list(measured),
        mode="markers",
        name="measured",
        marker={"color": draw.MEASURED, "size": 9},
    )
    figure.update_layout(
        title="How many bfloat16 weights one step moves",
        xaxis={"title": "learning rate", "type": "log", "dtick": 1, "exponentformat": "power"},
        yaxis={"title": "share of the weights", "range": [-0.03, 1.03], "tickformat": ".0%"},
    )
    return describe(
        figure,
        f"The share of weights that one step moves rises from {measured[0]:.0%} at learning rate "
        f"{learning_rates[0]:.0e} to {measured[-1]:.0%} at {learning_rates[-1]:.0e}; the "
        "prediction runs through the measured points.",
    )


def step_times(milliseconds: Mapping[str, Sequence[float]], title: str) -> go.Figure:
    """Draw the median time of one optimizer step per library, with 20th and 80th percentile."""
    names = sorted(milliseconds, key=lambda name: median(milliseconds[name]))
    figure = go.Figure()
    for name in names:
        low, middle, high = quantiles(list(milliseconds[name]))
        figure.add_bar(
            x=[middle],
            y=[name],
            orientation="h",
            error_x={"array": [high - middle], "arrayminus": [middle - low]},
            marker={"color": _color(name)},
            showlegend=False,
        )
    figure.update_layout(
        title=title, xaxis={"title": "ms per step"}, yaxis={"autorange": "reversed"}
    )
    medians = ", ".join(f"{name} {median(milliseconds[name]):.3g} ms" for name in names)
    return describe(figure, f"{title}: {medians}.")
