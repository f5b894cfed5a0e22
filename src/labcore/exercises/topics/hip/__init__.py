"""Exercises on a port to AMD: wavefronts, fragments, banks, a tile, any width, a clinic."""

from labcore.exercises.topics.hip.banks import PLACE_TILE
from labcore.exercises.topics.hip.clinic import CLINIC
from labcore.exercises.topics.hip.fragments import HELD
from labcore.exercises.topics.hip.reduction import BROKEN, MEND
from labcore.exercises.topics.hip.tile import CHOOSE_TILE
from labcore.exercises.topics.hip.width import WARPS, WIDEN, run_shares

__all__ = [
    "BROKEN",
    "CHOOSE_TILE",
    "CLINIC",
    "EXERCISES",
    "HELD",
    "MEND",
    "PLACE_TILE",
    "WARPS",
    "WIDEN",
    "run_shares",
]

EXERCISES = (MEND, HELD, PLACE_TILE, CHOOSE_TILE, WIDEN, CLINIC)
