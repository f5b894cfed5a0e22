"""What epsilon leaves of an update, and where it stands among a model's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.studies.adamw_epsilon.gradient_batches import BINS
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.adamw_epsilon.over_seeds import over_seeds
from labcore.ui.theme import PALETTE

__all__ = ["attenuation", "gradient_sizes", "loss_by_eps", "rms_by_batch", "rms_by_width"]


def attenuation(
    ratios: Sequence[float], measured: Mapping[str, Sequence[float]], predicted: Sequence[float]
) -> go.Figure:
    """Draw how much of an update epsilon leaves, by the gradient's RMS over epsilon.

    measured: kind of gradient -> shares, one per ratio; predicted: by the formula, as a line.
    """
    figure = go.Figure()
    figure.add_scatter(
        x=list(ratios), y=list(predicted), mode="lines", name="RMS / (RMS + ε)", line=draw.PREDICTED
    )
    for number, (name, shares) in enumerate(measured.items()):
        # Draw the largest points first, so that overlapping ones all show.
        marker = {"size": max(5, 13 - 6 * number), "symbol": "circle" if number else "circle-open"}
        figure.add_scatter(x=list(ratios), y=list(shares), mode="markers", name=name, marker=marker)
    figure.update_layout(
        title="What ε leaves of an update",
        xaxis={
            "title": "RMS of the gradient over ε",
            "type": "log",
            "dtick": 2,
            "exponentformat": "power",
        },
        yaxis={"title": "share of the update", "range": [-0.03, 1.05]},
    )
    gaps = ", ".join(
        f"{name} {max(abs(m - p) for m, p in zip(shares, predicted, strict=True)):.1e}"
        for name, shares in measured.items()
    )
    return describe(
        figure,
        f"The share rises from 0 to 1 around a ratio of 1. Largest gap to the formula: {gaps}.",
    )


def rms_by_batch(
    rms: Mapping[str, Mapping[int, float]],
    predicted: Mapping[str, Mapping[int, float]],
    eps: float = 1e-8,
) -> go.Figure:
    """Draw the RMS of the gradient by the tokens of a batch, one color per layer.

    rms: layer -> tokens per batch -> what was measured, as dots. predicted: likewise, as dashed
    lines, also beyond the measured sizes. A dotted line marks eps.
    """
    figure = go.Figure()
    for (layer, sizes), color in zip(rms.items(), draw.COLORS, strict=False):
        said = predicted[layer]
        figure.add_scatter(
            x=list(said), y=list(said.values()), mode="lines", showlegend=False, hoverinfo="skip",
            line={**draw.PREDICTED, "color": color},
        )  # fmt: skip
        figure.add_scatter(
            x=list(sizes), y=list(sizes.values()), mode="markers", name=layer,
            marker={"color": color, "size": 10},
        )  # fmt: skip
    figure.add_hline(y=eps, line={"dash": "dot", "width": 1.5}, annotation_text=f"ε = {eps:.0e}")
    figure.update_layout(
        title="Larger batches, smaller gradients",
        xaxis={"title": "tokens per batch", "type": "log", "dtick": 1, "exponentformat": "SI"},
        yaxis={
            "title": "RMS of the gradient",
            "type": "log",
            "range": [-9, -1],
            "dtick": 2,
            "exponentformat": "power",
        },
    )
    words = "; ".join(
        f"{layer}: " + ", ".join(f"{size:.2g} at {batch:,}" for batch, size in sizes.items())
        for layer, sizes in rms.items()
    )
    return describe(figure, f"Gradient RMS by the tokens of a batch. {words}.")


def gradient_sizes(
    eps: float, batch: int, layer: str, data: Mapping[int, Mapping[str, Mapping[str, Any]]]
) -> go.Figure:
    """Draw the weights of a layer by the root of their mean squared gradient, with eps among them.

    data: tokens per batch -> what `gradient_batches.sizes_of` returns. Weights below eps have
    another color.
    """
    found = data[batch][layer]
    shares, key = found["histogram"], f"{eps:g}"
    middles = [10 ** (low + 0.125) for low in BINS[:-1]]
    below = [middle < eps for middle in middles]
    figure = go.Figure(
        go.Bar(
            x=middles,
            y=shares,
            width=[10 ** (low + 0.25) - 10**low for low in BINS[:-1]],
            marker={
                "color": [PALETTE["vermillion" if under else "blue"] for under in below],
                "line": {"width": 0},
            },
            hoverinfo="skip",
        )
    )
    figure.add_vline(x=eps, line={"dash": "dot", "width": 2})
    title = f"Below ε: {found['below'][key]:.1%}. Left: {found['kept'][key]:.1%}"
    figure.update_layout(
        title=title,
        bargap=0,
        xaxis={
            "title": "root of the mean squared gradient",
            "type": "log",
            "range": [BINS[0], BINS[-1]],
            "dtick": 3,
            "exponentformat": "power",
        },
        yaxis={"title": "share of the weights", "rangemode": "tozero", "tickformat": ".0%"},
    )
    return describe(
        figure,
        f"Weights of {layer} at {batch:,} tokens per batch. {found['below'][key]:.2%} have a root "
        f"mean squared gradient below epsilon {key}, which leaves {found['kept'][key]:.2%} of the "
        "mean update.",
    )


def rms_by_width(
    widths: Sequence[int], rms: Mapping[str, Sequence[Sequence[float]]], title: str
) -> go.Figure:
    """Draw the RMS of a Llama's gradients by width, one curve per group; rms: [widths, seeds]."""
    figure, words = over_seeds(widths, rms, unit="Gradient RMS by width")
    ticks = {"tickvals": list(widths), "ticktext": [str(width) for width in widths]}
    figure.update_layout(
        title=title,
        xaxis={"title": "width C", "type": "log", **ticks},
        yaxis={
            "title": "RMS of the gradient",
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
        },
    )
    return describe(draw.named_at_ends(figure), words)


def loss_by_eps(eps: Sequence[float], loss: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw the loss after a short training by epsilon, one curve per width; loss: [eps, seeds]."""
    figure, words = over_seeds(eps, loss, unit="Loss by epsilon")
    figure.update_layout(
        title="Where a fixed ε begins to bite",
        xaxis={"title": "ε", "type": "log", "dtick": 2, "exponentformat": "power"},
        yaxis={"title": "loss, nats per byte"},
    )
    return describe(draw.named_at_ends(figure), words)
