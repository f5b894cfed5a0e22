"""Exercises on a port to AMD: a wavefront of 64 lanes, fragments, banks, a tile, a clinic."""

from labcore.exercises.topics.hip.banks import PLACE_TILE
from labcore.exercises.topics.hip.clinic import CLINIC
from labcore.exercises.topics.hip.fragments import HELD
from labcore.exercises.topics.hip.reduction import BROKEN, MEND
from labcore.exercises.topics.hip.tile import CHOOSE_TILE

__all__ = ["BROKEN", "CHOOSE_TILE", "CLINIC", "EXERCISES", "HELD", "MEND", "PLACE_TILE"]

EXERCISES = (MEND, HELD, PLACE_TILE, CHOOSE_TILE, CLINIC)
