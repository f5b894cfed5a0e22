"""Figures for the chapter `clipping`: numbers in, plotly figures out."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import plotly.graph_objects as go

from labcore.studies.clipping import cliff as cliffs
from labcore.studies.clipping import exploding
from labcore.studies.clipping.effects import Snapshot, effect
from labcore.studies.clipping.results import AT_THE_END, Harm
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "cliff",
    "common",
    "growth",
    "harm",
    "losses",
    "norm_choice",
    "norms",
]

_POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}
_COLORS = tuple(PALETTE.values())
_ROWS = {"showgrid": False, "zeroline": False}
# What the chapter calls a way to clip, and how it is drawn.
_METHODS = {
    "none": ("no clipping", "vermillion", "x"),
    "global": ("global norm", "blue", "circle"),
    "max_norm 1.0": ("max_norm 1.0", "blue", "circle"),
    "updates": ("clipped updates", "green", "diamond"),
}


def _short(name: str) -> str:
    """Shorten a parameter's name for an axis: 5 for layers.5.weight."""
    return name.removesuffix(".weight").removeprefix("layers.")


def _number(value: float) -> str:
    """Format a norm for a title: 3 digits, 1e5 rather than 1e+05."""
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


@functools.cache
def _surface() -> go.Contour:
    w, b, loss = cliffs.surface()
    return go.Contour(
        x=[round(v, 3) for v in w.tolist()],
        y=[round(v, 3) for v in b.tolist()],
        z=[[round(v, 3) for v in row] for row in loss.tolist()],
        ncontours=24,
        colorscale="Greys",
        line={"width": 0.5},
        opacity=0.6,
        showscale=False,
        hoverinfo="skip",
        name="loss",
    )


def cliff(max_norm: float = 0.1, lr: float = 1.0, start: str = "below the cliff") -> go.Figure:
    """Draw gradient descent on the loss with a cliff, without clipping and with it.

    start: a key of `cliff.STARTS`. A path that leaves the window ends at its edge.
    """
    figure, ends = go.Figure(_surface()), []
    (left, right), (bottom, top) = cliffs.WINDOW
    for name, limit, color in (
        ("unclipped", math.inf, "vermillion"),
        ("clipped", max_norm, "blue"),
    ):
        walk = cliffs.descend(cliffs.STARTS[start], lr=lr, max_norm=limit)
        out = [not (left <= w <= right and bottom <= b <= top) for w, b in walk.points]
        kept = walk.points[: out.index(True) + 1] if True in out else walk.points
        figure.add_scatter(
            x=[round(max(left - 9, min(right + 9, w)), 3) for w, _ in kept],
            y=[round(max(bottom - 9, min(top + 9, b)), 3) for _, b in kept],
            mode="lines+markers",
            name=name,
            line={"color": PALETTE[color], "width": 2},
            marker={"size": 5},
        )
        ends.append(f"{name}: {'thrown out' if True in out else f'{walk.losses[-1]:.4f}'}")
    w, b = cliffs.STARTS[start]
    figure.add_scatter(
        x=[w],
        y=[b],
        mode="markers+text",
        text=["start"],
        textposition="middle right",
        marker={"size": 11, "symbol": "circle-open", "color": PALETTE["green"]},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.update_layout(
        title=", ".join(ends),
        xaxis={"title": "weight w", "range": [left, right]},
        yaxis={"title": "bias b", "range": [bottom, top]},
    )
    settings = f"{start}, learning rate {lr:g}, max_norm {max_norm:.3g}"
    return describe(figure, f"{settings}. Final loss, {', '.join(ends)}.")


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
    figure.data[-1].name = "max_norm"
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

    curves: name -> (measured, predicted), first state first; the figure divides each by its last
    value. steps: the name of a step, for the axis.
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


def common(
    ways: Mapping[str, Mapping[str, Sequence[float]]], *, exploded: float, title: str
) -> go.Figure:
    """Draw how many times larger a gradient is at the first state than at the last.

    ways: network -> state ("new", "trained") -> a logarithm to base 10 per seed; the figure ends
    at -30 and 12. exploded: the factor from which on it counts as exploded, a dashed line.
    """
    figure, low, high, line = go.Figure(), -30.0, 12.0, math.log10(exploded)
    names = list(ways)
    for state, color, symbol, shift in (
        ("new", "blue", "circle", -0.15),
        ("trained", "orange", "diamond", 0.15),
    ):
        points = [
            (min(max(way, low), high), place + shift)
            for place, states in enumerate(ways.values())
            for way in states[state]
        ]
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="markers",
            name=state,
            marker={"color": PALETTE[color], "symbol": symbol, "size": 9, "opacity": 0.8},
        )
    figure.add_vline(x=line, line=draw.PREDICTED)
    ticks = range(-30, 11, 10)
    figure.update_layout(
        title=title,
        xaxis={
            "title": "gradient, first state over last",
            "tickvals": list(ticks),
            "ticktext": [f"10<sup>{power}</sup>" if power else "1" for power in ticks],
            "tickangle": 0,
            "range": [low - 1, high + 1],
        },
        yaxis={
            "tickvals": list(range(len(names))),
            "ticktext": [name.replace(", ", ",<br>") for name in names],
            "range": [len(names) - 0.5, -0.5],
            **_ROWS,
        },
        height=110 + 62 * len(names),
    )
    words = "; ".join(
        f"{name}: {sum(way >= line for each in states.values() for way in each)} of "
        f"{sum(map(len, states.values()))}"
        for name, states in ways.items()
    )
    return describe(figure, f"Gradients that explode. {words}.")


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
    unit: str = "points of accuracy lost",
) -> go.Figure:
    """Draw what bad batches cost, by kind and by way to clip: the median over seeds, and its range.

    data: optimizer or model -> harm. bad: bad batches in a row. when: steps after the last of
    them, or at the end. unit: of the number at the end; before, it is nats of training loss.
    A run that was lost counts as the largest harm.
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
    axis: dict[str, Any] = {"title": unit}
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
            **_ROWS,
        },
    )
    return describe(figure, f"{title}, {when}: {'; '.join(said)}.")


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
        title=f"{share:.0%} of the steps are above {_number(max_norm)}",
        xaxis={"title": "step"},
        yaxis={
            "title": "gradient norm before clipping",
            **_POWERS,
            "range": [math.log10(low) - 0.1, math.log10(high) + 0.1],
        },
    )
    return describe(
        figure, f"{run}: {share:.1%} of {len(flat)} steps have a norm above {max_norm:.3g}."
    )
