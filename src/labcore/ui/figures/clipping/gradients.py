"""One gradient: on a cliff, through a network, and clipped."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.studies.clipping import cliff as cliffs
from labcore.studies.clipping import exploding
from labcore.studies.clipping.effects import Snapshot, effect
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.clipping.shared import COLORS, POWERS, ROWS, short_number
from labcore.ui.theme import PALETTE

__all__ = ["cliff", "common", "growth", "norm_choice"]


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


def _short(name: str) -> str:
    """Shorten a parameter's name for an axis: 5 for layers.5.weight."""
    return name.removesuffix(".weight").removeprefix("layers.")


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
    kept = short_number(size * found.kept)
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
            "title": f"norm {short_number(size)} → {kept}, cosine {found.cosine:.3f}",
            "xaxis": {"title": "parameter", "type": "category"},
            "yaxis": {
                "title": "norm of its gradient",
                **POWERS,
                "range": [math.log10(min(everything)) - 0.4, math.log10(max(everything)) + 0.4],
            },
            "height": 428,
        },
    )
    figure.data[0].update(showlegend=False, hoverinfo="skip")
    figure.data[-1].name = "max_norm"
    return describe(
        figure,
        f"{norm}, max_norm {short_number(max_norm)}: clipping takes the norm of all gradients from "
        f"{short_number(size)} to {kept}; their cosine to the raw ones is {found.cosine:.3f}.",
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
    for (name, (measured, predicted)), color in zip(curves.items(), COLORS, strict=False):
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
        yaxis={"title": "gradient over the last state's", **POWERS},
    )
    words = "; ".join(
        f"{name}: {short_number(measured[0] / measured[-1])} measured, "
        f"{short_number(predicted[0] / predicted[-1])} predicted"
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
            **ROWS,
        },
        height=110 + 62 * len(names),
    )
    words = "; ".join(
        f"{name}: {sum(way >= line for each in states.values() for way in each)} of "
        f"{sum(map(len, states.values()))}"
        for name, states in ways.items()
    )
    return describe(figure, f"Gradients that explode. {words}.")
