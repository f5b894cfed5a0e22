"""Figures for the chapter `clipping`: numbers in, plotly figures out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import plotly.graph_objects as go

from labcore.studies.clipping import exploding
from labcore.studies.clipping.effects import Snapshot, effect
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["accuracies", "cosines", "growth", "losses", "norm_choice"]

_POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}
_COLORS = tuple(PALETTE.values())


def _short(name: str) -> str:
    """Shorten a parameter's name for an axis: 5 for layers.5.weight."""
    return name.removesuffix(".weight").removeprefix("layers.")


def _number(value: float) -> str:
    """Format a norm for a title: 3 digits, 1e5 rather than 1e+05."""
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def norm_choice(
    norm: str = "global",
    max_norm: float = 1.0,
    gradient: str | None = None,
    *,
    data: Mapping[str, Snapshot],
) -> go.Figure:
    """Draw the norm of each parameter's gradient before and after clipping by `norm` at `max_norm`.

    norm: one of `exploding.COMPARABLE`. gradient: a key of `data`, by default the first.
    """
    taken = data[gradient or next(iter(data))]
    found = effect(taken, exploding.comparable(norm, taken, max_norm))
    names = [_short(name) for name in found.names]
    before, after = list(found.before), list(found.after)
    links: dict[str, list[Any]] = {"x": [], "y": []}
    for name, one, other in zip(names, before, after, strict=True):
        links["x"] += [name, name, None]
        links["y"] += [one, other, None]
    size = math.hypot(*before)
    kept = _number(size * found.kept)
    markers = {"mode": "markers", "x": names}
    everything = [value for value in (*before, *after) if value > 0]
    figure = go.Figure(
        [
            {**links, "mode": "lines", "line": {"color": PALETTE["gray"], "width": 1}},
            {**markers, "y": before, "name": "before", "marker": _dot("blue", "circle-open", 15)},
            {**markers, "y": after, "name": "after", "marker": _dot("vermillion", "circle", 10)},
            {
                "x": [names[0], names[-1]],
                "y": [max_norm] * 2,
                "mode": "lines",
                "line": draw.PREDICTED,
            },
        ],
        {
            "title": f"norm {_number(size)} → {kept}, cosine {found.cosine:.3f}",
            "xaxis": {"title": "parameter", "type": "category"},
            "yaxis": {
                "title": "norm of its gradient",
                **_POWERS,
                "range": [math.log10(min(everything)) - 0.4, math.log10(max(everything)) + 0.4],
            },
            "height": 428,
        },
    )
    figure.data[0].update(showlegend=False, hoverinfo="skip")
    figure.data[-1].update(name="max_norm")
    return describe(
        figure,
        f"{norm}, max_norm {_number(max_norm)}: clipping takes the norm of all gradients from "
        f"{_number(size)} to {kept}; their cosine to the raw ones is {found.cosine:.3f}.",
    )


def _dot(color: str, symbol: str, size: int) -> dict[str, object]:
    # Draw the larger one first, so that both show where nothing was clipped.
    return {"color": PALETTE[color], "symbol": symbol, "size": size, "line": {"width": 2}}


def growth(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str, steps: str
) -> go.Figure:
    """Draw the RMS of a gradient by the steps it has gone back, with its prediction.

    curves: name -> (measured, predicted), first state first as in `networks.Growth`; the figure
    divides each by its last value. steps: the name of a step, for the axis.
    """
    figure = go.Figure()
    for (name, (measured, predicted)), color in zip(curves.items(), _COLORS, strict=False):
        for values, style in (
            (predicted, {"dash": "dash", "width": 1.5}),
            (measured, {"width": 3}),
        ):
            back = [value / values[-1] for value in reversed(values)]
            shown = values is measured
            label = name if shown else f"{name}, predicted"
            line = {"color": color, **style}
            figure.add_scatter(y=back, mode="lines", name=label, showlegend=shown, line=line)
    figure.update_layout(
        title=title,
        xaxis={"title": f"{steps} back from the loss"},
        yaxis={"title": "gradient over the last state's", **_POWERS},
    )
    words = "; ".join(
        f"{name}: {_number(measured[0] / measured[-1])} measured, "
        f"{_number(predicted[0] / predicted[-1])} predicted"
        for name, (measured, predicted) in curves.items()
    )
    return describe(
        draw.named_at_ends(figure),
        f"The gradient at the first state over that at the last. {words}.",
    )


def _smoothed(values: Sequence[float], window: int = 7) -> list[float | None]:
    """Return running means; None from the first non-finite value to the end."""
    good = []
    for value in values:
        if not math.isfinite(value):
            break
        good.append(value)
    means: list[float | None] = [
        fmean(good[max(0, at - window + 1) : at + 1]) for at in range(len(good))
    ]
    return means + [None] * (len(values) - len(good))


def losses(
    curves: Mapping[str, Sequence[float]], *, title: str, bad_step: int | None = None
) -> go.Figure:
    """Draw training losses by step, running means over 7; a cross marks where one isn't finite.

    bad_step: the step with the bad batch, marked. Losses far above the others leave the figure.
    """
    figure, ends = go.Figure(), []
    ceiling = 1.3 * max(curve[0] for curve in curves.values())
    for (name, curve), color in zip(curves.items(), _COLORS, strict=False):
        means = _smoothed(curve)
        figure.add_scatter(y=means, mode="lines", name=name, line={"color": color, "width": 2})
        last = next((at for at, value in enumerate(means) if value is None), None)
        if last is None:
            ends.append(f"{name} {means[-1]:.2f}")
            continue
        ends.append(f"{name} not finite at step {last}")
        marker = {"symbol": "x", "size": 12, "color": color}
        figure.add_scatter(
            x=[last], y=[0.97 * ceiling], mode="markers", marker=marker, showlegend=False
        )
    if bad_step is not None:
        figure.add_vline(x=bad_step, line=draw.PREDICTED)
    figure.update_layout(
        title=title,
        xaxis={"title": "step"},
        yaxis={"title": "training loss, nats", "range": [0, ceiling]},
    )
    return describe(draw.named_at_ends(figure), f"{title}. At the end: {', '.join(ends)}.")


def _over_seeds(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean and standard deviation; 0 for one seed."""
    return fmean(samples), stdev(samples) if len(samples) > 1 else 0.0


def cosines(depths: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw the cosine between raw and clipped gradient by depth; curves: name -> [depth, seeds]."""
    figure = go.Figure()
    for name, rows in curves.items():
        means, spreads = zip(*map(_over_seeds, rows), strict=True)
        figure.add_scatter(
            x=list(depths),
            y=list(means),
            error_y={"array": list(spreads), "thickness": 1.2},
            mode="lines+markers",
            name=name,
        )
    figure.update_layout(
        title="Direction kept, by depth",
        xaxis={"title": "convolutions", "tickvals": list(depths)},
        yaxis={"title": "cosine to the raw gradient", "range": [0, 1.05]},
    )
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{fmean(row):.2f} at {x}" for x, row in zip(depths, rows, strict=True))
        for name, rows in curves.items()
    )
    return describe(draw.named_at_ends(figure), f"Cosine by depth. {words}.")


def accuracies(rows: Mapping[str, Mapping[str, Sequence[float]]], *, title: str) -> go.Figure:
    """Draw held-out accuracy by method, one symbol per group. rows: group -> method -> seeds."""
    figure = go.Figure()
    symbols = ("circle", "x", "diamond", "square")
    for (group, methods), symbol in zip(rows.items(), symbols, strict=False):
        means, spreads = zip(*map(_over_seeds, methods.values()), strict=True)
        figure.add_scatter(
            x=list(means),
            y=list(methods),
            error_x={"array": list(spreads), "thickness": 1.2},
            mode="markers",
            marker={"size": 11, "symbol": symbol},
            name=group,
        )
    figure.update_layout(
        title=title,
        xaxis={"title": "held-out accuracy", "rangemode": "tozero"},
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},  # no room on a phone beside the long names
    )
    words = "; ".join(
        f"{group}: " + ", ".join(f"{name} {fmean(xs):.3f}" for name, xs in methods.items())
        for group, methods in rows.items()
    )
    return describe(figure, f"{title}. {words}.")
