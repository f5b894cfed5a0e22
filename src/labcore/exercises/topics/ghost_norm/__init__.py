"""Exercises on ghost batch normalization: settings, statistics, gradients, and a clinic."""

from labcore.exercises.topics.ghost_norm.backward import BACKWARD
from labcore.exercises.topics.ghost_norm.merged import MERGED
from labcore.exercises.topics.ghost_norm.padded import PADDED_GHOSTS
from labcore.exercises.topics.ghost_norm.patients import CLINIC
from labcore.exercises.topics.ghost_norm.settings import LARGE_BATCH

__all__ = ["BACKWARD", "CLINIC", "EXERCISES", "LARGE_BATCH", "MERGED", "PADDED_GHOSTS"]

EXERCISES = (LARGE_BATCH, PADDED_GHOSTS, MERGED, BACKWARD, CLINIC)
