"""Exercises of the lab `clipping`: shards, a limit by history, loss scaling, and a clinic."""

from labcore.exercises.topics.clipping.clinic import CLINIC
from labcore.exercises.topics.clipping.history import HISTORY
from labcore.exercises.topics.clipping.scaling import SCALING
from labcore.exercises.topics.clipping.shards import SHARDS

__all__ = ["CLINIC", "EXERCISES", "HISTORY", "SCALING", "SHARDS"]

EXERCISES = (SHARDS, HISTORY, SCALING, CLINIC)
