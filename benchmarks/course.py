"""The course itself: what it takes to import labcore, to start, and to build the book.

Nothing here has a peer. Starting and building use as many cores as the machine has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner import Measurement, case, seen

ROOT = Path(__file__).resolve().parents[1]
FACES = (
    *("labcore", "labcore.optim", "labcore.norm", "labcore.shuffling", "labcore.clipping"),
    *("labcore.memory", "labcore.attention", "labcore.hip", "labcore.decoding"),
    *("labcore.parallel", "labcore.serving", "labcore.ui"),
)
IMPORT = """import importlib, time, torch
begin = time.perf_counter()
importlib.import_module({name!r})
print(time.perf_counter() - begin)"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """faces: the public modules to import, each `rounds` times. books, starts: how many to time."""

    faces: tuple[str, ...] = FACES
    rounds: int = 5
    books: int = 1
    starts: int = 1


FULL = Sizes()
SMALL = Sizes(faces=("labcore", "labcore.optim"), rounds=1)


@case("import", minutes=2)
def imports(sizes: Sizes = FULL) -> list[Measurement]:
    """The seconds that a module takes to import after torch, each time in a process of its own."""
    found: dict[str, list[float]] = {name: [] for name in sizes.faces}
    for _ in range(sizes.rounds):
        for name, seconds in found.items():
            command = [sys.executable, "-c", IMPORT.format(name=name)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds.append(float(done.stdout))
    return [
        seen(f"import beyond torch's/{name}", "s", seconds, bar=0.3)
        for name, seconds in found.items()
    ]


@contextlib.contextmanager
def _checkout() -> Iterator[Path]:
    """The last commit in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "course"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
        yield place


@case("book", minutes=7)
def book(sizes: Sizes = FULL) -> list[Measurement]:
    """The seconds of a strict build of the last commit's book from nothing."""
    found = []
    for _ in range(sizes.books):
        with _checkout() as place:
            source = {"PYTHONPATH": str(place / "src"), "LABCORE_STRICT_CLAIMS": "1"}
            program = Path(sys.executable).parent / "jupyter-book"
            begin = time.perf_counter()
            subprocess.run(
                [str(program), "build", ".", "-W", "-n", "--keep-going"],
                cwd=place,
                env=os.environ | source,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            found.append(time.perf_counter() - begin)
    return [seen("strict build from nothing", "s", found, threads=os.cpu_count(), bar=360.0)]


def _lacks() -> str:
    missing = [name for name in ("uv", "make") if shutil.which(name) is None]
    return f"{' and '.join(missing)} must be on the path" if missing else ""


@case("start", minutes=4, lacks=_lacks)
def start(sizes: Sizes = FULL) -> list[Measurement]:
    """The seconds from `make course` in a fresh clone to JupyterLab's first answer.

    The packages come from the caches of pip and uv, where those have them.
    """
    found = []
    for _ in range(sizes.starts):
        with _checkout() as place, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            begin = time.perf_counter()
            with subprocess.Popen(
                ["make", "course", f"PORT={port}"],
                cwd=place,
                env=os.environ | {"NO_BROWSER": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as running:
                try:
                    _wait(f"http://127.0.0.1:{port}/api", running)
                    found.append(time.perf_counter() - begin)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGTERM)
    return [seen("make course to JupyterLab", "s", found, threads=os.cpu_count(), bar=90.0)]


def _wait(address: str, running: subprocess.Popen[bytes], seconds: float = 900.0) -> None:
    """Wait until JupyterLab answers. Raises RuntimeError if `make course` ends or is too late."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and running.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab gave no answer at {address}; run make course to see why")
