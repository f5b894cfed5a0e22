"""Figures for the chapter `memory`."""

from labcore.ui.figures.memory.cache import HEADS, MEMORIES, REQUESTS_FORMULA, requests
from labcore.ui.figures.memory.calculator import STAGES_FORMULA, stacks, stages
from labcore.ui.figures.memory.choices import (
    CAPACITIES,
    CARDS,
    CHECKPOINTING,
    COLORS,
    MODELS,
    OPTIMIZERS,
    SERVED,
)
from labcore.ui.figures.memory.costs import compared, summary
from labcore.ui.figures.memory.filmed import FILM_FORMULA, film
from labcore.ui.figures.memory.measured import stretches, timeline
from labcore.ui.figures.memory.stacking import ADAPTERS, LEVERS_FORMULA, PRECISIONS, WAYS, levers

__all__ = [
    "ADAPTERS",
    "CAPACITIES",
    "CARDS",
    "CHECKPOINTING",
    "COLORS",
    "FILM_FORMULA",
    "HEADS",
    "LEVERS_FORMULA",
    "MEMORIES",
    "MODELS",
    "OPTIMIZERS",
    "PRECISIONS",
    "REQUESTS_FORMULA",
    "SERVED",
    "STAGES_FORMULA",
    "WAYS",
    "compared",
    "film",
    "levers",
    "requests",
    "stacks",
    "stages",
    "stretches",
    "summary",
    "timeline",
]
