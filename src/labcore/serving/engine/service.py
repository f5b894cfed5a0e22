"""An engine in a thread of its own; callers in other threads submit, read and cancel requests."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from labcore.checks import non_negative
from labcore.decoding.contract import SamplingConfig
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.metrics import Snapshot

__all__ = ["Service", "Stream"]

T = TypeVar("T")


class Stream:
    """The outputs of one request, as an iterator that ends after the output with a finish.

    id: the request's. timeout: the seconds that `next` waits; None means forever. finish: why the
    request ended, "" until its last output is read. Only one thread may read a stream. Unread
    outputs wait in a queue, so a slow reader delays no one. A request is cancelled when its stream
    leaves a `with` block, or when nothing refers to the stream any more.
    """

    def __init__(self, service: Service, id: str, timeout: float | None) -> None:
        self.id, self.timeout, self.finish = id, timeout, ""
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        service._outputs[id] = self._outputs
        self._cancel = functools.partial(service._cancel, id, self._outputs)
        weakref.finalize(self, self._cancel).atexit = False

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        """Return the next output.

        Raises TimeoutError if none comes in time; the request goes on, and can be read later.
        """
        if self.finish:
            raise StopIteration
        try:
            output = self._outputs.get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError(
                f"request {self.id!r} must produce an output within {self.timeout} s, got none; "
                "read again, or cancel it"
            ) from None
        self.finish = output.finish
        return output

    def cancel(self) -> None:
        """End the request; its last output, still to be read, has the finish "cancelled".

        This does nothing if the request has ended.
        """
        self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Service:
    """Steps an engine in a thread of its own while there is work; any thread may call the methods.

    engine: an idle one that no one else uses from now on; the service closes it at its own end. Its
    max_waiting bounds the queue. If the engine breaks (not a request in it), every stream ends with
    "error", and `submit` raises RuntimeError.
    Raises ValueError if the engine isn't idle, because no one would read its outputs.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.idle:
            raise ValueError(
                "an engine must be idle to be served, got one with requests under way or outputs "
                "to be reported; drain it first"
            )
        self.engine = engine
        # A finalizer may put a command at any moment, even during another put of its own thread;
        # a SimpleQueue allows that.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: dict[str, queue.SimpleQueue[Output]] = {}  # of the requests under way
        self._lock = threading.Lock()  # no question comes in after the last look at the inbox
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="labcore-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes must not outlive the interpreter

    def submit(
        self,
        prompt: Sequence[int] | str,
        sampling: SamplingConfig | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        seconds: float | None = None,
        timeout: float | None = None,
        wait: float = 0.0,
    ) -> Stream:
        """Submit a request and return the stream of its outputs.

        The arguments and errors are those of `Engine.submit`. seconds: the time after which the
        request ends with "deadline". timeout: the stream's. wait: for how many seconds to try again
        while the queue is full, before QueueFull is raised.
        Raises RuntimeError if the service is closed or broken.
        """
        until, due = time.monotonic() + non_negative("wait", wait), None
        if seconds is not None:
            due = self.engine.clock.now() + non_negative("seconds", seconds)

        @functools.cache  # a text is encoded once, however often it is submitted
        def tokens() -> tuple[int, ...]:
            return self.engine.tokens_of(prompt)

        def take() -> Stream:
            name = self.engine.submit(
                tokens(), sampling, id=id, priority=priority, deadline=due, counted=last
            )
            return Stream(self, name, timeout)

        while True:
            last = time.monotonic() >= until
            try:
                return self._ask(take)  # it is answered once per step
            except QueueFull:
                if last:
                    raise

    def stats(self) -> Snapshot:
        """Return the engine's statistics between two steps."""
        return self._ask(self.engine.stats)

    def close(self) -> None:
        """Cancel all requests, end their streams, close the engine, and wait for the thread."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Callable[[], T]) -> T:
        """Return what the engine's thread answers between two steps, or raise its error."""
        answer: Future[Any] = Future()

        def command() -> None:
            try:
                answer.set_result(question())
            except Exception as problem:
                answer.set_exception(problem)
            except BaseException as problem:  # it ends the engine's thread, not the caller's
                answer.set_exception(RuntimeError(f"the engine broke: {problem!r}"))
                raise

        with self._lock:
            if self._closing:
                cause = "closed" if self._broken is None else f"broken ({self._broken!r})"
                raise RuntimeError(f"the service is {cause}; make another")
            self._inbox.put(command)
        return answer.result()

    def _cancel(self, id: str, outputs: queue.SimpleQueue[Output]) -> None:
        """Ask the engine's thread to cancel a request; this neither waits nor takes a lock."""

        def command() -> None:
            if self._outputs.get(id) is outputs:  # otherwise the id is another request's by now
                self.engine.cancel(id)

        self._inbox.put(command)

    def _run(self) -> None:
        self._guarded(self._serve)
        with self._lock:
            self._closing = True
        while not self._inbox.empty():
            self._guarded(self._inbox.get())
        self._guarded(self.engine.close)
        if self._broken is None:
            self._guarded(lambda: self._deliver(self.engine.step()))  # those that close cancelled
        reason = f"the engine broke: {self._broken!r}"
        self._deliver([Output(id=id, finish="error", reason=reason) for id in self._outputs])
        atexit.unregister(self.close)  # it would keep a broken engine alive

    def _serve(self) -> None:
        while not self._closing:
            # Commands that come meanwhile wait for the next step. An idle engine waits for one.
            for _ in range(max(self._inbox.qsize(), int(self.engine.idle))):
                self._inbox.get()()
            if not (self._closing or self.engine.idle):
                self._deliver(self.engine.step())

    def _deliver(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.finish:
                self._outputs.pop(output.id).put(output)
            else:
                self._outputs[output.id].put(output)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Act; if that raises an error, the engine is broken."""
        try:
            act()
        except BaseException as problem:
            self._broken = self._broken or problem
