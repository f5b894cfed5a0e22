"""The figures of the chapter's experiments: recorded and live numbers in, plotly figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import plotly.graph_objects as go

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
from labcore.ui.theme import PALETTE

__all__ = [
    "carried_rates",
    "catching_up",
    "equal_loss",
    "gradient_variance",
    "noise_scale",
    "running_statistics",
    "unseen",
]


def equal_loss(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], loss: float
) -> go.Figure:
    """Draw accuracy against training loss; each point is a complete run of one length.

    curves: name -> "training loss" and "accuracy", each by length and seed. loss: where the curves
    are compared, a dotted line.
    """
    figure = go.Figure()
    colors = (SMALL, LARGE, GHOSTS, PALETTE["purple"])
    for (name, runs), color in zip(curves.items(), colors, strict=False):
        accuracy = [[100 * each for each in seeds] for seeds in runs["accuracy"]]
        losses = [fmean(seeds) for seeds in runs["training loss"]]
        figure.add_trace(curve(losses, accuracy, name, line={"color": color}))
    figure.add_vline(x=loss, line={"dash": "dot", "width": 1.5})
    figure.update_layout(
        title=f"Accuracy at the same training loss, such as {loss:g}",
        xaxis=falling_loss(),
        yaxis={"title": "test accuracy, %"},
        showlegend=True,
    )
    said = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{100 * fmean(hits):.1f}% at {fmean(losses):.2f}"
            for losses, hits in zip(runs["training loss"], runs["accuracy"], strict=True)
        )
        for name, runs in curves.items()
    )
    return describe(figure, f"Test accuracy against training loss. {said}.")


def catching_up(
    epochs: Sequence[int],
    accuracy: Mapping[str, Sequence[Sequence[float]]],
    losses: Mapping[str, Sequence[Sequence[float]]],
) -> go.Figure:
    """Draw the large batch minus the small one, by epochs: accuracy, and below it the test loss.

    accuracy: name -> percentage points by length and seed. losses: the same in nats.
    """
    figure = go.Figure()
    for values, axis in ((accuracy, "y"), (losses, "y2")):
        for (name, each), color in zip(values.items(), (LARGE, GHOSTS), strict=True):
            trace = curve(epochs, each, name, line={"color": color}, yaxis=axis)
            figure.add_trace({**trace, "showlegend": axis == "y", "legendgroup": name})
        zero = [0] * len(epochs)
        figure.add_scatter(
            x=list(epochs), y=zero, mode="lines", line=draw.PREDICTED, yaxis=axis, showlegend=False
        )
    figure.update_layout(
        title="The large batch, trained longer",
        xaxis={
            "title": "epochs of the large batch",
            "type": "log",
            **ticks(epochs),
            "anchor": "y2",
        },
        yaxis={"title": "accuracy, points", "domain": [0.52, 1]},
        yaxis2={"title": "test loss, nats", "domain": [0, 0.42]},
        height=520,
    )
    said = "; ".join(f"{name}: {words(epochs, each, 2)}" for name, each in accuracy.items())
    lost = "; ".join(f"{name}: {words(epochs, each, 2)}" for name, each in losses.items())
    return describe(
        figure, f"Percentage points over the small batch, by epochs. {said}. Test loss: {lost}."
    )


def unseen(points: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> go.Figure:
    """Draw test loss against training loss, one marker per run; on the line they are equal.

    points: name -> training losses and test losses. Names come in pairs: two batches on one kind of
    rows share a symbol.
    """
    figure = go.Figure()
    everything = [each for pair in points.values() for losses in pair for each in losses]
    low, high = 0.9 * min(everything), 1.05 * max(everything)
    for number, (name, (training, test)) in enumerate(points.items()):
        figure.add_scatter(
            x=list(training),
            y=list(test),
            mode="markers",
            name=name,
            marker={
                "size": 10,
                "color": (SMALL, LARGE)[number % 2],
                "symbol": ("circle", "diamond-open")[number // 2 % 2],
                "line": {"width": 2},
            },
        )
    figure.add_scatter(
        x=[low, high], y=[low, high], mode="lines", line=draw.PREDICTED, name="equal"
    )
    figure.update_layout(
        title="The gap is the height above the line",
        xaxis={"title": "training loss", "range": [low, high]},
        yaxis={"title": "test loss", "range": [low, high]},
    )
    said = ", ".join(
        f"{name} {fmean(test) - fmean(training):+.2f}" for name, (training, test) in points.items()
    )
    return describe(figure, f"Test loss minus training loss: {said}.")


def gradient_variance(
    batches: Sequence[int],
    variance: Mapping[str, Sequence[Sequence[float]]],
    law: Mapping[str, Sequence[float]],
) -> go.Figure:
    """Draw the gradient's variance by batch size, on logarithmic axes.

    variance: name -> [batches, seeds], relative to the squared norm of the full gradient; law: name
    -> the prediction for each batch, drawn dashed. Zeros don't fit on the axis and are left out.
    """
    figure = go.Figure()
    for name, points in variance.items():
        means = [fmean(samples) for samples in points]
        figure.add_scatter(
            x=list(batches),
            y=[mean if mean > 1e-9 else None for mean in means],
            mode="markers",
            marker={"size": 10},
            name=name,
        )
    for name, line in law.items():
        figure.add_scatter(
            x=list(batches),
            y=[value if value > 0 else None for value in line],
            mode="lines",
            line=draw.PREDICTED,
            name=name,
        )
    figure.update_layout(
        title="How far batches disagree",
        xaxis={**BATCHES, **ticks(batches)},
        yaxis={
            "title": "relative variance",
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
        },
    )
    said = "; ".join(f"{name}: {words(batches, points)}" for name, points in variance.items())
    return describe(figure, f"Variance of a batch's gradient by batch size. {said}.")


def running_statistics(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]],
    whole: float,
) -> go.Figure:
    """Draw the running variance by policy, one bar per order.

    measured, predicted: order -> policy -> the variance. whole: the variance that a statistic over
    all rows would have, a dashed line.
    """
    figure = go.Figure()
    colors = (PALETTE["blue"], PALETTE["orange"])
    for (order, row), color in zip(measured.items(), colors, strict=False):
        figure.add_bar(
            x=list(row),
            y=list(row.values()),
            name=f"{order}, measured",
            marker={"color": color},
            offsetgroup=order,
        )
        figure.add_scatter(
            x=list(row),
            y=[predicted[order][policy] for policy in row],
            mode="markers",
            name=f"{order}, predicted",
            marker={
                "size": 11,
                "symbol": "diamond",
                "color": "white",
                "line": {"width": 2.5, "color": color},
            },
            offsetgroup=order,
        )
    figure.add_hline(y=whole, line=draw.PREDICTED)
    figure.update_layout(
        title="The running variance after three batches",
        xaxis={"title": "policy"},
        yaxis={"title": "running variance"},
        barmode="group",
        scattermode="group",
        height=480,
    )
    said = "; ".join(
        f"{order}: " + ", ".join(f"{policy} {value:.3f}" for policy, value in row.items())
        for order, row in measured.items()
    )
    return describe(figure, f"Running variance, of all rows {whole:.3f}. {said}.")


def carried_rates(losses: Mapping[str, Mapping[int, Sequence[float]]]) -> go.Figure:
    """Draw the language model's held-out loss by batch, one curve per way to choose the rate.

    losses: name -> tokens per step -> nats per token, by seed.
    """
    styles = ((SMALL, "solid"), (LARGE, "dash"), (GHOSTS, "dot"))
    figure = go.Figure(
        [
            curve(list(points), list(points.values()), name, line={"color": color, "dash": dash})
            for (name, points), (color, dash) in zip(losses.items(), styles, strict=False)
        ]
    )
    batches = sorted({batch for points in losses.values() for batch in points})
    figure.update_layout(
        title="The same text in larger batches",
        xaxis={"title": "tokens per step", "type": "log", **ticks(batches)},
        yaxis={"title": "held-out loss, nats per token"},
        showlegend=True,
    )
    said = "; ".join(
        f"{name}: {words(list(points), list(points.values()))}" for name, points in losses.items()
    )
    return describe(figure, f"Held-out loss by tokens per step. {said}.")


def noise_scale(scales: Mapping[float, float], batches: Sequence[int]) -> go.Figure:
    """Draw the noise scale in tokens over the training, with lines at the batches.

    scales: share of the training -> tokens.
    """
    shares = list(scales)
    figure = go.Figure()
    figure.add_scatter(
        x=shares,
        y=list(scales.values()),
        mode="lines+markers",
        name="noise scale",
        line={"color": draw.MEASURED},
        marker={"size": 9},
    )
    for batch in batches:
        figure.add_scatter(
            x=[0, 1],
            y=[batch, batch],
            mode="lines+text",
            text=[f"batch {batch:,}", ""],
            textposition="top right",
            line=draw.PREDICTED,
        )
    figure.update_layout(
        title="The gradient's noise scale",
        xaxis={"title": "share of the training", "tickformat": ".0%"},
        yaxis={"title": "tokens", "type": "log", "dtick": 1, "exponentformat": "power"},
        showlegend=False,
    )
    said = ", ".join(f"{scale:,.0f} after {share:.0%}" for share, scale in scales.items())
    return describe(figure, f"Noise scale in tokens: {said}.")
