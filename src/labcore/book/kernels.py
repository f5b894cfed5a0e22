"""Runs the book's notebooks, some at a time, each in a kernel and an empty folder of its own."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

__all__ = ["QUIET", "run", "run_all"]

MOST = 4  # a chapter's kernel takes up to 1 GB
# For a static page. Without the last, Jupyter's debugger warns about frozen modules.
QUIET = {"LABCORE_BOOK": "1", "NO_COLOR": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def run(path: Path, *, seconds: int, threads: int | None = None) -> nbformat.NotebookNode:
    """The notebook at `path` with its outputs. Its file is not changed.

    seconds: the limit of a cell. threads: what torch uses; None: torch's default. Raises nbclient's
    errors for a cell that raises or takes too long, and RuntimeError if the kernel dies.
    """
    notebook = nbformat.read(path, as_version=4)
    few = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as private:
        settings: dict[str, Any] = {"connection_file": str(Path(private) / "kernel.json")}
        if os.name == "posix":
            # Jupyter chooses free TCP ports before the kernel binds them; another program may be
            # faster. Sockets in a private folder have no rival.
            settings["transport"] = "ipc"
        client = NotebookClient(
            notebook,
            timeout=seconds,
            # By default, what comes more than 4 s after its cell ended is lost without an error.
            iopub_timeout=seconds,
            raise_on_iopub_timeout=True,
            record_timing=False,  # with times, jupyter-cache would not recognize the cells
            config=Config({"KernelManager": settings}),
            resources={"metadata": {"path": folder}},
        )
        return asyncio.run(client.async_execute(env={**few, **os.environ, **QUIET}))


def run_all(
    paths: Sequence[Path], *, seconds: int
) -> Iterator[tuple[Path, nbformat.NotebookNode | Exception]]:
    """Each notebook with its outputs, or with the error that `run` raised, as they end."""
    cores = os.cpu_count() or 1
    jobs = max(1, min(MOST, cores, len(paths)))
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(run, path, seconds=seconds, threads=cores // jobs): path for path in paths
        }
        for done in as_completed(running):
            problem = done.exception()
            if problem is not None and not isinstance(problem, Exception):
                raise problem
            yield running[done], problem or done.result()
