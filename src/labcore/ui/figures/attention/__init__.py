"""Figures for the chapter `attention`: numbers in, plotly figures out."""

from labcore.ui.figures.attention.blocks import (
    DESIGNER_FORMULA,
    designer,
    grid,
    rescalings,
    tiles,
)
from labcore.ui.figures.attention.measured import memory, rates
from labcore.ui.figures.attention.multiprocessor import FORMS, machine
from labcore.ui.figures.attention.softmax import steps, walk

__all__ = [
    "DESIGNER_FORMULA",
    "FORMS",
    "designer",
    "grid",
    "machine",
    "memory",
    "rates",
    "rescalings",
    "steps",
    "tiles",
    "walk",
]
