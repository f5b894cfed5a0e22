"""Exercises of the lab `shuffling`: buffer, resume, correlated batches, spikes, and a clinic."""

from labcore.exercises.shuffling.buffer import BUFFER
from labcore.exercises.shuffling.clinic import CLINIC
from labcore.exercises.shuffling.correlation import CORRELATION
from labcore.exercises.shuffling.resume import RESUME
from labcore.exercises.shuffling.spikes import SPIKES

__all__ = ["BUFFER", "CLINIC", "CORRELATION", "EXERCISES", "RESUME", "SPIKES"]

EXERCISES = (BUFFER, RESUME, CORRELATION, SPIKES, CLINIC)
