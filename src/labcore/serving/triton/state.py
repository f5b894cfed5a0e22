"""The folder that a running server owns: a lock that ends with its process, and where it listens.

The kernel gives the lock back when the process ends, however it ends: what a killed server left is
told from a server that runs, and a process that got the same number later is not taken for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labcore.serving.triton.client import Addresses

__all__ = ["SHARED_MEMORY", "SOCKETS", "Claim", "alive", "regions", "running", "with_free_ports"]

SHARED_MEMORY = Path("/dev/shm")

STATE = "server.json"
LOCK = "server.lock"
SOCKETS = "labcore-server-"  # how the folders of sockets begin, in the system's folder for such
WAIT_S = 1.0  # somebody may be looking at the lock
# Below what Linux gives to connections: nobody else gets one before the server has bound it.
FREE = range(20_000, 32_000)


class Claim:
    """`folder` belongs to this process from now on, until release() or its end.

    Raises RuntimeError where another server runs from the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / LOCK).open("a+")  # "a": what stands in it is another's until then
        until = time.monotonic() + WAIT_S
        while not _locked(self._file.fileno(), alone=True):
            if time.monotonic() > until:
                self._file.close()
                pid = (running(folder) or {}).get("pid") or "unknown"  # 0 of one that starts
                raise RuntimeError(
                    f"a server runs from {folder} (process {pid}); stop it first, with `python -m "
                    "labcore.serving.triton.server stop`, or choose another folder"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        _remove_left_sockets(_state(folder))

    def write(self, *, model: str, path: Path, addresses: Addresses) -> None:
        """Tell others where the server listens."""
        told = {"model": model, "socket": str(path), "addresses": asdict(addresses)}
        partial = self.folder / f"{STATE}.new"
        partial.write_text(json.dumps(told), "utf-8")
        partial.replace(self.folder / STATE)

    def release(self) -> None:
        """Give the folder back; harmless when done before."""
        if not self._file.closed:
            (self.folder / STATE).unlink(missing_ok=True)
            self._file.truncate(0)  # The next one must not be taken for this process.
            self._file.close()


def running(folder: Path) -> dict[str, Any] | None:
    """What is known of the server that runs from `folder`: pid, 0 while it is taking the folder,
    and once it takes requests model, socket and addresses. None where none runs.
    """
    try:
        with (folder / LOCK).open() as file:
            if _locked(file.fileno(), alone=False):
                return None
            pid = int(file.read() or 0)
    except (FileNotFoundError, ValueError):
        return None
    return {**_state(folder), "pid": pid}


def regions(folder: Path) -> tuple[str, list[Path]]:
    """(how the shared memory of the server that runs from `folder` begins, what there is of it)."""
    prefix = "labcore_" + hashlib.sha1(os.fsencode(folder.absolute())).hexdigest()[:10]
    return prefix, sorted(SHARED_MEMORY.glob(f"{prefix}*"))


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return False
    return state[0] not in "ZX"


def with_free_ports(asked: Addresses) -> Addresses:
    """The ports that were asked for, a free one for each 0. Raises ValueError for one in use."""
    found: dict[str, int] = {}
    held = []
    try:
        for name in ("http", "grpc", "metrics"):
            port = getattr(asked, name)
            for wanted in [port] if port else random.SystemRandom().sample(FREE, 100):
                probe = socket.socket()
                held.append(probe)  # Together, or two of them could get the same.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((asked.host, wanted))
                except (OSError, OverflowError) as error:
                    trouble = error
                    continue
                found[name] = wanted
                break
            else:
                raise ValueError(
                    f"{name} port {port} of {asked.host} must be free, got: {trouble}; choose "
                    "another, or 0 for any"
                )
    finally:
        for probe in held:
            probe.close()
    return Addresses(host=asked.host, **found)


def _locked(file: int, *, alone: bool) -> bool:
    import fcntl  # not on Windows, where no server runs

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _state(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        told = json.loads((folder / STATE).read_text("utf-8"))
        if isinstance(told, dict) and {"model", "socket", "addresses"} <= told.keys():
            return told
    return {}


def _remove_left_sockets(left: dict[str, Any]) -> None:
    """Of a server that was killed."""
    folder = Path(str(left.get("socket", ""))).parent
    if folder.name.startswith(SOCKETS) and folder.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(folder, ignore_errors=True)
