"""Figures for the chapter `shuffling`: numbers in, plotly figures out."""

from labcore.ui.figures.shuffling.language import language_damage
from labcore.ui.figures.shuffling.letters import (
    buffer,
    correlations,
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
    "design_effects",
    "effective_rows",
    "flow",
    "language_damage",
    "outcomes",
    "schedules",
    "spikes",
]
