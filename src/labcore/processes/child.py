"""One child process: started by a fork server, its output read, dead whenever its parent is.

A fork server that has loaded torch starts a child in about 0.03 s, as fast as a plain fork and
a hundred times faster than a fresh Python; unlike a fork of the caller, which may run threads or
hold a CUDA context, it is safe.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

# labcore itself stays out: asking for a GPU in the fork server would spoil CUDA in its children.
PRELOAD = ["torch", "torch.distributed", "numpy", "cloudpickle"]
CHUNK = 1 << 16
FINAL = 1 << 24  # What a child started may go on printing after the child's end.
PR_SET_PDEATHSIG = 1


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(
            f"labcore.processes needs Linux or macOS, got {sys.platform}; on Windows use WSL"
        )
    current = multiprocessing.current_process()
    if current.daemon:
        raise RuntimeError(
            "a process started by labcore.processes cannot start more; call from its parent"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


_starting = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the file of __main__, which multiprocessing would run again in every child.

    Functions travel by value, so nobody needs it there; a script needs no guard, and one that
    came by standard input has no file to run.
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


class Stream:
    """The parent's end of a pipe, read without ever waiting. `closed` after its end."""

    def __init__(self, end: Connection) -> None:
        self.end = end
        self.closed = False
        os.set_blocking(end.fileno(), False)

    def fileno(self) -> int:
        """The descriptor, for waiting on."""
        return self.end.fileno()

    def read(self, limit: int = CHUNK) -> bytes:
        """At most `limit` bytes that are there now; sets `closed` at the end."""
        if self.closed:
            return b""
        try:
            data = os.read(self.end.fileno(), limit)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.closed = not data
        return data

    def read_all(self, limit: int = sys.maxsize) -> bytes:
        """Everything that is there now, to about `limit` bytes."""
        data = bytearray()
        while len(data) < limit and (part := self.read()):
            data += part
        return bytes(data)


class Lines:
    """Shows a child's output line by line behind a label, in the parent's sys.stdout."""

    def __init__(self, stream: Stream, label: str, limit: int | None = None) -> None:
        self.stream = stream
        self.label = label
        self.room = limit
        self.rest = b""
        self.last: list[str] = []

    def show(self, *, final: bool = False) -> None:
        """Show the whole lines that came; with `final` also a last line without an end."""
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
    """A running child: `process`, the `output` it prints, and whatever pipes its target was given.

    target: called in the child as target(*ends, *args) after its output was joined to the pipe.
    ends: pipe ends of the child, closed here once it runs.
    """

    def __init__(
        self,
        target: Callable[..., None],
        ends: tuple[Connection, ...],
        args: tuple[Any, ...],
        *,
        label: str,
        output_limit: int | None = None,
    ) -> None:
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        self.output = Lines(Stream(reader), label, output_limit)
        self.process: BaseProcess = context.Process(
            target=target, args=(*ends, *args, writer, dict(os.environ)), daemon=True
        )
        try:
            with _without_main():
                self.process.start()
        except BaseException:
            if self.process.pid is not None:
                self.kill()
            reader.close()
            raise
        finally:
            for end in (*ends, writer):
                end.close()

    def kill(self) -> None:
        """End the child and what it started, and wait until it is gone."""
        if self.process.is_alive():
            pid = self.process.pid
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Kill it, show the rest of its output, give back what it held."""
        self.kill()
        self.output.show(final=True)
        self.output.stream.end.close()
        self.process.close()


def pipe() -> tuple[Connection, Connection]:
    """(the reading end, the writing end) of a new pipe."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    return reader, writer


def how_it_ended(code: int | None) -> str:
    """An exit code in words: "was killed by SIGKILL", "ended with exit code 3"."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = "; the system does that where memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


def _end_with_parent() -> None:
    """Let this process end when its parent does, however that happens."""
    if sys.platform == "linux":
        # Reaches a process that never comes back to Python; the parent is the fork server, which
        # ends when the caller does.
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
    """Close every descriptor but 0 to 2, those given and the watch on the parent.

    Through the others a child could confuse the fork server and end its siblings.
    """
    parent = multiprocessing.parent_process()
    keep = {0, 1, 2, *kept, *([] if parent is None else [parent.sentinel])}
    for name in os.listdir("/dev/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def settle_in(output: Connection, environment: dict[str, str]) -> None:
    """The first steps of a child: its own group, the caller's environment, one thread."""
    os.setsid()  # The terminal's Ctrl-C goes to the caller alone, which ends its children.
    _end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
