"""A child process whose output the parent reads, and which never outlives the parent.

On Linux, a fork server that has already loaded torch starts the child in about 0.03 s. That is as
fast as a plain fork and a hundred times faster than a fresh Python. Forking the caller itself would
be unsafe, because it may run threads or hold a CUDA context. On other systems the child is a fresh
Python; see `spawned`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from labcore.processes.spawned import IDLE_S, Spawned

FRESH = sys.platform != "linux"
# Don't preload labcore: looking for a GPU in the fork server breaks CUDA in its children.
PRELOAD = ["torch", "torch.distributed", "numpy", "cloudpickle"]
CHUNK = 1 << 16
FINAL = 1 << 24  # A limit, because processes that a child started may print after it ends.
SHOW_S = 2.0
PR_SET_PDEATHSIG = 1


def _context() -> Any:
    current = multiprocessing.current_process()
    if current.daemon:
        raise RuntimeError(
            "a process started by labcore.processes cannot start others; call this in its parent"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


_starting = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the file of __main__, which multiprocessing would otherwise run again in every child.

    Functions are pickled by value, so children don't need it. Scripts then work without a
    `__name__` guard, and so does a script read from standard input, which has no file to run.
    """
    names = vars(sys.modules["__main__"])
    with _starting:
        kept: dict[str, Any] = {
            name: names[name] for name in ("__spec__", "__file__") if name in names
        }
        names.pop("__file__", None)
        names["__spec__"] = None
        try:
            yield
        finally:
            names.update(kept)


def without_waiting(end: Connection | socket.socket) -> None:
    """Make reads and writes on `end` non-blocking."""
    if isinstance(end, socket.socket):
        end.setblocking(False)
    else:
        os.set_blocking(end.fileno(), False)


def send(end: Connection | socket.socket, data: memoryview) -> int:
    """Write to `end` and return the bytes written. Raises BlockingIOError if there is no room."""
    return end.send(data) if isinstance(end, socket.socket) else os.write(end.fileno(), data)


def listen(sources: Iterable[Any], seconds: float, writing: Any = None) -> bool:
    """Wait until a source is readable or `writing` has room. Return False after a timeout."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        if writing is not None:
            selector.register(writing, selectors.EVENT_WRITE)
        return bool(selector.select(max(0.0, seconds)))


class Stream:
    """The parent's end of a pipe, for non-blocking reads. `closed` is set at end of file."""

    def __init__(self, end: Connection | socket.socket) -> None:
        self.end = end
        self.closed = False
        without_waiting(end)

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self.end.fileno()

    def read(self, limit: int = CHUNK) -> bytes:
        """Read up to `limit` bytes that are available now. Set `closed` at end of file."""
        if self.closed:
            return b""
        try:
            if isinstance(self.end, socket.socket):
                data = self.end.recv(limit)
            else:
                data = os.read(self.end.fileno(), limit)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.closed = not data
        return data

    def read_all(self, limit: int = sys.maxsize) -> bytes:
        """Read everything that is available now, up to about `limit` bytes."""
        data = bytearray()
        while len(data) < limit and (part := self.read()):
            data += part
        return bytes(data)


class Lines:
    """Print a child's output to the parent's sys.stdout, with a label before each line."""

    def __init__(self, stream: Stream, label: str, limit: int | None = None) -> None:
        self.stream = stream
        self.label = label
        self.room = limit
        self.rest = b""
        self.last: list[str] = []

    def show(self, *, final: bool = False) -> None:
        """Print the complete lines received so far; with `final`, also an unfinished last line."""
        data = self.stream.read_all(FINAL) if final else self.stream.read()
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (final or len(self.rest) > CHUNK):
            whole.append(self.rest)
            self.rest = b""
        for line in whole:
            if self.room is not None:
                if self.room <= 0:
                    continue
                line, self.room = line[: self.room], self.room - len(line) - 1
                if self.room <= 0:
                    line += b" [the rest of the output is left out]"
            text = line.decode("utf-8", "replace")
            self.last = [*self.last[-19:], text]
            sys.stdout.write(f"{self.label} {text}\n")


class Child:
    """A running child, the pipes to and from it, and the `output` that it prints.

    target: called in the child as target(requests, answers, *args), with the child's ends of the
    pipes. It reads what the parent writes to `requests`, and the parent reads from `answers` what
    it writes.
    """

    process: BaseProcess | Spawned
    requests: Connection | socket.socket

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        *,
        label: str,
        output_limit: int | None = None,
    ) -> None:
        if FRESH:
            spawned = Spawned(target, args)
            self.process, self.requests = spawned, spawned.requests
            answers: Connection | socket.socket = spawned.answers
            output: Connection | socket.socket = spawned.output
        else:
            self.process, self.requests, answers, output = _forked(target, args)
        without_waiting(self.requests)
        self.answers = Stream(answers)
        self.output = Lines(Stream(output), label, output_limit)

    def show(self) -> None:
        """Print what the child printed before its last answer."""
        stream = self.output.stream
        until = time.monotonic() + SHOW_S
        self.output.show()
        # A fresh child's output and answers pass through different threads: wait for silence.
        while FRESH and not stream.closed and time.monotonic() < until and listen([stream], IDLE_S):
            self.output.show()

    def kill(self) -> None:
        """Kill the child and the processes it started, and wait until it is gone."""
        if self.process.is_alive():
            pid = self.process.pid
            if pid is not None and hasattr(os, "killpg"):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Kill the child, print the rest of its output, and release its resources."""
        self.kill()
        self.output.show(final=True)
        for end in (self.requests, self.answers.end, self.output.stream.end):
            end.close()
        self.process.close()


def _forked(
    target: Callable[..., None], args: tuple[Any, ...]
) -> tuple[BaseProcess, Connection, Connection, Connection]:
    """Start a child of the fork server. Return it and the pipes for requests, answers, output."""
    context = _context()
    source, requests = context.Pipe(duplex=False)
    answers, answer = context.Pipe(duplex=False)
    output, printed = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(
        target=_begin, args=(target, source, answer, printed, dict(os.environ), args), daemon=True
    )
    try:
        with _without_main():
            process.start()
    except BaseException:
        if process.pid is not None:
            process.kill()
            process.join()
        for end in (requests, answers, output):
            end.close()
        raise
    finally:
        for end in (source, answer, printed):
            end.close()
    return process, requests, answers, output


def how_it_ended(code: int | None) -> str:
    """Describe an exit code: "was killed by SIGKILL", "ended with exit code 3"."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


def _end_with_parent() -> None:
    """Make this process end when its parent does, however that happens."""
    if sys.platform == "linux":
        # This also kills a process that never returns to Python. The parent is the fork server,
        # which ends when the caller does.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="labcore-parent", daemon=True).start()


def close_others(*kept: int) -> None:
    """Close every descriptor except 0 to 2, those in `kept`, and the watch on the parent.

    Through the others, a child could confuse the fork server and end its siblings.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    keep = {0, 1, 2, *kept, parent.sentinel}
    for name in os.listdir("/dev/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def _begin(
    target: Callable[..., None],
    requests: Connection,
    answers: Connection,
    output: Connection,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    """Set up a forked child's session, environment and output, and call `target`."""
    os.setsid()  # The terminal's Ctrl-C reaches only the caller, which then ends its children.
    _end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    target(requests, answers, *args)
