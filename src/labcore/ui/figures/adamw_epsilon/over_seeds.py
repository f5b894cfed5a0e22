"""Means over seeds with their spread, one curve per name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import plotly.graph_objects as go

from labcore.ui import draw

__all__ = ["over_seeds"]


def over_seeds(
    x: Sequence[float], curves: Mapping[str, Sequence[Sequence[float]]], *, unit: str
) -> tuple[go.Figure, str]:
    """Return a figure of means over seeds with their spread, one curve per name, and a text.

    The text lists the means. A point with a seed that ended in NaN is a gap.
    """
    figure = go.Figure()
    for name, points in curves.items():
        figure.add_scatter(
            x=list(x),
            y=[fmean(samples) for samples in points],
            error_y={"array": [draw.deviation(samples) for samples in points], "thickness": 1.2},
            mode="lines+markers",
            name=name,
        )
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{fmean(ys):.3g} at {place:g}" for place, ys in zip(x, points, strict=True))
        for name, points in curves.items()
    )
    return figure, f"{unit}. {words}."
