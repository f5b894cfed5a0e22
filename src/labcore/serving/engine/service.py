"""An engine in a thread of its own, for callers in any other: submit, read, cancel."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from labcore.checks import non_negative
from labcore.decoding.contract import SamplingConfig
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.metrics import Snapshot
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.scheduler import QueueFull

__all__ = ["Service", "Stream"]

T = TypeVar("T")
_Command = Callable[[], None]


class Stream:
    """The outputs of one request, as an iterator that ends behind the one with a finish.

    id: the request's. timeout: seconds that `next` waits; None is for ever. One thread reads it.
    It holds at most the outputs of one request, so a slow reader holds nobody up. A stream that is
    left, by `close`, a `with` block or because nobody has it any more, cancels its request.
    """

    def __init__(self, service: Service, id: str, box: _Box, timeout: float | None) -> None:
        self.id, self.timeout = id, timeout
        self._service, self._box = service, box
        # It must not wait: it may run in any thread, in the middle of anything.
        self._leave = weakref.finalize(self, service._abandon, id, box)
        self._leave.atexit = False

    @property
    def finish(self) -> str:
        """Why it ended, "" while there may be more to read."""
        return self._box.finish

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        """Raises TimeoutError where nothing came in time; the request goes on."""
        return self.get(self.timeout)

    def get(self, timeout: float | None = None) -> Output:
        """The next output, waited for at most `timeout` seconds; None is for ever.

        Raises TimeoutError where nothing came, StopIteration behind the last output.
        """
        if self._box.finish:
            raise StopIteration
        try:
            output = self._box.outputs.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(
                f"request {self.id!r} must say something within {timeout} s, got nothing; read "
                "again, or cancel it"
            ) from None
        self._box.finish = output.finish
        return output

    def cancel(self) -> None:
        """End the request; its last output, still to be read, has the finish "cancelled".

        Harmless where it has ended.
        """
        self._service._cancel(self.id, self._box)

    def close(self) -> None:
        """Cancel, and read no more."""
        self._leave()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Box:
    """Between the engine's thread and a reader."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.finish = ""  # of the last output that was read
        self.ended = False  # whether the last one was put in


class Service:
    """Steps an engine in a thread of its own while there is work; its methods are for any thread.

    engine: idle, and used by nobody else from then on; it is closed with the service.
    The waiting queue is the engine's, bounded by its max_waiting. Where the engine breaks (not a
    request in it), every stream ends with "error", and `submit` raises RuntimeError.
    Raises ValueError for an engine that is not idle: nobody would read what it says.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.idle:
            raise ValueError(
                "an engine must be idle to be served, got one with requests under way or outputs "
                "to be said; drain it first"
            )
        self.engine = engine
        # SimpleQueue.put may be entered again by a finalizer in the same thread.
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._boxes: dict[str, _Box] = {}
        self._stepped = threading.Condition()
        self._lock = threading.Lock()  # nothing comes in behind the last look at the inbox
        self._closing = False
        self._broken: BaseException | None = None
        self._since: float | None = None  # when the engine's thread began what it is doing
        self._thread = threading.Thread(target=self._run, name="labcore-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes must not outlive the interpreter

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        return not self._closing and self._broken is None and self._thread.is_alive()

    @property
    def busy(self) -> float:
        """Seconds that the engine's thread has been at one step or question; 0.0 between two."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

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
        """Hand in a request; the stream of its outputs.

        As `Engine.submit`, with its errors. seconds: after which the request ends with "deadline".
        timeout: the stream's. wait: seconds to try again where the waiting queue is full; then
        QueueFull. Raises RuntimeError for a service that is closed or broken.
        """
        until = time.monotonic() + non_negative("wait", wait)
        due = None
        if seconds is not None:
            due = self.engine.clock.now() + non_negative("seconds", seconds)

        tokens: Sequence[int] | None = None

        def take() -> Stream:
            nonlocal tokens
            if tokens is None:  # a text is encoded once, in the engine's thread
                tokens = self.engine.tokens_of(prompt)
            name = self.engine.submit(
                tokens, sampling, id=id, priority=priority, deadline=due, counted=last
            )
            box = self._boxes[name] = _Box()
            return Stream(self, name, box, timeout)

        while True:
            left = until - time.monotonic()
            last = left <= 0
            try:
                return self._ask(take)
            except QueueFull:
                if last:
                    raise
                with self._stepped:
                    self._stepped.wait(min(left, 0.05))

    def stats(self) -> Snapshot:
        """The engine's, between two steps."""
        return self._ask(self.engine.stats)

    def close(self) -> None:
        """Cancel what is under way, end its streams, and wait for the thread."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: Callable[[], T]) -> T:
        """Have the engine's thread do it between two steps; what came of it."""
        answer: Future[Any] = Future()

        def command() -> None:
            try:
                answer.set_result(what())
            except Exception as problem:
                answer.set_exception(problem)
            except BaseException as problem:  # it ends the engine's thread, not the caller's
                answer.set_exception(RuntimeError(f"the engine broke: {problem!r}"))
                raise

        with self._lock:
            if not self.healthy:
                cause = "closed" if self._broken is None else f"broken ({self._broken!r})"
                raise RuntimeError(f"the service is {cause}; make another")
            self._inbox.put(command)
        return answer.result()

    def _cancel(self, id: str, box: _Box) -> None:
        def command() -> None:
            if self._boxes.get(id) is box:  # else it has ended, and the id may be another's
                self.engine.cancel(id)

        self._inbox.put(command)

    def _abandon(self, id: str, box: _Box) -> None:
        if not box.ended:
            self._cancel(id, box)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey(wait=self.engine.idle)
                if self._closing or self.engine.idle:
                    continue
                self._since = time.monotonic()
                self._deliver(self.engine.step())
                self._since = None
        except BaseException as problem:
            self._broken = problem
        finally:
            self._finish()
            self._since = None
            atexit.unregister(self.close)  # it would keep a broken engine

    def _obey(self, *, wait: bool) -> None:
        """Do what has been asked; wait for something to be asked if there is nothing else to do.

        What is asked meanwhile comes behind the next step.
        """
        for _ in range(max(self._inbox.qsize(), int(wait))):
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._since = time.monotonic()
            command()
            self._since = None

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            box = self._boxes[output.id]
            if output.finish:
                del self._boxes[output.id]
                box.ended = True
            box.outputs.put(output)
        with self._stepped:
            self._stepped.notify_all()

    def _finish(self) -> None:
        """End every stream, and answer everybody who still waits."""
        with self._lock:
            self._closing = True
        while not self._inbox.empty():
            self._guarded(lambda: self._obey(wait=False))
        if self._broken is None:
            self._guarded(self._cancel_all)
        self._guarded(self.engine.close)
        reason = f"the engine broke: {self._broken!r}"
        self._deliver([Output(id=id, finish="error", reason=reason) for id in self._boxes])

    def _guarded(self, what: _Command) -> None:
        """Do it; where it raises, the engine is broken, and what comes behind it is done."""
        try:
            what()
        except BaseException as problem:
            self._broken = self._broken or problem

    def _cancel_all(self) -> None:
        for id in list(self._boxes):
            self.engine.cancel(id)
        self._deliver(self.engine.step())
