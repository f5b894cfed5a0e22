"""Provide exercises on tensor parallelism, from collectives to a clinic of hangs."""

from labcore.exercises.topics.tensor_parallel.clinic import CLINIC, recorder
from labcore.exercises.topics.tensor_parallel.fitting import FIT
from labcore.exercises.topics.tensor_parallel.matching import ODD_RANK
from labcore.exercises.topics.tensor_parallel.placing import PLACE
from labcore.exercises.topics.tensor_parallel.ring import RING
from labcore.exercises.topics.tensor_parallel.rows import ROW

__all__ = [
    "CLINIC",
    "EXERCISES",
    "FIT",
    "ODD_RANK",
    "PLACE",
    "RING",
    "ROW",
    "recorder",
]

EXERCISES = (PLACE, RING, ROW, FIT, ODD_RANK, CLINIC)
