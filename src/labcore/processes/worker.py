"""A long-lived process for untrusted code, with limits on time and memory."""

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
    """A call to a `Worker` gave no result.

    kind: "exception" (the function raised), "memory" (it exceeded its memory limit),
    "timeout", "died" (os._exit, a signal) or "answer" (its answer was rejected).
    type_name, traceback: those of the function's exception, as text; empty otherwise.
    """

    def __init__(
        self, message: str, *, kind: str, type_name: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.type_name = type_name
        self.traceback = traceback


class Worker:
    """A process that calls functions, with limits on the time and memory of each call.

    timeout_s: wall-clock seconds per call.
    memory_mib: MiB that the process may reserve beyond what it has at its start (Linux only).
    answer_mib: MiB of arrays that one answer may hold.

    The process starts with the first call, and again after a timeout or a crash. Arguments and
    results are numpy arrays, torch tensors (on the CPU) and plain values. Answers are JSON and raw
    data, so the function cannot make this process run code. The limits guard against mistakes and
    bad answers, not against a program that attacks the machine; for that, use a sandbox.

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
        """The process's ID, or None if none is running."""
        return self._child.process.pid if self._child and self._child.process.is_alive() else None

    def call(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call `fn(*args, **kwargs)` in the process and return its result.

        fn: any function, including closures and functions defined in a notebook.
        timeout_s: overrides the worker's. Starting the process doesn't count.
        Raises WorkerError if there is no result, and TypeError for arguments that cannot be passed.
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
            try:  # noqa: SIM105 - `suppress` is gone at interpreter shutdown
                self.close()
            except Exception:
                pass

    def _start_if_needed(self) -> None:
        if self._child is not None and (self.pid is None or self._child.answers.read(1)):
            self.close()  # It ended, or answered without a request, so don't trust it.
        if self._child is not None:
            self._child.output.room = OUTPUT_LIMIT
            return
        self._child = Child(_main, (self.memory_mib,), label="[worker]", output_limit=OUTPUT_LIMIT)
        try:
            self._receive(time.monotonic() + START_S)
        except (TimeoutError, EOFError, wire.WireError):
            self.close()
            raise WorkerError(
                f"the worker did not start; pass a memory_mib larger than {self.memory_mib}, and "
                "look at what the worker printed",
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
                f"the process {how} during the call; the function must return or raise, and stay "
                f"within memory_mib={self.memory_mib}",
                kind="died",
            ) from None
        except wire.WireError as problem:
            raise WorkerError(
                f"the answer was rejected: {problem}; the function must return {wire.ALLOWED}, at "
                f"most {self.answer_mib} MiB",
                kind="answer",
            ) from None
        self._running().show()
        return answer

    def _running(self) -> Child:
        if self._child is None:
            raise RuntimeError("the worker was closed during a call; use one worker per thread")
        return self._child

    def _news(self, deadline: float, *, writing: bool = False) -> bool:
        """Wait for news, print output, return whether the process ended. Raises TimeoutError."""
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
                "the answer was rejected: it is neither a result nor an error", kind="answer"
            )
        kind, type_name, message, text = texts
        memory = kind == "memory"
        hint = f" (its limit is memory_mib={self.memory_mib})" if memory else ""
        raise WorkerError(
            f"the function raised {type_name}: {message}{hint}",
            kind="memory" if memory else "exception",
            type_name=type_name,
            traceback=text,
        )


def _limit_memory(memory_mib: int) -> None:
    """Limit the address space. Only Linux enforces this."""
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
    """Run the worker's process."""
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
            except BaseException as problem:  # Also SystemExit: sys.exit() is not a result.
                frame = wire.pack(_failure(problem))
            sys.stdout.flush()
            sys.stderr.flush()


def _failure(problem: BaseException) -> list[Any]:
    memory = isinstance(problem, MemoryError) or "DefaultCPUAllocator" in str(problem)
    frames = problem.__traceback__.tb_next if problem.__traceback__ else None
    text = "".join(traceback.format_exception(type(problem), problem, frames))
    kind = "memory" if memory else "exception"
    return [False, kind, type(problem).__name__, str(problem)[:TEXT_LIMIT], text[-TEXT_LIMIT:]]
