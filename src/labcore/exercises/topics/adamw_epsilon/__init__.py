"""Exercises on Adam's epsilon: how large, in whose units, in which dtype, and a clinic."""

from labcore.exercises.topics.adamw_epsilon.clinic import CLINIC
from labcore.exercises.topics.adamw_epsilon.half import HALF_STEP
from labcore.exercises.topics.adamw_epsilon.rounding import ROUND_BY_CHANCE
from labcore.exercises.topics.adamw_epsilon.settings import CONVERTED_EPS, LARGEST_EPS

__all__ = [
    "CLINIC",
    "CONVERTED_EPS",
    "EXERCISES",
    "HALF_STEP",
    "LARGEST_EPS",
    "ROUND_BY_CHANCE",
]

EXERCISES = (LARGEST_EPS, CONVERTED_EPS, HALF_STEP, ROUND_BY_CHANCE, CLINIC)
