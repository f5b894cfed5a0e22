"""Figures for the chapter `inflight`."""

from labcore.ui.figures.inflight.batches import timeline, two_batches
from labcore.ui.figures.inflight.load import (
    POLICIES,
    ROUTERS,
    TIMES,
    latency_curves,
    replicas,
    simulated_against_measured,
)
from labcore.ui.figures.inflight.step import anatomy, chunk_gaps

__all__ = [
    "POLICIES",
    "ROUTERS",
    "TIMES",
    "anatomy",
    "chunk_gaps",
    "latency_curves",
    "replicas",
    "simulated_against_measured",
    "timeline",
    "two_batches",
]
