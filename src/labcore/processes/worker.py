"""One long-lived process for code that is not trusted: limits in, plain data out."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from io import FileIO
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from labcore.checks import positive, positive_int
from labcore.processes import wire
from labcore.processes.child import Child, close_others, how_it_ended, listen, send
from labcore.processes.travel import dumps, loads

__all__ = ["Worker", "WorkerError"]

MIB = 1 << 20
OUTPUT_LIMIT = 1 << 16
TEXT_LIMIT = 8000
START_S = 60
REQUEST_LIMIT = 1 << 62  # The parent is trusted; memory_mib bounds what it may send.


class WorkerError(RuntimeError):
    """A call of a `Worker` gave no result.

    kind: "exception" (the function raised), "memory" (it asked for more than its limit),
    "timeout", "died" (os._exit, a signal) or "answer" (what came back is refused).
    type_name, traceback: of the function's exception, as text; empty otherwise.
    """

    def __init__(
        self, message: str, *, kind: str, type_name: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.type_name = type_name
        self.traceback = traceback


class Worker:
    """A process that calls functions, each call within a limit of time and memory.

    timeout_s: wall-clock seconds for a call.
    memory_mib: MiB that the process may reserve beyond what it has at its start (on Linux).
    answer_mib: MiB of arrays that one answer may hold.

    The process starts with the first call and again after a timeout or a crash. Arguments and
    results are numpy arrays, torch tensors (on the CPU) and plain values; answers cross as JSON
    and raw data, so nothing that the function does can make this process run code. The limits
    hold back mistakes and answers, not a program that attacks the machine: that needs a sandbox.

        with Worker(timeout_s=5) as worker:
            worker.call(function, array)
    """

    def __init__(
        self, *, timeout_s: float = 10, memory_mib: int = 2048, answer_mib: int = 256
    ) -> None:
        self.timeout_s = positive("timeout_s", timeout_s, "pass seconds")
        self.memory_mib = positive_int("memory_mib", memory_mib, "pass MiB")
        self.answer_mib = positive_int("answer_mib", answer_mib, "pass MiB")
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """The process, or None where none runs."""
        return self._child.process.pid if self._child and self._child.process.is_alive() else None

    def call(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """`fn(*args, **kwargs)` in the process.

        fn: any function, one of a notebook or a closure too.
        timeout_s: instead of the worker's own. Starting the process is not counted.
        Raises WorkerError where no result comes, TypeError for arguments that cannot cross.
        """
        limit_s = positive("timeout_s", self.timeout_s if timeout_s is None else timeout_s)
        packed = np.frombuffer(dumps(fn), np.uint8)
        request = wire.pack([packed, list(args), kwargs])
        self._start_if_needed()
        try:
            answer = self._exchange(request, limit_s)
        except BaseException:
            self.close()
            raise
        return self._judge(answer)

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            try:  # noqa: SIM105 - at the interpreter's end `suppress` is gone
                self.close()
            except Exception:
                pass

    def _start_if_needed(self) -> None:
        if self._child is not None and (self.pid is None or self._child.answers.read(1)):
            self.close()  # It ended, or spoke without being asked: nothing of it is believed.
        if self._child is not None:
            self._child.output.room = OUTPUT_LIMIT
            return
        self._child = Child(_main, (self.memory_mib,), label="[worker]", output_limit=OUTPUT_LIMIT)
        try:
            self._receive(time.monotonic() + START_S)
        except (TimeoutError, EOFError, wire.WireError):
            self.close()
            raise WorkerError(
                f"the worker did not start; try a larger memory_mib than {self.memory_mib}, and "
                "look at what it printed",
                kind="died",
            ) from None
        except BaseException:
            self.close()
            raise

    def _exchange(self, request: bytes, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        try:
            self._send(request, deadline)
            answer = self._receive(deadline)
        except TimeoutError:
            raise WorkerError(
                f"the call took longer than {limit_s:g} s and was ended; look for a loop that "
                "does not end, or pass a larger timeout_s",
                kind="timeout",
            ) from None
        except EOFError:
            child = self._running()
            child.process.join(1)
            how = how_it_ended(child.process.exitcode)
            raise WorkerError(
                f"the process {how} during the call; the function must return or raise, and keep "
                f"within memory_mib={self.memory_mib}",
                kind="died",
            ) from None
        except wire.WireError as problem:
            raise WorkerError(
                f"the answer was refused: {problem}; the function must return {wire.ALLOWED}, of "
                f"{self.answer_mib} MiB at most",
                kind="answer",
            ) from None
        self._running().show()
        return answer

    def _running(self) -> Child:
        if self._child is None:
            raise RuntimeError("the worker was closed during a call; use one worker a thread")
        return self._child

    def _news(self, deadline: float, *, writing: bool = False) -> bool:
        """Wait for news; show output. Whether the process has ended. Raises TimeoutError."""
        child = self._running()
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        streams = [one for one in (child.answers, child.output.stream) if not one.closed]
        listen([*streams, child.process.sentinel], left, child.requests if writing else None)
        child.output.show()
        return not child.process.is_alive()

    def _send(self, request: bytes, deadline: float) -> None:
        left = memoryview(request)
        while left:
            try:
                left = left[send(self._running().requests, left[:MIB]) :]
            except BlockingIOError:
                if self._news(deadline, writing=True):
                    raise EOFError from None
            except ConnectionError:
                raise EOFError from None

    def _receive(self, deadline: float) -> Any:
        answers = self._running().answers

        def read(size: int) -> bytes:
            data = bytearray()
            ended = False
            while len(data) < size:
                if part := answers.read(min(MIB, size - len(data))):
                    data += part
                    if time.monotonic() > deadline:
                        raise TimeoutError
                elif ended or answers.closed:
                    raise EOFError
                else:
                    ended = self._news(deadline)
            return bytes(data)

        return wire.unpack(read, self.answer_mib * MIB)

    def _judge(self, answer: Any) -> Any:
        if isinstance(answer, list) and len(answer) == 2 and answer[0] is True:
            return answer[1]
        texts = answer[1:] if isinstance(answer, list) and len(answer) == 5 else []
        if not texts or answer[0] is not False or not all(type(one) is str for one in texts):
            self.close()
            raise WorkerError(
                "the answer was refused: it is neither a result nor an error", kind="answer"
            )
        kind, type_name, message, text = texts
        memory = kind == "memory"
        hint = f" (memory_mib={self.memory_mib} is its limit)" if memory else ""
        raise WorkerError(
            f"the function raised {type_name}: {message}{hint}",
            kind="memory" if memory else "exception",
            type_name=type_name,
            traceback=text,
        )


def _limit_memory(memory_mib: int) -> None:
    """Bound the address space; elsewhere than on Linux the system does not hold to it."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm", encoding="ascii") as line:
            pages = int(line.read().split()[0])
        limit = pages * resource.getpagesize() + memory_mib * MIB
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _main(requests: Connection | FileIO, answers: Connection | FileIO, memory_mib: int) -> None:
    """The worker's process."""
    torch.set_num_threads(1)
    close_others(requests.fileno(), answers.fileno())
    _limit_memory(memory_mib)
    with (
        open(requests.fileno(), "rb", closefd=False) as source,
        open(answers.fileno(), "wb", closefd=False) as sink,
    ):

        def read(size: int) -> bytes:
            data = source.read(size)
            if len(data) < size:
                raise EOFError
            return data

        frame = wire.pack("ready")
        while True:
            sink.write(frame)
            sink.flush()
            try:
                packed, args, kwargs = wire.unpack(read, REQUEST_LIMIT)
            except EOFError:
                return
            try:
                frame = wire.pack([True, loads(packed.tobytes())(*args, **kwargs)])
            except BaseException as problem:  # SystemExit too: sys.exit() is no result.
                frame = wire.pack(_failure(problem))
            sys.stdout.flush()
            sys.stderr.flush()


def _failure(problem: BaseException) -> list[Any]:
    memory = isinstance(problem, MemoryError) or "DefaultCPUAllocator" in str(problem)
    frames = problem.__traceback__.tb_next if problem.__traceback__ else None
    text = "".join(traceback.format_exception(type(problem), problem, frames))
    kind = "memory" if memory else "exception"
    return [False, kind, type(problem).__name__, str(problem)[:TEXT_LIMIT], text[-TEXT_LIMIT:]]
