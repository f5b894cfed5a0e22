"""Figures for the chapter `ghost_norm`: numbers in, plotly figures out."""

from labcore.ui.figures.ghost_norm.experiments import (
    carried_rates,
    catching_up,
    equal_loss,
    gradient_variance,
    noise_scale,
    running_statistics,
    unseen,
)
from labcore.ui.figures.ghost_norm.explorers import (
    BEST,
    WHOLE,
    arrivals,
    by_batch,
    companions,
    path,
    trade_off,
)

__all__ = [
    "BEST",
    "WHOLE",
    "arrivals",
    "by_batch",
    "carried_rates",
    "catching_up",
    "companions",
    "equal_loss",
    "gradient_variance",
    "noise_scale",
    "path",
    "running_statistics",
    "trade_off",
    "unseen",
]
