"""What the server needs of a Linux machine: a folder for itself, free ports, ties to its parent."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from labcore.serving.triton.client import Addresses

STATE = "server.json"
PORTS = ("http", "grpc", "metrics")
FREE = range(20_000, 32_000)  # below Linux's ephemeral ports: no connection gets one meanwhile
# Asks the kernel to kill this process when its parent dies, then becomes another program.
TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
sys.exit(1) if os.getppid() != int(sys.argv[1]) else os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` in a process that never outlives this one."""
    return [sys.executable, "-S", "-c", TIED, str(os.getpid()), *command]


def hold(folder: Path, addresses: Addresses) -> IO[str]:
    """Return a locked file that says which process holds a folder, and where its server listens.

    The lock ends when the file is closed or this process dies. Raises RuntimeError if another
    server holds the folder.
    """
    import fcntl  # not on Windows

    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / STATE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RuntimeError(
            f"a server runs from {folder}; stop it first with `python -m "
            "labcore.serving.triton.server stop`, or choose another folder"
        ) from None
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), **asdict(addresses)}))
    file.flush()
    return file


def running(folder: Path) -> tuple[int, Addresses] | None:
    """Return what `hold` has written for the server that runs from `folder`; None without one."""
    with suppress(OSError, ValueError), (folder / STATE).open() as file:
        import fcntl  # not on Windows

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # its process lives
            told = json.load(file)
            return told.pop("pid"), Addresses(**told)
    return None


def with_free_ports(asked: Addresses) -> Addresses:
    """Return the requested ports, with a free port for each 0; ValueError if one is in use."""
    found: dict[str, int] = {}
    with ExitStack() as opened:  # kept open, or two names could get the same port
        for name in PORTS:
            port = getattr(asked, name)
            for wanted in [port] if port else random.SystemRandom().sample(FREE, 100):
                with suppress(OSError, OverflowError):
                    opened.enter_context(socket.create_server((asked.host, wanted)))
                    found[name] = wanted
                    break
            else:
                raise ValueError(
                    f"{name} port {port} of {asked.host} must be free; choose another, or 0 for any"
                )
    return Addresses(host=asked.host, **found)


def command(pid: int) -> str:
    """Return the command line of process `pid`; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    return ""


def child(pid: int, name: str) -> int | None:
    """Return the process id of a child of process `pid` with `name` in its command line, or None.

    It may miss one: a thread that ends leaves its children to another thread, perhaps to one that
    was looked at before.
    """
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for number in map(int, task.read_text().split()):
                if name in command(number):
                    return number
    return None


def region_prefix(folder: Path) -> str:
    """Return the prefix of the names of the shared memory that a folder's server has."""
    return "labcore_" + hashlib.sha1(os.fsencode(folder.absolute())).hexdigest()[:10]


def regions(folder: Path) -> list[Path]:
    """Return the shared memory that a folder's server has, or left behind when it was killed."""
    return sorted(Path("/dev/shm").glob(f"{region_prefix(folder)}*"))
