"""The model that the Triton Inference Server's python backend loads: a bridge to one engine.

It is copied into the model repository as `1/model.py` and runs in the server's own environment:
the standard library and what the backend brings are all it imports. Decoupled: `execute` hands each
request to the engine and returns; a thread reads the engine's lines from a Unix socket and sends a
response for each, the last with the final flag. A request whose client left is cancelled there, an
engine that is lost ends its requests with an error, and the bridge connects again by itself. The
process ends with the server that started it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# The server brings it, and numpy in it; nowhere else is it found.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

__all__ = ["Bridge", "Pending", "TritonPythonModel"]

LIMIT = 1 << 20  # bytes of a line, as the engine reads them
LOOK_S = 0.05  # between two looks at whether clients left, and between attempts to connect
GAUGES_S = 1.0  # between two questions for the engine's numbers
STATS = {"type": "stats", "id": "gauges"}
# Inputs that go to the engine under their own names, and how a value of numpy becomes JSON.
PLAIN: dict[str, Any] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "seed": int,
    "priority": int,
    "timeout": float,
}
INPUTS = ("text_input", *PLAIN, "stop", "stream")
# Names in pb_utils.TritonError, which is not there yet while this file is imported.
CODES = {
    "invalid": "INVALID_ARG",
    "malformed": "INVALID_ARG",
    "too_long": "INVALID_ARG",
    "refused": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "lost": "UNAVAILABLE",
    "cancelled": "CANCELLED",
}


class TritonPythonModel:
    """What the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Called once: the model's configuration names the engine's socket."""
        config = json.loads(args["model_config"])
        self.bridge = Bridge(config["parameters"]["socket"]["string_value"])
        self.bridge.start()

    def execute(self, requests: list[Any]) -> None:
        """Hands each request over; the responses come later, from the bridge's threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                message, stream = _read(request)
            except ValueError as error:
                Pending(sender, True).fail("invalid", str(error))
            except Exception as error:  # Of one request: it must not take the others with it.
                Pending(sender, True).fail("internal", f"{type(error).__name__}: {error}")
            else:
                self.bridge.submit(message, Pending(sender, stream))

    def finalize(self) -> None:
        """Called when the server unloads the model."""
        self.bridge.close()


class Pending:
    """One request of the server: sends its responses, and its end once.

    stream: whether each part is sent as it comes; else all parts are sent as one, at the end.
    """

    def __init__(self, sender: Any, stream: bool) -> None:
        self.sender = sender
        self.stream = stream
        self._kept: list[tuple[list[int], str]] = []
        self._done = False
        self._lock = threading.Lock()

    def part(self, tokens: list[int], text: str) -> None:
        """New tokens and their text."""
        with self._lock:
            if not self._done and self.stream:
                self._send(_response(tokens, text, "", ""))
            elif not self._done:
                self._kept.append((tokens, text))

    def finish(self, finish: str, reason: str) -> None:
        """The end of an output."""
        tokens = [token for part in self._kept for token in part[0]]
        text = "".join(part[1] for part in self._kept)
        self._end(_response(tokens, text, finish, reason))

    def fail(self, code: str, reason: str) -> None:
        """The end of a request that has no output."""
        kind = getattr(pb_utils.TritonError, CODES.get(code, "INTERNAL"))
        error = pb_utils.TritonError(reason, kind)
        self._end(pb_utils.InferenceResponse(output_tensors=[], error=error))

    def left(self) -> bool:
        """Whether the client is gone; the server sees that first."""
        with self._lock:
            try:
                return not self._done and bool(self.sender.is_cancelled())
            except Exception as error:
                _complain(error)
                return True

    def _end(self, last: Any) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                self._send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, response: Any, flags: int = 0) -> None:
        """Give the server a response; where it refuses, the other requests go on."""
        try:
            self.sender.send(response, flags=flags)
        except Exception as error:
            _complain(error)


class Bridge:
    """The connection to the engine on the socket `path`, and the requests that wait on it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._end: socket.socket | None = None  # None while the engine is away
        self._pending: dict[str, Pending] = {}
        self._count = 0
        self._closing = False
        self._gauges = _Gauges()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._keep, self._watch)
        ]

    def start(self) -> None:
        """Connect, now and whenever the connection is lost."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the connection, and what waits on it with an error."""
        self._closing = True
        end = self._end
        if end is not None:
            _hang_up(end)
        for thread in self._threads:
            thread.join(2)
        self._lose_all()

    def submit(self, message: dict[str, Any], pending: Pending) -> None:
        """Hand a request to the engine; `pending` hears what becomes of it, in any case."""
        with self._lock:
            self._count += 1
            name = f"t{self._count}"
            self._pending[name] = pending
        line = _encoded({**message, "id": name})
        if len(line) > LIMIT:
            self._take(name)
            reason = f"a request must have at most {LIMIT} bytes as JSON, got {len(line)}"
            pending.fail("too_long", reason)
        elif not self._send(line, name):
            self._lose(name)

    def _send(self, line: bytes, name: str = "") -> bool:
        """Whether the line went to the engine; not for a request that was lost meanwhile."""
        end = self._end
        if end is None:
            return False
        try:
            with self._writing:
                if name and name not in self._pending:
                    return True  # Its caller was told so, and the engine has become another one.
                end.sendall(line)
        except OSError:
            _hang_up(end)  # Wakes the reader, which ends what was in flight.
            return False
        return self._end is end

    def _take(self, name: str) -> Pending | None:
        with self._lock:
            return self._pending.pop(name, None)

    def _lose(self, name: str) -> None:
        pending = self._take(name)
        if pending is not None:
            pending.fail("lost", "the engine is starting again; send the request once more")

    def _lose_all(self) -> None:
        with self._lock:
            names = list(self._pending)
        for name in names:
            self._lose(name)

    def _keep(self) -> None:
        """Connects, reads to the end of the connection, and starts over."""
        while not self._closing:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(self.path)
                with self._writing:  # Who sees the hello may send at once, and nobody before it.
                    self._end = end
                    end.sendall(_encoded({"type": "hello", "name": "stub", "pid": os.getpid()}))
                    end.sendall(_encoded(STATS))
                with end.makefile("rb") as lines:
                    for line in lines:
                        self._hear(json.loads(line))
            except OSError:
                pass  # The engine is away.
            except Exception as error:  # A line that is none: connect again.
                _complain(error)
            self._end = None
            end.close()
            self._lose_all()
            time.sleep(LOOK_S)

    def _hear(self, message: dict[str, Any]) -> None:
        kind, name = message["type"], message.get("id")
        if kind == "stats":
            try:
                self._gauges.set(message["values"])
            except Exception as error:  # Numbers must not take the requests with them.
                _complain(error)
        elif kind == "tokens":
            with self._lock:
                waiting = self._pending.get(name or "")
            if waiting is not None:
                waiting.part(message["tokens"], message["text"])
        elif kind in ("finish", "error") and (pending := self._take(name or "")) is not None:
            if kind == "error":
                pending.fail(message["code"], message["reason"])
            elif message["finish"] in ("refused", "error"):
                pending.fail(message["finish"], message["reason"])
            else:
                pending.finish(message["finish"], message["reason"])

    def _watch(self) -> None:
        """Cancels what nobody waits for any more, and asks for the engine's numbers."""
        asked = 0.0
        server = os.getppid()
        while not self._closing:
            time.sleep(LOOK_S)
            if os.getppid() != server:
                os._exit(1)  # It was killed: nobody is there to serve.
            with self._lock:
                there = list(self._pending.items())
            for name, pending in there:
                if pending.left() and self._take(name) is not None:
                    self._send(_encoded({"type": "cancel", "id": name}))
                    pending.fail("cancelled", "the client left")
            if time.monotonic() - asked > GAUGES_S:
                asked = time.monotonic()
                self._send(_encoded(STATS))


class _Gauges:
    """The engine's numbers among the server's metrics: labcore_engine{value="free"}."""

    def __init__(self) -> None:
        self._family = pb_utils.MetricFamily(
            name="labcore_engine",
            description="Numbers of the engine behind the model",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._metrics: dict[str, Any] = {}

    def set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if name not in self._metrics:
                    self._metrics[name] = self._family.Metric(labels={"value": name})
                self._metrics[name].set(float(value))


def _read(request: Any) -> tuple[dict[str, Any], bool]:
    """(the engine's submit message without its id, whether to stream). Raises ValueError."""
    # What the configuration does not name comes from generate as a parameter, and would be lost.
    told = json.loads(request.parameters() or "{}")
    unknown = [name for name in told if name != "id" and not name.startswith("triton_")]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no input; there are {', '.join(INPUTS)}")
    prompt = _one(request, "text_input")
    if prompt is None:
        raise ValueError("text_input is missing")
    message: dict[str, Any] = {"type": "submit", "prompt": _decoded("text_input", prompt)}
    for name, kind in PLAIN.items():
        value = _one(request, name)
        if value is not None:
            message[name] = kind(value)
            if message[name] - message[name] != 0:
                raise ValueError(f"{name} must be finite, got {message[name]}")
    tensor = pb_utils.get_input_tensor_by_name(request, "stop")
    if tensor is not None:
        message["stop"] = [_decoded("stop", value) for value in tensor.as_numpy().reshape(-1)]
    stream = _one(request, "stream")
    return message, True if stream is None else bool(stream)


def _one(request: Any, name: str) -> Any:
    """The one value of an input, None where it is absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if len(values) != 1:
        raise ValueError(f"{name} must hold one value, got {len(values)}")
    return values[0]


def _decoded(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {error}") from None


def _response(tokens: list[int], text: str, finish: str, reason: str) -> Any:
    np = pb_utils.np
    texts = {"text_output": text, "finish_reason": finish, "reason": reason}
    tensors = [
        pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))
        for name, value in texts.items()
    ]
    tensors.append(pb_utils.Tensor("token_ids", np.array(tokens, dtype=np.int32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def _complain(error: Exception) -> None:
    """A line in the server's log."""
    sys.stderr.write(f"model.py: {type(error).__name__}: {error}\n")


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
