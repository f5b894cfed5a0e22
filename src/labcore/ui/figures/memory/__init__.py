"""Figures for the chapter `memory`."""

from labcore.ui.figures.memory.calculator import (
    CAPACITIES,
    CHECKPOINTING,
    COLORS,
    MODELS,
    MOMENTS_FORMULA,
    OPTIMIZERS,
    STAGES_FORMULA,
    moments,
    stacks,
    stages,
)
from labcore.ui.figures.memory.measured import stretches, timeline
from labcore.ui.figures.memory.tables import compared, price, summary

__all__ = [
    "CAPACITIES",
    "CHECKPOINTING",
    "COLORS",
    "MODELS",
    "MOMENTS_FORMULA",
    "OPTIMIZERS",
    "STAGES_FORMULA",
    "compared",
    "moments",
    "price",
    "stacks",
    "stages",
    "stretches",
    "summary",
    "timeline",
]
