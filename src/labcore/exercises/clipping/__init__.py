"""Exercises of the lab `clipping`: shards, a limit by history, loss scaling, and a clinic."""

from labcore.exercises.clipping.clinic import CLINIC
from labcore.exercises.clipping.history import HISTORY
from labcore.exercises.clipping.scaling import SCALING
from labcore.exercises.clipping.shards import SHARDS

__all__ = ["CLINIC", "EXERCISES", "HISTORY", "SCALING", "SHARDS"]

EXERCISES = (SHARDS, HISTORY, SCALING, CLINIC)
