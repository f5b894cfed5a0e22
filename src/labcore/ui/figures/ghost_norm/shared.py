"""What the chapter's figures share: axes, colors, and means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from labcore.claims import Measured
from labcore.ui.theme import PALETTE

__all__ = [
    "BATCHES",
    "GHOSTS",
    "LARGE",
    "SMALL",
    "curve",
    "falling_loss",
    "interval",
    "ticks",
    "words",
]

BATCHES = {"title": "batch size", "type": "log"}
SMALL, LARGE, GHOSTS = PALETTE["blue"], PALETTE["vermillion"], PALETTE["green"]
LOSSES = (2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the 95% interval over seeds; 0 for one seed."""
    measured = Measured.of(samples)
    half = measured.high - measured.mean
    return measured.mean, half if math.isfinite(half) else 0.0


def curve(
    x: Sequence[float], points: Sequence[Sequence[float]], name: str, **style: Any
) -> dict[str, Any]:
    """Return a trace of means with their intervals; points: [places, seeds]."""
    pairs = [interval(samples) for samples in points]
    return {
        "x": list(x),
        "y": [mean for mean, _ in pairs],
        "error_y": {"array": [half for _, half in pairs], "thickness": 1.2},
        "mode": "lines+markers",
        "name": name,
        **style,
    }


def ticks(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis's ticks at `values`."""
    return {"tickvals": list(values), "ticktext": [f"{value:g}" for value in values]}


def falling_loss() -> dict[str, Any]:
    """Return an axis of training losses that fall to the right."""
    title = "training loss, falling to the right"
    return {"title": title, "type": "log", "autorange": "reversed", **ticks(LOSSES)}


def words(x: Sequence[float], points: Sequence[Sequence[float]], digits: int = 3) -> str:
    """Return the means by place, for a text alternative."""
    return ", ".join(
        f"{fmean(samples):.{digits}g} at {place:g}"
        for place, samples in zip(x, points, strict=True)
    )
