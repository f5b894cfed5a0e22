"""Figures for the chapter `adamw_epsilon`."""

from labcore.ui.figures.adamw_epsilon.formats import (
    COLORS,
    DTYPES,
    matrices,
    second_moments,
    switches,
    trap,
)
from labcore.ui.figures.adamw_epsilon.gradients import (
    attenuation,
    gradient_sizes,
    loss_by_eps,
    rms_by_batch,
    rms_by_width,
)
from labcore.ui.figures.adamw_epsilon.training import divergence, remedies, scales

__all__ = [
    "COLORS",
    "DTYPES",
    "attenuation",
    "divergence",
    "gradient_sizes",
    "loss_by_eps",
    "matrices",
    "remedies",
    "rms_by_batch",
    "rms_by_width",
    "scales",
    "second_moments",
    "switches",
    "trap",
]
