"""Exercises on a port to AMD: a mended wavefront, fragments, banks, a tile for CDNA3, a clinic."""

from labcore.exercises.hip.banks import PLACE_TILE
from labcore.exercises.hip.clinic import CLINIC
from labcore.exercises.hip.fragments import HELD
from labcore.exercises.hip.reduction import BROKEN, MEND
from labcore.exercises.hip.tile import CHOOSE_TILE

__all__ = ["BROKEN", "CHOOSE_TILE", "CLINIC", "EXERCISES", "HELD", "MEND", "PLACE_TILE"]

EXERCISES = (MEND, HELD, PLACE_TILE, CHOOSE_TILE, CLINIC)
