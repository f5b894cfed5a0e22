"""Keep processes alive: start them in order, check them often, and restart those that died.

A part is restarted when its process ends, when it reports a loss that it can't recover from
(`broken`), and when it has been silent, neither healthy nor broken, for too long. One thread checks
the parts in turn.
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

LOOK_S = 0.1  # between two checks of the parts
# This script executes the given program and asks the kernel to kill it when its parent dies, so a
# killed supervisor leaves no server running. A script needs no fork hook (preexec_fn).
TIED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "sys.exit(1) if os.getppid() != int(sys.argv[1]) else os.execv(sys.argv[2], sys.argv[2:])\n"
)


class SupervisorError(RuntimeError):
    """A part didn't become healthy, or died repeatedly; the message ends with its log."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process to keep alive.

    command: the program's full path and arguments. log: the file that its output is appended to.
    healthy: a health check, called from the supervisor's thread; it should answer within about a
    second. broken: returns why the process must be restarted at once, or "".
    patience: seconds that it may take to become healthy. silence: seconds that it may be unhealthy
    later. spare: keep a second process, started with `--spare`. It loads its modules, writes a
    line to its standard input, which is a socket, and waits for a line there before it begins; it
    takes over when the first process dies. attached: the process exits by itself when its standard
    input closes. clean: called after the process ends, before the next start.
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
    """A running program, and our end of its standard input if it has one."""

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
                    start_new_session=True,  # the terminal's Ctrl-C goes to the supervisor only
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
        """Return the exit code, or None while the process runs."""
        return self._popen.poll()

    def ready(self) -> bool:
        """Return whether a spare has loaded its modules."""
        if not self._said_ready and self._control is not None:
            with suppress(OSError):
                self._said_ready = bool(self._control.recv(64))
        return self._said_ready

    def begin(self) -> bool:
        """Tell a spare to begin; return False if it is dead."""
        if self.code() is not None or self._control is None:
            return False
        try:
            self._control.sendall(b"begin\n")
        except OSError:
            return False
        return True

    def end(self, *, gently: bool, attached: bool = False) -> None:
        """End the process and all its children, and wait until it is gone."""
        if self._control is not None:
            self._control.close()
        if gently and self.code() is None:
            if not attached:
                self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(5.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # children may outlive the process
        self._popen.wait()


@dataclass
class _State:
    process: _Process | None = None
    spare: _Process | None = None
    started: float = 0.0
    seen: float = 0.0  # when it was last healthy; 0 if this process never was
    starts: deque[float] = field(default_factory=deque)
    count: int = 0
    vain: int = 0  # starts since it was last healthy
    spares: int = 0  # spares started since the last start of the part itself
    why: str = ""


class Supervisor:
    """Keep `parts` alive from start() to stop().

    The supervisor gives up on a part that had to be started `most` times within `within` seconds,
    or that was started `vain` times in a row and was never healthy. `failure` then says why, and
    everything is stopped.
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
        """Return once every part has been healthy after this call. Raises SupervisorError."""
        positive("timeout", timeout)
        with self._changed:
            fresh = self._healthy_looks + 2  # the next one may have begun before the call

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
        """Return the failure and the end of the failed part's log; "" without a failure."""
        if self._failed is None:
            return self.failure
        return f"{self.failure}; its log ends:\n{_tail(self._failed.log)}"

    def stop(self) -> None:
        """Stop every part, last one first. Calling it again is harmless."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def pid(self, name: str) -> int | None:
        """Return the process id of a part, or None if it isn't running."""
        process = self._states[name].process
        return process.pid if process is not None and process.code() is None else None

    def spare_ready(self, name: str) -> bool:
        """Return whether a part's spare has loaded its modules and can take over at once."""
        spare = self._states[name].spare
        return spare is not None and spare.ready()

    def spare_pid(self, name: str) -> int | None:
        """Return the process id of a part's spare, or None if it isn't running."""
        spare = self._states[name].spare
        return spare.pid if spare is not None and spare.code() is None else None

    def restarts(self) -> dict[str, int]:
        """Return how often each part was restarted."""
        return {name: max(state.count - 1, 0) for name, state in self._states.items()}

    def reasons(self) -> dict[str, str]:
        """Return why each part was last restarted; "" if it never was."""
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
                except Exception as error:  # the other parts must still be ended
                    self.failure = self.failure or f"{part.name} was not cleaned up: {error}"
            with self._changed:
                self._changed.notify_all()

    def _look(self, part: Part) -> bool:
        """Return whether a part is healthy; restart it if it is beyond recovery."""
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
        """Return why a part must be started, "" to give it time, or "healthy"."""
        if state.process is None:
            return "it had not been started"
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
        except OSError as error:  # out of processes or memory; the next check tries again
            state.process, state.why = None, f"it could not be started: {error}"

    def _start_spares(self) -> None:
        for part in self.parts:
            state = self._states[part.name]
            if not part.spare or state.spares >= self.vain:  # without a spare, restarts are slower
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
