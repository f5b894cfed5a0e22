"""Exercises of the lab `lion`: a dead zone, settings, drift, the stall in bf16, and a clinic."""

from labcore.exercises.topics.lion.patients import CLINIC
from labcore.exercises.topics.lion.settings import TRANSFER
from labcore.exercises.topics.lion.step import MASKED_STEP
from labcore.exercises.topics.lion.weights import DRIFT, STALL

__all__ = ["CLINIC", "DRIFT", "EXERCISES", "MASKED_STEP", "STALL", "TRANSFER"]

EXERCISES = (MASKED_STEP, TRANSFER, DRIFT, STALL, CLINIC)
