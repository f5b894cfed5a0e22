"""Figures for the chapter `clipping`: numbers in, plotly figures out."""

from labcore.ui.figures.clipping.gradients import cliff, common, growth, norm_choice
from labcore.ui.figures.clipping.runs import LEAST, MOST, harm, limits, losses, norms

__all__ = [
    "LEAST",
    "MOST",
    "cliff",
    "common",
    "growth",
    "harm",
    "limits",
    "losses",
    "norm_choice",
    "norms",
]
