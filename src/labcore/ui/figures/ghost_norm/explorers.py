"""The chapter's explorers: what a control moves, drawn at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import torch

from labcore.studies.ghost_norm import shown, sweeps
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.ghost_norm.shared import (
    BATCHES,
    GHOSTS,
    LARGE,
    SMALL,
    curve,
    falling_loss,
    ticks,
    words,
)

__all__ = ["BEST", "WHOLE", "arrivals", "by_batch", "companions", "path", "trade_off"]

BEST = "each batch's best"
WHOLE = "none"

Runs = Mapping[str, Any]


def by_batch(
    rate: str, norm: str, data: Mapping[str, Mapping[int, Mapping[float, Runs]]]
) -> go.Figure:
    """Draw the accuracy by batch size at one learning rate, and below it the training loss.

    rate: a number as text, or BEST. data: norm -> batch -> rate -> "accuracy" by seed and "training
    loss" by check, the last at the end of the run.
    """
    chosen = {}
    for batch, rates in data[norm].items():
        best = max(rates, key=lambda each, of=rates: fmean(of[each]["accuracy"]))  # type: ignore[misc]
        chosen[batch] = rates[best if rate == BEST else float(rate)]
    batches = list(chosen)
    accuracy = [100 * fmean(runs["accuracy"]) for runs in chosen.values()]
    losses = [runs["training loss"][-1] for runs in chosen.values()]
    spread = [100 * draw.deviation(runs["accuracy"]) for runs in chosen.values()]
    style = {"mode": "lines+markers", "marker": {"size": 9}, "showlegend": False}
    figure = go.Figure(
        [
            {
                **style,
                "x": batches,
                "y": accuracy,
                "error_y": {"array": spread, "thickness": 1.2},
                "line": {"color": SMALL},
            },
            {**style, "x": batches, "y": losses, "yaxis": "y2", "line": {"color": LARGE}},
        ],
        {
            "title": f"From batch {batches[0]} to {batches[-1]:,}: "
            f"{accuracy[-1] - accuracy[0]:+.1f} points",
            "xaxis": {**BATCHES, **ticks(batches), "anchor": "y2"},
            "yaxis": {"title": "accuracy, %", "domain": [0.46, 1], "range": [5, 85]},
            "yaxis2": {
                "title": "training loss",
                "type": "log",
                "domain": [0, 0.36],
                "range": [math.log10(0.2), math.log10(3)],
                **ticks((0.2, 0.5, 1, 2)),
            },
            "height": 520,
        },
    )
    said = ", ".join(
        f"{batch}: {hit:.1f}% at training loss {'none' if loss is None else f'{loss:.2f}'}"
        for batch, hit, loss in zip(batches, accuracy, losses, strict=True)
    )
    return describe(figure, f"Accuracy by batch size with {norm}, rate {rate}. {said}.")


def path(
    batch: int, ghosts: str, rate: str, data: Mapping[int, Mapping[str, Mapping[float, Runs]]]
) -> go.Figure:
    """Draw runs as paths: accuracy against training loss, the last point at the end.

    ghosts: WHOLE or a kind such as "ghosts of 32"; one as large as the batch is the whole batch.
    data: batch -> kind -> rate -> "training loss" and "curve", the accuracy, by check. The smallest
    batch is drawn at its best rate, for comparison.
    """
    first = data[min(data)]["batch norm"]
    best = max(first, key=lambda each: fmean(first[each]["accuracy"]))
    kinds = data[batch]
    mine = kinds["batch norm"][float(rate)]
    other = kinds.get(ghosts, kinds["batch norm"])[float(rate)]
    drawn = {
        f"batch {min(data)}": (first[best], SMALL, "solid"),
        "whole batch": (mine, LARGE, "solid"),
        "ghosts": (other, GHOSTS, "dash"),
    }
    figure = go.Figure()
    for name, (runs, color, dash) in drawn.items():
        count = len(runs["curve"])
        figure.add_scatter(
            x=runs["training loss"],
            y=[None if each is None else 100 * each for each in runs["curve"]],
            mode="lines+markers",
            name=name,
            line={"color": color, "dash": dash},
            marker={"size": [4] * (count - 1) + [12]},
        )
    ends = [100 * (runs["curve"][-1] or 0.0) for runs, *_ in drawn.values()]
    figure.update_layout(
        title=f"Batch {batch:,}: {ends[1]:.1f}%, with ghosts {ends[2]:.1f}%",
        xaxis={**falling_loss(), "autorange": False, "range": [math.log10(2.5), -0.7]},
        yaxis={"title": "accuracy, %", "range": [20, 80]},
    )
    said = ", ".join(f"{name} {end:.1f}%" for name, end in zip(drawn, ends, strict=True))
    return describe(figure, f"Accuracy against training loss at rate {rate}. At the end: {said}.")


def companions(norm: str, value: float) -> go.Figure:
    """Draw six tokens after normalization, as a table, and mark the rows that `value` changes.

    norm: as in `shown.normalized`, with ghosts of three rows. value: the first channel of sequence
    A's second token, which is 3 in `shown.TABLE`.
    """
    table = torch.tensor(shown.TABLE, dtype=torch.float64)
    before = shown.normalized(table, norm)
    table[1, 0] = value
    after = shown.normalized(table, norm)
    moved = ((after - before).abs() > 5e-3).any(1).tolist()
    names = [f"{name} {'●' if row else '○'}" for name, row in zip(shown.ROWS, moved, strict=True)]
    cells = [[round(each, 2) for each in row] for row in after.tolist()]
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            x=["channel 1", "channel 2", "channel 3"],
            y=list(range(len(names))),
            texttemplate="%{z:.2f}",
            colorscale="RdBu",
            zmid=0,
            zmin=-2,
            zmax=2,
            opacity=0.6,
            showscale=False,
            hoverinfo="skip",
        )
    )
    others = [name for name, row in zip(shown.ROWS, moved, strict=True) if row]
    told = f"{sum(moved)} of {len(moved)} tokens change"
    figure.update_layout(
        title=f"{norm} norm: {told}" if norm != "ghosts" else f"ghosts of three: {told}",
        yaxis={"autorange": "reversed", "tickvals": list(range(len(names))), "ticktext": names},
        height=420,
    )
    return describe(figure, f"Normalized values. Changed: {', '.join(others) or 'no token'}.")


def trade_off(
    noise_scale: float, runs: str, data: Mapping[str, Mapping[int, Sequence[float]]]
) -> go.Figure:
    """Draw steps and examples to a loss by batch size, over their minima, and measured examples.

    noise_scale and batch sizes in examples, which are rows or tokens. steps = 1 + noise_scale / B,
    examples = 1 + B / noise_scale (McCandlish et al., arXiv 1812.06162). data: runs -> batch -> the
    examples that it needs over those of the smallest batch, by seed; the smallest batch is drawn on
    its curve.
    """
    batches = [2.0 ** (power / 2) for power in range(10, 35)]
    laws = {
        "steps": ([1 + noise_scale / each for each in batches], SMALL),
        "examples": ([1 + each / noise_scale for each in batches], LARGE),
    }
    figure = go.Figure()
    for name, (line, color) in laws.items():
        figure.add_scatter(
            x=[round(each) for each in batches],
            y=[float(f"{each:.4g}") for each in line],
            mode="lines",
            name=name,
            line={"color": color},
        )
    ratios, foot = data[runs], 1 + min(data[runs]) / noise_scale
    points = [[float(f"{foot * each:.4g}") for each in seeds] for seeds in ratios.values()]
    measured = curve(list(ratios), points, "examples, measured")
    figure.add_trace({**measured, "mode": "markers", "marker": {"color": LARGE, "size": 11}})
    figure.update_layout(
        title=f"If the critical batch were {noise_scale:,.0f}",
        xaxis={
            "title": "examples per batch",
            "type": "log",
            "range": [1.45, 5.17],
            "tickvals": [2**power for power in range(5, 18, 3)],
            "ticktext": ["32", "256", "2K", "16K", "128K"],
        },
        yaxis={
            "title": "over the least possible",
            "type": "log",
            "range": [-0.05, 2],
            **ticks((1, 2, 5, 10, 20, 50, 100)),
        },
    )
    told = ", ".join(
        f"{batch:,}: {fmean(seeds):.2f} measured, {(1 + batch / noise_scale) / foot:.2f} computed"
        for batch, seeds in ratios.items()
    )
    return describe(
        figure,
        f"Critical batch {noise_scale:,.0f}. {runs}: examples to a loss over those at a batch of "
        f"{min(ratios):,}. {told}.",
    )


def arrivals(
    norm: str,
    loss: str,
    data: Mapping[str, Mapping[str, Mapping[str, Sequence[Sequence[float]]]]],
) -> go.Figure:
    """Draw the cost of a training loss over the smallest batch's, by batch size.

    data: as `shown.costs`, norm -> loss in nats, as text -> unit -> ratios [batches, seeds].
    """
    batches, costs = sweeps.BATCHES, data[norm][loss]
    figure = go.Figure()
    for unit, color in (("updates", SMALL), ("rows", LARGE), ("time", GHOSTS)):
        points = costs.get(unit, ())
        figure.add_trace(curve(batches[: len(points)], points, unit, line={"color": color}))
    figure.add_scatter(
        x=[batches[0], batches[-1]], y=[1, 1], mode="lines", line=draw.PREDICTED, showlegend=False
    )
    at = batches.index(512)
    means = {unit: fmean(points[at]) for unit, points in costs.items()}
    figure.update_layout(
        title=f"Batch 512: {means['updates']:.2f} × updates, {means['rows']:.2f} × rows",
        xaxis={**BATCHES, **ticks(batches)},
        yaxis={
            "title": f"over batch {batches[0]}",
            "type": "log",
            "range": [-1.8, 1],
            **ticks((0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)),
        },
        showlegend=True,
    )
    said = "; ".join(f"{unit}: {words(batches, points)}" for unit, points in costs.items())
    return describe(
        figure, f"Cost of a training loss of {loss} with {norm}, over batch 32. {said}."
    )
