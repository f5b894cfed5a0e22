"""Processes on this machine: gloo process groups, and a worker for untrusted code."""

from labcore.processes.ranks import ProcessesError, rank_and_world, run
from labcore.processes.worker import Worker, WorkerError

__all__ = ["ProcessesError", "Worker", "WorkerError", "rank_and_world", "run"]
