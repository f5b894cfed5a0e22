"""A client for an engine behind a Unix socket, with a deadline on every call."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from labcore.checks import positive
from labcore.serving.remote.messages import LIMIT, LineBuffer, encode, parse_answer

__all__ = ["EngineClient", "EngineError", "Replies", "Reply"]

SLACK_S = 5.0  # for the engine's deadline message to arrive


def unix_socket() -> socket.socket:
    """Return a new Unix socket. Raises RuntimeError on Windows, where Python has none."""
    if not hasattr(socket, "AF_UNIX"):
        raise RuntimeError(
            f"an engine in a separate process needs Linux or macOS, got {sys.platform}; use "
            "labcore.serving.Service in this process, or WSL"
        )
    return socket.socket(socket.AF_UNIX)


class EngineError(RuntimeError):
    """A request ended with an error.

    code: the code in the engine's message, or "lost" if the connection ended first.
    """

    def __init__(self, reason: str, *, code: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One part of an output: new tokens and their text; finish is "" until the last part."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""
    reason: str = ""


class Replies:
    """The parts of one output, in order; the last part has its finish. Iterate once.

    Raises EngineError if the request ends with an error, TimeoutError if its deadline passes (the
    request is then cancelled).
    """

    def __init__(self, client: EngineClient, name: str, timeout: float) -> None:
        self.id = name
        self._client = client
        self._ends = time.monotonic() + timeout
        self._timeout = timeout
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def cancel(self) -> None:
        """Ask the engine to cancel the request; the parts sent before that still arrive."""
        self._client._send({"type": "cancel", "id": self.id})

    def __iter__(self) -> Iterator[Reply]:
        while True:
            try:
                left = max(self._ends - time.monotonic(), 0)
                message = self._messages.get(timeout=left)
            except queue.Empty:
                self.cancel()
                raise TimeoutError(
                    f"request {self.id} did not end within {self._timeout} s; pass a larger "
                    "timeout or ask for fewer tokens"
                ) from None
            if message["type"] == "tokens":
                yield Reply(tokens=tuple(message["tokens"]), text=message["text"])
                continue
            if message["type"] == "error":
                raise EngineError(message["reason"], code=message["code"])
            yield Reply(finish=message["finish"], reason=message["reason"])
            return

    def result(self) -> Reply:
        """Return all parts as one."""
        parts = list(self)
        tokens = tuple(itertools.chain.from_iterable(part.tokens for part in parts))
        text = "".join(part.text for part in parts)
        return Reply(tokens=tokens, text=text, finish=parts[-1].finish, reason=parts[-1].reason)


class EngineClient:
    """One connection to the engine that listens on the socket `path`.

    timeout: seconds for connecting, for health() and stats(), and for an output unless submit
    gets its own timeout. Raises ConnectionError if nothing listens there.
    """

    def __init__(self, path: str | Path, *, name: str = "client", timeout: float = 30.0) -> None:
        self.timeout = positive("timeout", timeout)
        self._waiting: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._names = (f"r{number}" for number in itertools.count(1))
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._lost = False
        self._end = unix_socket()
        try:
            self._end.settimeout(timeout)
            self._end.connect(str(path))
        except OSError as error:
            self._end.close()
            raise ConnectionError(
                f"no engine listens on {path} ({error}); start one with "
                "`python -m labcore.serving.remote.process`"
            ) from None
        # Reads may wait forever, but an engine that doesn't accept data counts as lost.
        self._end.settimeout(None)
        interval = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._reader = threading.Thread(target=self._read, name=f"ipc-{name}", daemon=True)
        self._reader.start()
        self._send({"type": "hello", "name": name, "pid": os.getpid()})

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        id: str | None = None,
        timeout: float | None = None,
        **wanted: Any,
    ) -> Replies:
        """Submit a request. wanted: fields of SamplingConfig, priority.

        timeout: seconds after which the engine ends the request, and soon after that the iterator.
        """
        seconds = self.timeout if timeout is None else positive("timeout", timeout)
        message = {"type": "submit", "prompt": prompt, "timeout": seconds, **wanted}
        if not isinstance(prompt, str):
            message["prompt"] = list(prompt)
        if "stop" in message:
            message["stop"] = list(message["stop"])
        with self._lock:
            message["id"] = self._free_name() if id is None else id
            if (size := len(encode(message))) > LIMIT:
                raise ValueError(f"a request must have at most {LIMIT} bytes as JSON, got {size}")
            # The engine enforces the deadline; this timeout catches an engine that hangs.
            replies = Replies(self, message["id"], seconds + SLACK_S)
            if message["id"] in self._waiting:
                raise ValueError(f"id {id!r} is in use; choose another or leave it out")
            self._waiting[replies.id] = replies._messages
        self._send(message)
        return replies

    def health(self) -> dict[str, Any]:
        """Return the engine's health report. Raises EngineError, TimeoutError."""
        return self._ask("health")

    def stats(self) -> dict[str, Any]:
        """Return the engine's statistics by name. Raises EngineError, TimeoutError."""
        return self._ask("stats")

    def close(self) -> None:
        """Close the connection; the engine cancels its remaining requests."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _free_name(self) -> str:
        return next(name for name in self._names if name not in self._waiting)

    def _ask(self, kind: str) -> dict[str, Any]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            name = self._free_name()
            self._waiting[name] = answers
        self._send({"type": kind, "id": name})
        try:
            message = answers.get(timeout=self.timeout)
        except queue.Empty:
            with self._lock:
                self._waiting.pop(name, None)
            raise TimeoutError(
                f"the engine did not report its {kind} within {self.timeout} s"
            ) from None
        if message["type"] == "error":
            raise EngineError(message["reason"], code=message["code"])
        values: dict[str, Any] = message["values"]
        return values

    def _send(self, message: Mapping[str, Any]) -> None:
        line = encode(message)
        try:
            with self._writing:
                self._end.sendall(line)
        except OSError:
            # A line may be half sent, which ends the connection; the reader reports the loss.
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
        if self._lost:
            self._tell_loss()

    def _read(self) -> None:
        lines = LineBuffer(16 * LIMIT)
        with suppress(OSError):
            while data := self._end.recv(1 << 16):
                for line in lines.feed(data):
                    if line is not None:
                        self._deliver(parse_answer(line))
        with self._lock:
            self._lost = True
        self._tell_loss()
        self._end.close()

    def _deliver(self, message: dict[str, Any]) -> None:
        name = message.get("id")
        with self._lock:
            if not isinstance(name, str) or name not in self._waiting:
                return
            answers = self._waiting[name]
            if message["type"] != "tokens":
                del self._waiting[name]
        answers.put(message)

    def _tell_loss(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        reason = "the connection to the engine was lost; ask again once it is back"
        for answers in waiting:
            answers.put({"type": "error", "code": "lost", "reason": reason})
