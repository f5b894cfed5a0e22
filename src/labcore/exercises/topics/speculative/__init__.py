"""Exercises on speculative decoding: acceptance, residual, rollback, length, and a clinic."""

from labcore.exercises.topics.speculative.acceptance import COUNT_ACCEPTED
from labcore.exercises.topics.speculative.clinic import CLINIC, audit
from labcore.exercises.topics.speculative.length import BEST_LENGTH
from labcore.exercises.topics.speculative.residual import NEXT_LAW
from labcore.exercises.topics.speculative.rollback import AFTER_BLOCK

__all__ = [
    "AFTER_BLOCK",
    "BEST_LENGTH",
    "CLINIC",
    "COUNT_ACCEPTED",
    "EXERCISES",
    "NEXT_LAW",
    "audit",
]

EXERCISES = (COUNT_ACCEPTED, NEXT_LAW, AFTER_BLOCK, BEST_LENGTH, CLINIC)
