"""A communication stream that forks from a CUDA graph's capture, and a rehearsal of it on a CPU."""

from labcore.parallel.forked.capture import capture_overlapped
from labcore.parallel.forked.rehearsal import Rehearsal

__all__ = ["Rehearsal", "capture_overlapped"]
