"""Exercises on a model of one's own: choose, diagnose, speed up, and a clinic that serves it."""

from labcore.exercises.topics.capstone.blaming import BLAME
from labcore.exercises.topics.capstone.choosing import CHOOSE
from labcore.exercises.topics.capstone.clinic import CLINIC
from labcore.exercises.topics.capstone.drafting import BEST_DRAFT

__all__ = ["BEST_DRAFT", "BLAME", "CHOOSE", "CLINIC", "EXERCISES"]

EXERCISES = (CHOOSE, BLAME, BEST_DRAFT, CLINIC)
