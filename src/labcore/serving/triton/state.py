"""The folder that a running server owns: a lock that ends with its process, and its addresses.

The kernel releases the lock when the process ends, however it ends. The lock therefore
distinguishes a running server from the leftovers of a killed one, and from a later process with
the same id.
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
SOCKETS = "labcore-server-"  # prefix of the sockets' temporary folders
WAIT_S = 1.0  # another process may be checking the lock
# Below Linux's ephemeral ports: no connection gets one before the server has bound it.
FREE = range(20_000, 32_000)


class Claim:
    """Claim `folder` for this process until release() or the end of the process.

    Raises RuntimeError if another server runs from the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / LOCK).open("a+")  # "a": until locked, the content isn't ours
        until = time.monotonic() + WAIT_S
        while not _locked(self._file.fileno(), alone=True):
            if time.monotonic() > until:
                self._file.close()
                pid = (running(folder) or {}).get("pid") or "unknown"  # 0 while it is starting
                raise RuntimeError(
                    f"a server runs from {folder} (process {pid}); stop it first with `python -m "
                    "labcore.serving.triton.server stop`, or choose another folder"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        _remove_left_sockets(_state(folder))

    def write(self, *, model: str, path: Path, addresses: Addresses) -> None:
        """Publish where the server listens."""
        told = {"model": model, "socket": str(path), "addresses": asdict(addresses)}
        partial = self.folder / f"{STATE}.new"
        partial.write_text(json.dumps(told), "utf-8")
        partial.replace(self.folder / STATE)

    def release(self) -> None:
        """Release the folder. Calling it again is harmless."""
        if not self._file.closed:
            (self.folder / STATE).unlink(missing_ok=True)
            self._file.truncate(0)  # the next owner must not be mistaken for this process
            self._file.close()


def running(folder: Path) -> dict[str, Any] | None:
    """Return what is known about the server that runs from `folder`, or None if none runs.

    pid is 0 while the server is claiming the folder. Once it accepts requests, the dict also has
    model, socket and addresses.
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
    """Return the name prefix of the shared memory of `folder`'s server, and its regions."""
    prefix = "labcore_" + hashlib.sha1(os.fsencode(folder.absolute())).hexdigest()[:10]
    return prefix, sorted(SHARED_MEMORY.glob(f"{prefix}*"))


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie doesn't count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return False
    return state[0] not in "ZX"


def with_free_ports(asked: Addresses) -> Addresses:
    """Return the requested ports, with a free port for each 0.

    Raises ValueError if a requested port is in use.
    """
    found: dict[str, int] = {}
    held = []
    try:
        for name in ("http", "grpc", "metrics"):
            port = getattr(asked, name)
            for wanted in [port] if port else random.SystemRandom().sample(FREE, 100):
                probe = socket.socket()
                held.append(probe)  # kept open, or two names could get the same port
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
    import fcntl  # missing on Windows, where no server runs

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
    """Remove the sockets of a server that was killed."""
    folder = Path(str(left.get("socket", ""))).parent
    if folder.name.startswith(SOCKETS) and folder.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(folder, ignore_errors=True)
