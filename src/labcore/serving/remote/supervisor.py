"""Keeps processes alive: starts them in order, looks at them often, starts again what died.

A part is restarted when its process ends, when it says that it lost something it cannot mend
(`broken`), and when it was silent, neither healthy nor broken, for longer than its patience. One
thread does all of it, and asks the parts one after the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from labcore.checks import positive, positive_int

__all__ = ["Part", "Supervisor", "SupervisorError"]

LOOK_S = 0.1  # between two looks at the parts
# Becomes the program that it is told and asks the kernel to end it when this process is gone: a
# supervisor that is killed leaves no server behind. It runs alone in its thread: no fork hook.
TIED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "sys.exit(1) if os.getppid() != int(sys.argv[1]) else os.execv(sys.argv[2], sys.argv[2:])\n"
)


class SupervisorError(RuntimeError):
    """A part did not become healthy, or died again and again; the message ends with its log."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process to keep alive.

    command: the program's full path and arguments. log: its output is appended there.
    healthy: asked from the supervisor's thread, answers within a second or so.
    broken: why it must be restarted at once, "" if it need not.
    patience: seconds from a start to healthy. silence: seconds that it may be unhealthy later.
    spare: keep a second process, started with `--spare`, that loads its modules, writes a line to
    its standard input, which is a socket, and waits for a line there before it begins; it takes
    over where the first one dies. attached: the process ends by itself when its standard input
    closes. clean: called behind each end of the process, before the next start.
    """

    name: str
    command: Sequence[str]
    log: Path
    healthy: Callable[[], bool]
    broken: Callable[[], str] = str
    environment: Mapping[str, str] | None = None
    patience: float = 60.0
    silence: float = 10.0
    spare: bool = False
    attached: bool = False
    clean: Callable[[], None] = lambda: None


class _Process:
    """A running program, and our end of its standard input where it has one."""

    def __init__(self, part: Part, *more: str) -> None:
        part.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*part.command, *more]
        if sys.platform == "linux":
            command = [sys.executable, "-S", "-c", TIED, str(os.getpid()), *command]
        self._control: socket.socket | None = None
        theirs: socket.socket | int = subprocess.DEVNULL
        if part.attached or part.spare:
            self._control, theirs = socket.socketpair()
            self._control.setblocking(False)
        try:
            with part.log.open("ab") as log:
                self._popen = subprocess.Popen(
                    command,
                    stdin=theirs if isinstance(theirs, int) else theirs.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if part.environment is None else dict(part.environment),
                    start_new_session=True,  # The terminal's Ctrl-C goes to the supervisor alone.
                )
        except OSError:
            if self._control is not None:
                self._control.close()
            raise
        finally:
            if not isinstance(theirs, int):
                theirs.close()
        self._said_ready = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._popen.poll()

    def ready(self) -> bool:
        """Whether a spare has loaded its modules."""
        if not self._said_ready and self._control is not None:
            with suppress(OSError):
                self._said_ready = bool(self._control.recv(64))
        return self._said_ready

    def begin(self) -> bool:
        """Tell a spare to begin; False where it is dead."""
        if self.code() is not None or self._control is None:
            return False
        try:
            self._control.sendall(b"begin\n")
        except OSError:
            return False
        return True

    def end(self, *, gently: bool, attached: bool = False) -> None:
        """End it and all that it started, and wait until it is gone."""
        if self._control is not None:
            self._control.close()
        if gently and self.code() is None:
            if not attached:
                self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(5.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # Its group outlives it where children are left.
        self._popen.wait()


@dataclass
class _State:
    process: _Process | None = None
    spare: _Process | None = None
    started: float = 0.0
    seen: float = 0.0  # when it was last healthy; 0 before the first time of this process
    starts: deque[float] = field(default_factory=deque)
    count: int = 0
    vain: int = 0  # starts since it was last healthy
    spares: int = 0  # started since the last start of the part itself
    why: str = ""


class Supervisor:
    """Keeps `parts` alive from start() to stop().

    most, within: a part that had to be started `most` times within `within` seconds is given up,
    and so is one that was started `vain` times in a row and was never healthy: `failure` says why,
    and everything is stopped.
    """

    def __init__(
        self, parts: Sequence[Part], *, most: int = 10, within: float = 60.0, vain: int = 5
    ) -> None:
        self.parts = tuple(parts)
        self.most = positive_int("most", most)
        self.vain = positive_int("vain", vain)
        self.within = positive("within", within)
        self.failure = ""
        self._failed: Part | None = None
        self._states = {part.name: _State() for part in self.parts}
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._healthy_looks = 0
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)

    def start(self, timeout: float = 60.0) -> Supervisor:
        """Start everything and return once it is healthy. Raises SupervisorError."""
        self._thread.start()
        try:
            self.wait_healthy(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_healthy(self, timeout: float = 60.0) -> None:
        """Return once every part was seen healthy after this call. Raises SupervisorError."""
        positive("timeout", timeout)
        with self._changed:
            fresh = self._healthy_looks + 2  # The next to end may have begun before the call.

            def done() -> bool:
                return self._healthy_looks >= fresh or bool(self.failure)

            if self._changed.wait_for(done, timeout) and not self.failure:
                return
        if self.failure:
            raise SupervisorError(self.report())
        lacking = [part for part in self.parts if not self._states[part.name].seen] or self.parts
        reason = f"{lacking[0].name} was not healthy within {timeout} s"
        raise SupervisorError(f"{reason}; its log ends:\n{_tail(lacking[0].log)}")

    def report(self) -> str:
        """The failure with the end of the log of the part that was given up; "" without one."""
        if self._failed is None:
            return self.failure
        return f"{self.failure}; its log ends:\n{_tail(self._failed.log)}"

    def stop(self) -> None:
        """End every part, the last one first; harmless when done before."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def pid(self, name: str) -> int | None:
        """The process of a part, None where none runs now."""
        process = self._states[name].process
        return process.pid if process is not None and process.code() is None else None

    def spare_ready(self, name: str) -> bool:
        """Whether a part's spare has loaded its modules and can take over at once."""
        spare = self._states[name].spare
        return spare is not None and spare.ready()

    def spare_pid(self, name: str) -> int | None:
        """The process of a part's spare, None where there is none now."""
        spare = self._states[name].spare
        return spare.pid if spare is not None and spare.code() is None else None

    def restarts(self) -> dict[str, int]:
        """How often each part was started again."""
        return {name: max(state.count - 1, 0) for name, state in self._states.items()}

    def reasons(self) -> dict[str, str]:
        """Why each part was started again the last time, "" if it was not."""
        return {name: state.why for name, state in self._states.items()}

    def __enter__(self) -> Supervisor:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def _keep(self) -> None:
        try:
            while not self._ending.is_set() and not self.failure:
                looks = [self._look(part) for part in self.parts]
                with self._changed:
                    self._healthy_looks += all(looks)
                    self._changed.notify_all()
                if all(looks):
                    self._start_spares()
                self._ending.wait(LOOK_S)
        except Exception as error:
            self.failure = f"the supervisor failed: {type(error).__name__}: {error}"
        finally:
            for part in reversed(self.parts):
                state = self._states[part.name]
                if state.spare is not None:
                    state.spare.end(gently=False)
                if state.process is not None:
                    state.process.end(gently=True, attached=part.attached)
                try:
                    part.clean()
                except Exception as error:  # The other parts are to be ended all the same.
                    self.failure = self.failure or f"{part.name} was not cleaned up: {error}"
            with self._changed:
                self._changed.notify_all()

    def _look(self, part: Part) -> bool:
        """Whether a part is healthy; starts it where it is not to be saved."""
        state = self._states[part.name]
        why = self._trouble(part, state)
        if why == "healthy":
            return True
        if why:
            if state.process is not None:
                state.why = why
                state.process.end(gently=False)
                part.clean()
            self._start(part, state)
        return False

    def _trouble(self, part: Part, state: _State) -> str:
        """Why a part must be started, "" to give it time, "healthy"."""
        if state.process is None:
            return "it was not started yet"
        code = state.process.code()
        if code is not None:
            return f"it ended with code {code}"
        if why := part.broken():
            return why
        now = time.monotonic()
        if part.healthy():
            state.seen = time.monotonic()
            state.vain = 0
            return "healthy"
        if state.seen and now - state.seen > part.silence:
            return f"it was unhealthy for {part.silence:.0f} s"
        if not state.seen and now - state.started > part.patience:
            return f"it was not healthy within {part.patience:.0f} s of its start"
        return ""

    def _start(self, part: Part, state: _State) -> None:
        now = time.monotonic()
        while state.starts and now - state.starts[0] > self.within:
            state.starts.popleft()
        if state.vain >= self.vain:
            self._failed = part
            self.failure = f"{part.name} was started {self.vain} times and was never healthy"
        elif len(state.starts) >= self.most:
            self._failed = part
            self.failure = f"{part.name} had to be started {self.most} times in {self.within:.0f} s"
        if self._failed is part:
            self.failure += f", at last because {state.why}"
            return
        state.starts.append(now)
        state.count += 1
        state.vain += 1
        state.spares = 0
        state.started, state.seen = now, 0.0
        state.process, state.spare = state.spare, None
        if state.process is not None:
            if state.process.begin():
                return
            state.process.end(gently=False)
        try:
            state.process = _Process(part)
        except OSError as error:  # No process or memory is to be had; the next look tries again.
            state.process, state.why = None, f"it could not be started: {error}"

    def _start_spares(self) -> None:
        for part in self.parts:
            state = self._states[part.name]
            if not part.spare or state.spares >= self.vain:  # It can do without, more slowly.
                continue
            if state.spare is None or state.spare.code() is not None:
                if state.spare is not None:
                    state.spare.end(gently=False)
                state.spare = None
                state.spares += 1
                with suppress(OSError):
                    state.spare = _Process(part, "--spare")


def _tail(log: Path, lines: int = 15) -> str:
    with suppress(OSError):
        return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
    return "(no log)"
