"""Figures for the chapter `memory`."""

from labcore.ui.figures.memory.cache import HEADS, MEMORIES, REQUESTS_FORMULA, SERVED, requests
from labcore.ui.figures.memory.calculator import STAGES_FORMULA, stacks, stages
from labcore.ui.figures.memory.choices import (
    CAPACITIES,
    CARDS,
    CHECKPOINTING,
    COLORS,
    MODELS,
    OPTIMIZERS,
)
from labcore.ui.figures.memory.costs import compared, price, summary
from labcore.ui.figures.memory.filmed import FILM_FORMULA, film
from labcore.ui.figures.memory.measured import stretches, timeline

__all__ = [
    "CAPACITIES",
    "CARDS",
    "CHECKPOINTING",
    "COLORS",
    "FILM_FORMULA",
    "HEADS",
    "MEMORIES",
    "MODELS",
    "OPTIMIZERS",
    "REQUESTS_FORMULA",
    "SERVED",
    "STAGES_FORMULA",
    "compared",
    "film",
    "price",
    "requests",
    "stacks",
    "stages",
    "stretches",
    "summary",
    "timeline",
]
