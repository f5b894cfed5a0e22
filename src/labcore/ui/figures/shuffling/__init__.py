"""Figures for the chapter `shuffling`: numbers in, plotly figures out."""

from labcore.ui.figures.shuffling.language import language_losses
from labcore.ui.figures.shuffling.letters import (
    buffer,
    correlations,
    damage,
    design_effects,
    effective_rows,
    outcomes,
    schedules,
    spikes,
)
from labcore.ui.figures.shuffling.mixing import flow

__all__ = [
    "buffer",
    "correlations",
    "damage",
    "design_effects",
    "effective_rows",
    "flow",
    "language_losses",
    "outcomes",
    "schedules",
    "spikes",
]
