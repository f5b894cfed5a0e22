"""Exercises on memory: accumulation, recomputation, shares, few bits, experts, and a clinic."""

from labcore.exercises.topics.memory.accumulation import LOSS_FACTORS
from labcore.exercises.topics.memory.balance import BALANCE
from labcore.exercises.topics.memory.clinic import CLINIC, last_words
from labcore.exercises.topics.memory.groups import PACKED_GROUPS
from labcore.exercises.topics.memory.shares import HELD_BYTES
from labcore.exercises.topics.memory.stretches import STRETCHES

__all__ = [
    "BALANCE",
    "CLINIC",
    "EXERCISES",
    "HELD_BYTES",
    "LOSS_FACTORS",
    "PACKED_GROUPS",
    "STRETCHES",
    "last_words",
]

EXERCISES = (LOSS_FACTORS, STRETCHES, HELD_BYTES, PACKED_GROUPS, BALANCE, CLINIC)
