"""Small models on letters and digits: loss curves, spikes, and what correlated batches cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import log, log10
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "buffer",
    "correlations",
    "design_effects",
    "effective_rows",
    "outcomes",
    "schedules",
    "spikes",
]

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


def buffer(order: str, seed: int, data: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Draw the loss of each batch above, and the batches' distance from the data's average below.

    data: order -> "losses" and "distances" [seeds drawn, steps], "onsets", "held out",
    "design effect" and "design effect of 16 batches" [seeds]. The distances are means over 25
    batches, every 5 steps.
    """
    run = data[order]
    curve, distances = run["losses"][seed], run["distances"][seed]
    onsets = list(run["onsets"][seed])
    spiked = f"{len(onsets)} spike{'' if len(onsets) == 1 else 's'}"
    one, pooled = run["design effect"][seed], run["design effect of 16 batches"][seed]
    effect = f"design effect {one:.1f}, over 16 batches {pooled:.0f}"
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
                "title": "distance",
                "type": "log",
                "range": [-0.5, 1.7],
                "tickvals": [0.5, 1, 2, 5, 10, 20, 50],
                "domain": [0, 0.42],
                "anchor": "x2",
            },
            "height": 552,
        },
    )


def outcomes(
    orders: Mapping[str, tuple[float, Sequence[float]]],
    made: Mapping[str, tuple[float, Sequence[float]]],
    yardstick: float,
) -> go.Figure:
    """Draw the harm of each run by its spikes, means over seeds.

    orders, made: name -> (spikes per 1,000 steps, held-out loss minus a clean full shuffle's by
    seed), whose mean must be above 0; made has the spikes made on purpose in a full shuffle.
    yardstick: what a tenth fewer steps cost, in the same unit.
    """
    figure = go.Figure()
    groups = (
        ("order of the rows", orders, "vermillion", "circle"),
        ("spikes made on purpose", made, "blue", "diamond"),  # whose names go to the left
    )
    most = max(count for _, runs, _, _ in groups for count, _ in runs.values())
    for name, runs, color, symbol in groups:
        ends = [fmean(harm) for _, harm in runs.values()]
        places = [
            (x / most, log10(y / yardstick)) for (x, _), y in zip(runs.values(), ends, strict=True)
        ]
        beside = _beside(places) if runs is orders else "middle left"
        figure.add_scatter(
            x=[count for count, _ in runs.values()], y=ends,
            mode="markers+text", text=list(runs), textposition=beside, name=name,
            textfont={"size": 11}, cliponaxis=False,
            marker={"color": PALETTE[color], "size": 11, "symbol": symbol},
        )  # fmt: skip
    figure.add_hline(y=yardstick, line=draw.PREDICTED)
    figure.update_layout(
        title="Harm by spikes; dashed: a tenth fewer steps",
        xaxis={
            "title": "spikes in 1,000 steps",
            "range": [-0.35 * most, 1.1 * most],
            "tickvals": list(range(0, int(1.1 * most) + 1, 5)),
        },
        yaxis={
            "title": "held-out loss minus full shuffle",
            "type": "log",
            "tickvals": [0.005, 0.01, 0.02, 0.05, 0.1, 0.2],
        },
        height=430,
    )
    told = [
        f"{name}: {count:.1f} spikes, {fmean(harm):+.3f} nats"
        for name, (count, harm) in (*orders.items(), *made.items())
    ]
    told.append(f"a tenth fewer steps: {yardstick:+.3f} nats")
    return describe(figure, f"Held-out loss over that of a full shuffle. {'; '.join(told)}.")


def correlations(orders: Mapping[str, tuple[float, float, Sequence[float]]]) -> go.Figure:
    """Draw the harm of each order by the design effect of one batch, and of 16 batches together.

    orders: name -> (design effect of a batch, of 16 consecutive batches taken as one, held-out loss
    minus a full shuffle's by seed). Means over seeds.
    """
    titles = ("of one batch", "of 16 batches in a row")
    figure = make_subplots(
        cols=2, shared_yaxes=True, horizontal_spacing=0.06, subplot_titles=titles
    )
    figure.update_annotations(font={"size": 13})
    single, pooled, harms = zip(*orders.values(), strict=True)
    ends = [fmean(harm) for harm in harms]
    for column, effects in ((1, single), (2, pooled)):
        top = 1.4 * max(effects)
        places = [(log(x) / log(top), y) for x, y in zip(effects, ends, strict=True)]
        figure.add_scatter(
            x=effects, y=ends, mode="markers+text", text=list(orders), showlegend=False,
            textposition=_beside(places), textfont={"size": 11}, cliponaxis=False,
            marker={"color": PALETTE["vermillion"], "size": 11}, row=1, col=column,
        )  # fmt: skip
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50) if tick < top]
        figure.update_xaxes(
            title="design effect", type="log", range=[-0.08, log10(top)], tickvals=ticks, col=column
        )
    figure.update_yaxes(title="held-out loss minus full shuffle", col=1)
    figure.update_layout(title="Harm by correlation", height=430)
    told = [
        f"{name}: {one:.1f}, of 16 batches {many:.1f}, {fmean(harm):+.3f} nats"
        for name, (one, many, harm) in orders.items()
    ]
    return describe(
        figure, f"Held-out loss over a full shuffle's, and design effect. {'; '.join(told)}."
    )


def _beside(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return where each point's name goes; x is a share of the axis. Near ones give way."""
    near = 0.06 * max(y for _, y in places)
    found = []
    for x, y in places:
        others = [v - y for u, v in places if (u, v) != (x, y) and abs(u - x) < 0.2]
        level = "middle"
        if any(abs(gap) < near for gap in others):
            level = "bottom" if any(0 < gap < near for gap in others) else "top"
        found.append(f"{level} {'right' if x < 0.5 else 'left'}")
    return found


def schedules(data: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]]) -> go.Figure:
    """Draw the held-out loss by learning rate, one line per order and one panel per schedule.

    data: title of a panel -> order -> learning rate -> losses by seed.
    """
    figure = make_subplots(
        cols=len(data), shared_yaxes=True, horizontal_spacing=0.06, subplot_titles=list(data)
    )
    figure.update_annotations(font={"size": 13})
    colors = ("vermillion", "orange", "blue", "green", "purple")
    for column, orders in enumerate(data.values(), 1):
        for (name, losses), color in zip(orders.items(), colors, strict=False):
            figure.add_scatter(
                x=list(losses), y=[fmean(one) for one in losses.values()], mode="lines+markers",
                error_y={"array": [draw.deviation(one) for one in losses.values()], "thickness": 1},
                name=name, legendgroup=name, showlegend=column == 1,
                line={"color": PALETTE[color]}, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title="learning rate", type="log", tickvals=sorted(losses), tickangle=0)
    figure.update_yaxes(title="held-out loss, nats per letter", col=1)
    figure.update_layout(title="What poor shuffling costs")
    told = "; ".join(
        f"{panel}, {name}: "
        + ", ".join(f"{fmean(one):.2f} at {rate:g}" for rate, one in losses.items())
        for panel, orders in data.items()
        for name, losses in orders.items()
    )
    return describe(figure, f"Held-out loss by learning rate. {told}.")


def effective_rows(rows: Mapping[str, float], batch: int) -> go.Figure:
    """Draw how many independent rows a batch is worth. rows: order -> that number."""
    figure = go.Figure()
    figure.add_bar(
        x=list(rows.values()), y=list(rows), orientation="h",
        marker={"color": PALETTE["vermillion"]}, texttemplate="%{x:.1f}",
        textposition="outside", cliponaxis=False,
    )  # fmt: skip
    figure.add_vline(x=batch, line=draw.PREDICTED)
    figure.update_layout(
        title=f"What a batch of {batch} rows is worth",
        xaxis={"title": "independent rows; dashed: all", "range": [0, 1.15 * batch]},
        yaxis={"autorange": "reversed"},
        height=330,
    )
    told = ", ".join(f"{name} {value:.1f}" for name, value in rows.items())
    return describe(figure, f"Independent rows that a batch of {batch} is worth: {told}.")


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
