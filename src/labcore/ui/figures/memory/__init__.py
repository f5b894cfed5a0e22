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
from labcore.ui.figures.memory.measured import modules, prices, stretches, timeline

__all__ = [
    "CAPACITIES",
    "CHECKPOINTING",
    "COLORS",
    "MODELS",
    "MOMENTS_FORMULA",
    "OPTIMIZERS",
    "STAGES_FORMULA",
    "modules",
    "moments",
    "prices",
    "stacks",
    "stages",
    "stretches",
    "timeline",
]
