"""Exercises on in-flight batching, from admission to a clinic of servers."""

from labcore.exercises.topics.inflight.admission import ADMIT
from labcore.exercises.topics.inflight.chunking import CHUNK
from labcore.exercises.topics.inflight.clinic import CLINIC, report
from labcore.exercises.topics.inflight.freeing import CANCEL
from labcore.exercises.topics.inflight.latency import LATENCY
from labcore.exercises.topics.inflight.timelines import POLICY

__all__ = [
    "ADMIT",
    "CANCEL",
    "CHUNK",
    "CLINIC",
    "EXERCISES",
    "LATENCY",
    "POLICY",
    "report",
]

EXERCISES = (ADMIT, CANCEL, CHUNK, LATENCY, POLICY, CLINIC)
