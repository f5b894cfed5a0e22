"""Figures for the chapter `speculative`."""

from labcore.ui.figures.speculative.gains import (
    acceptance_by_length,
    costs,
    exactness,
    gate_tradeoff,
    ngram_options,
    opening,
    predictions,
    speedup_explorer,
)
from labcore.ui.figures.speculative.walking import Place, WalkStep, most_places, walk, walk_data

__all__ = [
    "Place",
    "WalkStep",
    "acceptance_by_length",
    "costs",
    "exactness",
    "gate_tradeoff",
    "most_places",
    "ngram_options",
    "opening",
    "predictions",
    "speedup_explorer",
    "walk",
    "walk_data",
]
