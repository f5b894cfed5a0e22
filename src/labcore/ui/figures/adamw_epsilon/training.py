"""Runs that diverge or do not learn, and what heals them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

import plotly.graph_objects as go

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.adamw_epsilon.over_seeds import over_seeds

__all__ = ["divergence", "remedies", "scales"]


def divergence(curves: Mapping[str, Sequence[float | None]], title: str) -> go.Figure:
    """Draw losses by step, one line per run; curves: name -> loss, None where it isn't finite.

    A line ends with an x where its loss stops being finite.
    """
    figure, ends = go.Figure(), []
    dashes = itertools.cycle(("solid", "dash", "dot"))
    for (name, losses), color, dash in zip(curves.items(), draw.COLORS, dashes, strict=False):
        finite = list(itertools.takewhile(lambda loss: loss is not None, losses))
        last, whole = len(finite) - 1, len(finite) == len(losses)
        figure.add_scatter(
            x=list(range(len(finite))), y=finite, mode="lines+markers", name=name,
            line={"color": color, "width": 2.5, "dash": dash},
            marker={
                "symbol": ["circle" if whole or step < last else "x" for step in range(last + 1)],
                "size": [0 if whole or step < last else 13 for step in range(last + 1)],
            },
        )  # fmt: skip
        ends.append(f"{name}: {finite[-1]:.3g}" + ("" if whole else f", not finite after {last}"))
    figure.update_layout(
        title=title,
        xaxis={"title": "step", "range": [-1, max(map(len, curves.values()))]},
        yaxis={"title": "loss, nats per byte", "type": "log", "range": [0.4, 2.8], "dtick": 1},
    )
    return describe(figure, f"Loss by step, last value of each run. {'; '.join(ends)}.")


def scales(rms: Sequence[float], accuracy: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Draw test accuracy on digits by the gradients' RMS; accuracy: name -> [rms, seeds]."""
    figure, words = over_seeds(rms, accuracy, unit="Test accuracy by gradient RMS")
    figure.update_layout(
        title="The same task, its loss scaled down",
        xaxis={"title": "RMS of the gradients", "type": "log", "exponentformat": "power"},
        yaxis={"title": "test accuracy", "range": [0, 1.02]},
    )
    return describe(draw.named_at_ends(figure), words)


def remedies(accuracy: Mapping[str, Mapping[str, Sequence[float]]]) -> go.Figure:
    """Draw test accuracy by remedy, one symbol per failure (failure -> remedy -> seeds)."""
    figure = go.Figure()
    symbols = itertools.cycle(("circle", "x", "diamond", "square"))
    for (failure, rows), symbol in zip(accuracy.items(), symbols, strict=False):
        figure.add_scatter(
            x=[fmean(samples) for samples in rows.values()],
            y=list(rows),
            error_x={
                "array": [draw.deviation(samples) for samples in rows.values()],
                "thickness": 1.2,
            },
            mode="markers",
            marker={"size": 11, "symbol": symbol},
            name=failure,
        )
    figure.update_layout(
        title="Remedies on digits",
        xaxis={"title": "test accuracy", "range": [0, 1.02]},
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},  # no room on a phone beside the long names
        height=520,
    )
    words = "; ".join(
        f"{failure}: " + ", ".join(f"{name} {fmean(xs):.3f}" for name, xs in rows.items())
        for failure, rows in accuracy.items()
    )
    return describe(figure, f"Test accuracy by remedy. {words}.")
