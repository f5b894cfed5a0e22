"""Figures for the chapter `speculative`."""

from labcore.ui.figures.speculative.batches import gain_by_batch, gain_formula
from labcore.ui.figures.speculative.gains import (
    acceptance_by_length,
    costs,
    exactness,
    gate_tradeoff,
    ngram_options,
    opening,
    predictions,
)
from labcore.ui.figures.speculative.guessing import bursts, guessed, guessed_by
from labcore.ui.figures.speculative.walking import Place, WalkStep, most_places, walk, walk_data

__all__ = [
    "Place",
    "WalkStep",
    "acceptance_by_length",
    "bursts",
    "costs",
    "exactness",
    "gain_by_batch",
    "gain_formula",
    "gate_tradeoff",
    "guessed",
    "guessed_by",
    "most_places",
    "ngram_options",
    "opening",
    "predictions",
    "walk",
    "walk_data",
]
