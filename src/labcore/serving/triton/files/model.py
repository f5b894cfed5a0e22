"""The model that the Triton Inference Server's python backend loads: a bridge to one engine.

This file is copied into the model repository as `1/model.py` and runs in the server's environment.
It imports only the standard library and what the backend provides.

The model is decoupled: `execute` hands each request to the engine and returns. A thread reads the
engine's lines from a Unix socket and sends a response for each, the last with the final flag. The
bridge cancels a request whose client has disconnected. If it loses the engine, it ends the requests
with an error and reconnects. The process exits with the server that started it.
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

# Only the server provides this module, which also provides numpy.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

__all__ = ["Bridge", "Pending", "TritonPythonModel"]

LIMIT = 1 << 20  # the engine's limit on the bytes of a line
LOOK_S = 0.05  # between checks for disconnected clients, and between attempts to connect
GAUGES_S = 1.0  # between requests for the engine's statistics
STATS = {"type": "stats", "id": "gauges"}
# Inputs that go to the engine under their own names, and how to convert numpy values to JSON.
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
# Names in pb_utils.TritonError, which doesn't exist yet while this file is imported.
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
    """The class that the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine, whose socket is in the model's configuration. Called once."""
        config = json.loads(args["model_config"])
        self.bridge = Bridge(config["parameters"]["socket"]["string_value"])
        self.bridge.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the bridge, whose threads send the responses later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                message, stream = _read(request)
            except ValueError as error:
                Pending(sender, True).fail("invalid", str(error))
            except Exception as error:  # one request's fault must not affect the others
                Pending(sender, True).fail("internal", f"{type(error).__name__}: {error}")
            else:
                self.bridge.submit(message, Pending(sender, stream))

    def finalize(self) -> None:
        """Close the bridge. Called when the server unloads the model."""
        self.bridge.close()


class Pending:
    """One request of the server: sends its responses, and its final response exactly once.

    stream: whether to send each part as it arrives; otherwise all parts are sent as one at the end.
    """

    def __init__(self, sender: Any, stream: bool) -> None:
        self.sender = sender
        self.stream = stream
        self._kept: list[tuple[list[int], str]] = []
        self._done = False
        self._lock = threading.Lock()

    def part(self, tokens: list[int], text: str) -> None:
        """Add new tokens and their text."""
        with self._lock:
            if not self._done and self.stream:
                self._send(_response(tokens, text, "", ""))
            elif not self._done:
                self._kept.append((tokens, text))

    def finish(self, finish: str, reason: str) -> None:
        """End the output."""
        tokens = [token for part in self._kept for token in part[0]]
        text = "".join(part[1] for part in self._kept)
        self._end(_response(tokens, text, finish, reason))

    def fail(self, code: str, reason: str) -> None:
        """End the request with an error."""
        kind = getattr(pb_utils.TritonError, CODES.get(code, "INTERNAL"))
        error = pb_utils.TritonError(reason, kind)
        self._end(pb_utils.InferenceResponse(output_tensors=[], error=error))

    def left(self) -> bool:
        """Return whether the client has disconnected, which only the server can see."""
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
        """Give the server a response; if it refuses, the other requests continue."""
        try:
            self.sender.send(response, flags=flags)
        except Exception as error:
            _complain(error)


class Bridge:
    """The connection to the engine on the socket `path`, and the requests that wait for it."""

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
        """Connect, and reconnect whenever the connection is lost."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close the connection, and end the waiting requests with an error."""
        self._closing = True
        end = self._end
        if end is not None:
            _hang_up(end)
        for thread in self._threads:
            thread.join(2)
        self._lose_all()

    def submit(self, message: dict[str, Any], pending: Pending) -> None:
        """Send a request to the engine; `pending` gets the outcome in any case."""
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
        """Send a line to the engine unless its request was lost meanwhile; return False on loss."""
        end = self._end
        if end is None:
            return False
        try:
            with self._writing:
                if name and name not in self._pending:
                    return True  # its client already got an error, and this is a new engine
                end.sendall(line)
        except OSError:
            _hang_up(end)  # wakes the reader, which ends the requests in flight
            return False
        return self._end is end

    def _take(self, name: str) -> Pending | None:
        with self._lock:
            return self._pending.pop(name, None)

    def _lose(self, name: str) -> None:
        pending = self._take(name)
        if pending is not None:
            pending.fail("lost", "the engine is restarting; send the request again")

    def _lose_all(self) -> None:
        with self._lock:
            names = list(self._pending)
        for name in names:
            self._lose(name)

    def _keep(self) -> None:
        """Connect, read until the connection ends, and start over."""
        while not self._closing:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(self.path)
                with self._writing:  # no request may be sent before the hello
                    self._end = end
                    end.sendall(_encoded({"type": "hello", "name": "stub", "pid": os.getpid()}))
                    end.sendall(_encoded(STATS))
                with end.makefile("rb") as lines:
                    for line in lines:
                        self._hear(json.loads(line))
            except OSError:
                pass  # the engine is away
            except Exception as error:  # an invalid line: reconnect
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
            except Exception as error:  # statistics must not end the requests
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
        """Cancel requests that nobody waits for, and ask for the engine's statistics."""
        asked = 0.0
        server = os.getppid()
        while not self._closing:
            time.sleep(LOOK_S)
            if os.getppid() != server:
                os._exit(1)  # the server was killed
            with self._lock:
                there = list(self._pending.items())
            for name, pending in there:
                if pending.left() and self._take(name) is not None:
                    self._send(_encoded({"type": "cancel", "id": name}))
                    pending.fail("cancelled", "the client disconnected")
            if time.monotonic() - asked > GAUGES_S:
                asked = time.monotonic()
                self._send(_encoded(STATS))


class _Gauges:
    """The engine's statistics in the server's metrics: labcore_engine{value="free"}."""

    def __init__(self) -> None:
        self._family = pb_utils.MetricFamily(
            name="labcore_engine",
            description="Statistics of the engine behind the model",
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
    """Return the engine's submit message without its id, and whether to stream.

    Raises ValueError if an input is unknown, missing or invalid.
    """
    # generate passes inputs that the configuration doesn't list as parameters; don't ignore them.
    told = json.loads(request.parameters() or "{}")
    unknown = [name for name in told if name != "id" and not name.startswith("triton_")]
    if unknown:
        raise ValueError(f"unknown input {unknown[0]!r}; the inputs are {', '.join(INPUTS)}")
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
    """Return the single value of an input, or None if it is absent."""
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
    """Write a line to the server's log."""
    sys.stderr.write(f"model.py: {type(error).__name__}: {error}\n")


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
