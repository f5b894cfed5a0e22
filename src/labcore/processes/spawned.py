"""A child process without a fork: a fresh Python whose standard streams are its pipes.

This is for systems other than Linux. Windows has no fork. On macOS, importing numpy may start
threads of Apple's Accelerate, which a forked child would not have. The parent waits on sockets,
because every system can wait on several of them at once; a thread copies the bytes of each pipe.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CHUNK = 1 << 16
LENGTH = struct.Struct(">Q")
IDLE_S = 0.2  # Processes that the child started may keep a pipe open after the child ends.


class _Carrier(threading.Thread):
    """Copy bytes from `read` to `write` until one of them ends, then call each of `close`."""

    def __init__(
        self,
        read: Callable[[int], bytes],
        write: Callable[[bytes], Any],
        close: tuple[Callable[[], Any], ...],
    ) -> None:
        super().__init__(name="labcore-carrier", daemon=True)
        self.read, self.write, self.ends = read, write, close
        self.moving = False
        self.start()

    def run(self) -> None:
        """Copy until one end closes."""
        with suppress(OSError, ValueError):
            while data := self.read(CHUNK):
                self.moving = True
                self.write(data)
                self.moving = False
        self.moving = False
        for close in self.ends:
            with suppress(OSError):
                close()


class Spawned:
    """The part of multiprocessing's Process that labcore uses, with the parent's ends of the pipes.

    requests: the target reads what is sent here. answers: what the target writes. output: what the
    child prints. sentinel: readable once the child has ended and all its output has arrived.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from labcore.processes.spawned import begin; begin()"
        )
        first = pickle.dumps((target, args))
        self._popen = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # The terminal's Ctrl-C reaches only the caller.
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # The same on Windows.
        )
        self.pid = self._popen.pid
        self.requests, inward = socket.socketpair()
        self.answers, outward = socket.socketpair()
        self.output, shown = socket.socketpair()
        self.sentinel, ending = socket.socketpair()
        stdin, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        if stdin is None or stdout is None or stderr is None:
            raise RuntimeError("subprocess.PIPE must give three pipes, got None")

        def send(data: bytes) -> None:
            stdin.write(data)
            stdin.flush()

        begun: list[bytes] = [LENGTH.pack(len(first)) + first]

        def read(size: int) -> bytes:
            return begun.pop() if begun else inward.recv(size)

        _Carrier(read, send, (inward.close, stdin.close))
        carriers = [
            _Carrier(pipe.read1, end.sendall, (end.close, pipe.close))  # type: ignore[attr-defined]
            for pipe, end in ((stdout, outward), (stderr, shown))
        ]

        popen = self._popen

        def watch() -> None:
            popen.wait()
            for carrier in carriers:
                carrier.join(IDLE_S)
                while carrier.moving:
                    carrier.join(IDLE_S)
            ending.close()

        self._watch = threading.Thread(target=watch, name="labcore-watch", daemon=True)
        self._watch.start()
        # finalize runs at exit before the threads are joined; without it, `watch` would never end.
        self._ends = weakref.finalize(self, _end, popen)

    @property
    def exitcode(self) -> int | None:
        """The exit code, minus the signal's number if a signal ended it, or None while it runs."""
        return self._popen.returncode

    def is_alive(self) -> bool:
        """Return whether the child runs or some of its output has yet to arrive."""
        return self._watch.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the child to end, for at most `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)

    def kill(self) -> None:
        """Kill the child."""
        self._popen.kill()

    def close(self) -> None:
        """Release the parent's resources once the child has ended."""
        self._ends.detach()
        for end in (self.requests, self.answers, self.output, self.sentinel):
            end.close()


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def begin() -> None:
    """Run in the child: read the target, call it, and end when the parent does."""
    source, answers = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)  # Printed output must not mix with the answers.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    with open(source, "rb", buffering=0, closefd=False) as raw:
        (length,) = LENGTH.unpack(_exactly(raw.read, LENGTH.size))
        target, args = pickle.loads(_exactly(raw.read, length))
    reader, writer = os.pipe()

    def carry() -> None:
        with suppress(OSError):
            while data := os.read(source, CHUNK):
                while data:
                    data = data[os.write(writer, data) :]
        os._exit(1)  # The parent has ended.

    threading.Thread(target=carry, name="labcore-parent", daemon=True).start()
    with open(reader, "rb", buffering=0) as requests, open(answers, "wb", buffering=0) as sink:
        target(requests, sink, *args)


def _exactly(read: Callable[[int], bytes | None], size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = read(size - len(data))
        if not part:
            os._exit(1)  # The parent has ended.
        data += part
    return data
