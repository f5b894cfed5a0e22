"""Exercises on in-flight batching: admission, blocks, chunks, latencies, timelines, servers."""

from labcore.exercises.inflight.admission import ADMIT
from labcore.exercises.inflight.chunking import CHUNK
from labcore.exercises.inflight.clinic import CLINIC, report
from labcore.exercises.inflight.freeing import CANCEL
from labcore.exercises.inflight.latency import LATENCY
from labcore.exercises.inflight.timelines import POLICY

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
