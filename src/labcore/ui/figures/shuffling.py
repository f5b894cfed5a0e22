"""Figures for the chapter `shuffling`: numbers in, plotly figures out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["buffer", "design_effects", "noise_scales", "outcomes", "spikes"]

_MARK = {"symbol": "triangle-down", "size": 11, "color": PALETTE["vermillion"]}


def spikes(losses: Mapping[str, Sequence[float]], onsets: Mapping[str, Sequence[int]]) -> go.Figure:
    """Draw the loss curves of orders, with the first step of each spike marked above its curve.

    losses: name of an order -> the loss of each batch, nats per letter; onsets: name -> steps.
    """
    colors = itertools.cycle((PALETTE["blue"], PALETTE["orange"], PALETTE["green"]))
    figure = go.Figure()
    for (name, curve), color in zip(losses.items(), colors, strict=False):
        line = {"color": color, "width": 1.2}
        figure.add_scatter(y=list(curve), mode="lines", name=name, line=line)
    shown = False
    for name, steps in onsets.items():
        if not steps:
            continue
        heights = [max(losses[name][step : step + 5]) + 0.12 for step in steps]
        figure.add_scatter(
            x=list(steps), y=heights, mode="markers", name="a spike begins", marker=_MARK,
            showlegend=not shown,
        )  # fmt: skip
        shown = True
    figure.update_layout(
        title="Loss of each batch",
        xaxis={"title": "step"},
        yaxis={"title": "loss, nats per letter", "rangemode": "tozero"},
    )
    told = "; ".join(
        f"{name}: from {curve[0]:.2f} to {fmean(curve[-50:]):.2f}, "
        f"spikes at steps {', '.join(map(str, onsets.get(name, ()))) or 'none'}"
        for name, curve in losses.items()
    )
    return describe(draw.named_at_ends(figure), f"Training loss by step. {told}.")


def buffer(size: str, seed: int, data: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Draw the loss of each batch above, and the batches' distance from the data's average below.

    data: buffer size -> "losses" and "distances" [seeds drawn, steps], "onsets", "held out" and
    "design effect" [seeds]. The distances are means over 25 batches, every 5 steps.
    """
    run = data[size]
    curve, distances = run["losses"][seed], run["distances"][seed]
    onsets = list(run["onsets"][seed])
    spiked = f"{len(onsets)} spike{'' if len(onsets) == 1 else 's'}"
    effect = f"design effect {run['design effect'][seed]:.2f}"
    below = {"xaxis": "x2", "yaxis": "y2", "mode": "lines", "showlegend": False}
    steps = [25 + 5 * place for place in range(len(distances))]
    return go.Figure(
        [
            {
                "y": curve,
                "mode": "lines",
                "name": "loss of the batch",
                "line": {"color": PALETTE["blue"], "width": 1.2},
            },
            {
                "x": onsets or [None],
                "y": [max(curve[step : step + 5]) + 0.15 for step in onsets] or [None],
                "mode": "markers",
                "name": "a spike begins",
                "marker": _MARK,
            },
            {"x": steps, "y": distances, "line": {"color": PALETTE["green"], "width": 2}, **below},
            {
                "x": [0, len(curve)],
                "y": [1, 1],
                "line": draw.PREDICTED,
                **below,
            },
        ],
        {
            "title": f"{spiked}, held-out loss at the end {run['held out'][seed]:.2f}",
            "xaxis": {"range": [0, len(curve)], "showticklabels": False},
            "yaxis": {"title": "loss, nats per letter", "range": [1, 5], "domain": [0.5, 1]},
            "xaxis2": {"title": f"step; {effect}", "range": [0, len(curve)], "anchor": "y2"},
            "yaxis2": {
                "title": "batch correlation",
                "type": "log",
                "range": [-0.5, 1.7],
                "tickvals": [0.5, 1, 2, 5, 10, 20, 50],
                "domain": [0, 0.42],
                "anchor": "x2",
            },
            "height": 552,
        },
    )


def outcomes(orders: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> go.Figure:
    """Draw held-out loss by the spikes of a run, means over seeds, one symbol per order.

    orders: name -> (spikes per 1,000 steps, held-out loss minus the full shuffle's), one number per
    seed.
    """
    figure = go.Figure()
    colors = itertools.cycle(list(PALETTE.values()))
    symbols = itertools.cycle(("circle", "square", "diamond", "x", "cross", "star"))
    for (name, (count, loss)), color, symbol in zip(orders.items(), colors, symbols, strict=False):
        figure.add_scatter(
            x=[fmean(count)], y=[fmean(loss)], mode="markers", name=name,
            marker={"size": 13, "color": color, "symbol": symbol},
        )  # fmt: skip
    figure.update_layout(
        title="What a run's spikes say of its end",
        xaxis={"title": "spikes in 1,000 steps", "rangemode": "tozero"},
        yaxis={"title": "held-out loss minus full shuffle"},
        height=520,
    )
    told = "; ".join(
        f"{name}: {fmean(count):.1f} spikes, {fmean(loss):+.3f} nats"
        for name, (count, loss) in orders.items()
    )
    return describe(figure, f"Held-out loss over that of a full shuffle, by spikes. {told}.")


def design_effects(
    sizes: Sequence[int], orders: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, at: int
) -> go.Figure:
    """Draw the design effect by batch size: lines predicted from size `at`, and measured points.

    orders: name -> (predicted, measured), one number per size.
    """
    figure, colors = go.Figure(), itertools.cycle(PALETTE.values())
    for (name, (predicted, measured)), color in zip(orders.items(), colors, strict=False):
        figure.add_scatter(
            x=list(sizes), y=list(predicted), mode="lines", legendgroup=name, showlegend=False,
            line={"color": color, "dash": "dash", "width": 1.5}, name=f"{name}, predicted",
        )  # fmt: skip
        figure.add_scatter(
            x=list(sizes), y=list(measured), mode="markers", legendgroup=name, name=name,
            marker={"color": color, "size": 10},
        )  # fmt: skip
    figure.add_vline(x=at, line={"color": PALETTE["gray"], "dash": "dot", "width": 1.5})
    figure.update_layout(
        title=f"Measured, and predicted from batch {at}",
        xaxis={"title": "rows in a batch", "type": "log", "tickvals": list(sizes)},
        yaxis={
            "title": "design effect",
            "type": "log",
            "range": [-0.3, 2.4],
            "tickvals": [1, 3, 10, 30, 100],
        },
    )
    told = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{size} rows {p:.3g} predicted {m:.3g} measured"
            for size, p, m in zip(sizes, predicted, measured, strict=True)
        )
        for name, (predicted, measured) in orders.items()
    )
    return describe(figure, f"Design effect by batch size. {told}.")


def noise_scales(exact: Sequence[float], estimates: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw the noise scale estimated from two batches, one row per order, with the exact one.

    exact: one number per seed; estimates: name of an order -> one number per seed. In rows.
    """
    figure = go.Figure()
    for name, values in estimates.items():
        figure.add_scatter(
            x=list(values), y=[name] * len(values), mode="markers", showlegend=False,
            marker={"color": PALETTE["blue"], "size": 10, "symbol": "circle-open"},
        )  # fmt: skip
    figure.add_vline(x=fmean(exact), line=draw.PREDICTED)
    figure.update_layout(
        title="Noise scale from two batches; dashed: exact",
        xaxis={"title": "noise scale, rows", "type": "log", "tickvals": [1, 3, 10, 30, 100]},
        yaxis={"autorange": "reversed"},
        height=340,
    )
    told = ", ".join(f"{name} {fmean(values):.1f}" for name, values in estimates.items())
    return describe(figure, f"Noise scale by order: {told}; exact {fmean(exact):.1f}.")
