"""Exercises of the lab `shuffling`: buffer, resume, correlated batches, spikes, and a clinic."""

from labcore.exercises.topics.shuffling.buffer import BUFFER
from labcore.exercises.topics.shuffling.clinic import CLINIC
from labcore.exercises.topics.shuffling.correlation import CORRELATION
from labcore.exercises.topics.shuffling.resume import RESUME
from labcore.exercises.topics.shuffling.spikes import SPIKES

__all__ = ["BUFFER", "CLINIC", "CORRELATION", "EXERCISES", "RESUME", "SPIKES"]

EXERCISES = (BUFFER, RESUME, CORRELATION, SPIKES, CLINIC)
