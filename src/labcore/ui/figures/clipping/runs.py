"""Training runs: their losses, what bad batches and limits cost, and the norms on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import plotly.graph_objects as go

from labcore.studies.clipping.results import AT_THE_END, Harm
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.clipping.shared import COLORS, POWERS, ROWS, short_number
from labcore.ui.theme import PALETTE

__all__ = ["LEAST", "MOST", "harm", "limits", "losses", "norms"]

# What the chapter calls a way to clip, and how it is drawn.
_METHODS = {
    "none": ("no clipping", "vermillion", "x"),
    "global": ("global norm", "blue", "circle"),
    "updates": ("clipped updates", "green", "diamond"),
}


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


def losses(curves: Mapping[str, Sequence[float]], *, title: str) -> go.Figure:
    """Draw training losses by step, running means over 7; a cross marks where one isn't finite.

    Losses far above the lowest start leave the figure.
    """
    figure, ends = go.Figure(), []
    ceiling = 1.3 * min(curve[0] for curve in curves.values())
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
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
    figure.update_layout(
        title=title,
        xaxis={"title": "step"},
        yaxis={"title": "training loss, nats", "range": [0, ceiling]},
    )
    return describe(draw.named_at_ends(figure), f"{title}. At the end: {', '.join(ends)}.")


LEAST, MOST = 0.01, 1e3  # nats: less is no harm, and more leaves the figure


def harm(
    optimizer: str,
    bad: int = 1,
    when: str = AT_THE_END,
    *,
    data: Mapping[str, Harm],
) -> go.Figure:
    """Draw what bad batches cost, by kind and by way to clip: the median over seeds, and its range.

    data: optimizer -> harm. bad: bad batches in a row. when: steps after the last of them, or at
    the end. A run that was lost counts as the largest harm.
    """
    final, kinds = when == AT_THE_END, list(next(iter(data[optimizer].values())))
    figure, methods, said = go.Figure(), data[optimizer], []
    for number, (method, by_kind) in enumerate(methods.items()):
        (name, color, symbol), rows = _METHODS[method], []
        for kind in kinds:
            found = [MOST if value is None else value for value in by_kind[kind][bad][when]]
            rows.append(found if final else [min(max(value, LEAST), MOST) for value in found])
        middle = [median(row) for row in rows]
        figure.add_scatter(
            x=middle,
            y=[place + 0.2 * (number - (len(methods) - 1) / 2) for place in range(len(kinds))],
            error_x={
                "array": [max(row) - mid for row, mid in zip(rows, middle, strict=True)],
                "arrayminus": [mid - min(row) for row, mid in zip(rows, middle, strict=True)],
                "thickness": 1.5,
            },
            mode="markers",
            name=name,
            marker={"color": PALETTE[color], "symbol": symbol, "size": 11},
        )
        said += [f"{kind}, {name} {mid:.3g}" for kind, mid in zip(kinds, middle, strict=True)]
    axis: dict[str, Any] = {"title": "points of accuracy lost"}
    if not final:
        ticks = [LEAST, 0.1, 1.0, 10.0, 100.0, MOST]
        axis = {
            "title": "nats of training loss more",
            "type": "log",
            "tickvals": ticks,
            "ticktext": ["0", "0.1", "1", "10", "100", "1000+"],
            "range": [math.log10(LEAST) - 0.2, math.log10(MOST) + 0.2],
        }
    title = f"{optimizer}, {'one bad batch' if bad == 1 else f'{bad} bad batches'}"
    figure.update_layout(
        title=title,
        xaxis=axis,
        yaxis={
            "tickvals": list(range(len(kinds))),
            "ticktext": [kind.replace(" and ", "<br>and ") for kind in kinds],
            "range": [len(kinds) - 0.5, -0.5],
            **ROWS,
        },
    )
    return describe(figure, f"{title}, {when}: {'; '.join(said)}.")


def limits(
    which: str,
    *,
    data: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]],
    unit: str,
    usual: Mapping[str, float] | None = None,
) -> go.Figure:
    """Draw results by the limit they were trained with: means over seeds, with their ranges.

    which: a key of data. data: experiment -> curve -> limit -> a number per seed. unit: of the
    numbers. usual: the norm of healthy gradients, which becomes a vertical line.
    """
    figure, said = go.Figure(), []
    for (name, curve), color in zip(data[which].items(), COLORS, strict=False):
        means = [fmean(each) for each in curve.values()]
        ends = [(max(each), min(each)) for each in curve.values()]
        figure.add_scatter(
            x=list(curve),
            y=means,
            error_y={
                "array": [high - mean for (high, _), mean in zip(ends, means, strict=True)],
                "arrayminus": [mean - low for (_, low), mean in zip(ends, means, strict=True)],
                "thickness": 1.5,
            },
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 2},
            marker={"size": 8},
        )
        every = zip(curve, means, strict=True)
        said.append(f"{name}: " + ", ".join(f"{mean:.1f} at {limit:g}" for limit, mean in every))
    if usual is not None:
        figure.add_vline(x=usual[which], line=draw.PREDICTED)
    return describe(
        figure.update_layout(
            title=which, xaxis={"title": "limit", **POWERS}, yaxis={"title": unit}
        ),
        f"{which}, {unit}. {'; '.join(said)}.",
    )


def norms(max_norm: float, run: str, data: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw the gradient's norm at every step of recorded runs, before clipping, and a limit.

    run: a key of data. data: how a run was clipped -> seeds -> norms by step. The title gives the
    share of steps above the limit.
    """
    figure, seeds = go.Figure(), data[run]
    for number, each in enumerate(seeds):
        figure.add_scatter(
            y=[round(norm, 4) for norm in each],
            mode="lines",
            name="norm, a line per seed",
            legendgroup="norm",
            showlegend=number == 0,
            line={"color": PALETTE["blue"], "width": 1},
        )
    figure.add_scatter(
        x=[0, len(seeds[0]) - 1],
        y=[max_norm] * 2,
        mode="lines",
        name="max_norm",
        line=draw.PREDICTED,
    )
    share = fmean(norm > max_norm for each in seeds for norm in each)
    flat = [norm for each in seeds for norm in each]
    low, high = min(0.09, *flat), max(11.0, *flat)
    figure.update_layout(
        title=f"{share:.0%} of the steps are above {short_number(max_norm)}",
        xaxis={"title": "step"},
        yaxis={
            "title": "gradient norm before clipping",
            **POWERS,
            "range": [math.log10(low) - 0.1, math.log10(high) + 0.1],
        },
    )
    return describe(
        figure, f"{run}: {share:.1%} of {len(flat)} steps have a norm above {max_norm:.3g}."
    )
