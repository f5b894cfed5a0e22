"""The model that the Triton Inference Server's python backend loads: a bridge to one engine.

The server copies nothing of labcore: this file runs in the server's own environment, with the
standard library and what the backend provides. The model is decoupled: `execute` hands each request
to the engine and returns at once. A thread reads the engine's lines from a Unix socket and sends a
response for each, the last one with the final flag. When the engine dies, the requests that it had
end with an error; those that come while it is away are sent once it is back.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# Only the server provides this module, which also provides numpy.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

__all__ = ["Bridge", "Pending", "TritonPythonModel"]

LIMIT = 1 << 20  # the engine's limit on the bytes of a line
LOOK_S = 0.05  # between checks for clients that left, and between attempts to connect
WAITING = 1024  # requests that wait for an absent engine
STATS_S = 1.0  # between questions for the engine's statistics
NUMBERS = {
    "max_tokens": int, "temperature": float, "top_k": int, "top_p": float,
    "repetition_penalty": float, "seed": int, "priority": int, "timeout": float,
}  # fmt: skip
INPUTS = ("text_input", *NUMBERS, "stop", "stream")


class TritonPythonModel:
    """The class that the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine, whose socket is in the model's configuration."""
        config = json.loads(args["model_config"])
        self.bridge = Bridge(config["parameters"]["socket"]["string_value"])

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the bridge, whose threads send the responses later."""
        for request in requests:
            pending = Pending(request.get_response_sender())
            try:
                pending.message, pending.stream = read(request)
            except Exception as error:  # one request's fault must not affect the others
                pending.fail("INVALID_ARG", str(error))
            else:
                self.bridge.submit(pending)

    def finalize(self) -> None:
        """Called when the server unloads the model."""
        self.bridge.close()


class Pending:
    """One request of the server: sends its responses, the final one exactly once."""

    def __init__(self, sender: Any) -> None:
        self.sender, self.stream = sender, True
        self.message: dict[str, Any] = {}
        self.sent = False  # to the engine
        self.came = time.monotonic()
        self._kept: tuple[list[int], str] = ([], "")  # the output so far, unless it streams
        self._lock = threading.Lock()
        self._done = self._refused = False

    def part(self, tokens: list[int], text: str) -> None:
        """Send new tokens and their text, or keep them for the one response at the end."""
        if self.stream:
            self._send(response(tokens, text, "", ""))
        else:
            self._kept = (self._kept[0] + tokens, self._kept[1] + text)

    def finish(self, finish: str, reason: str) -> None:
        """End the output."""
        self._send(response(*self._kept, finish, reason), last=True)

    def fail(self, code: str, reason: str) -> None:
        """End the request with an error; code: of pb_utils.TritonError."""
        error = pb_utils.TritonError(reason, getattr(pb_utils.TritonError, code))
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), last=True)

    def seconds_left(self) -> float | None:
        """Return the seconds until its deadline, or None without one."""
        seconds = self.message.get("timeout")
        return None if seconds is None else self.came + seconds - time.monotonic()

    def abandoned(self) -> bool:
        """Return whether nobody hears the rest: the client left, or the server took no response."""
        with self._lock:
            try:
                return self._refused or (not self._done and bool(self.sender.is_cancelled()))
            except Exception:  # the server no longer knows the request
                return True

    def _send(self, answer: Any, *, last: bool = False) -> None:
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            if self._done:
                return
            self._done = last
            try:
                self.sender.send(answer, flags=final if last else 0)
            except Exception as error:  # the other requests must go on
                sys.stderr.write(f"model.py: {type(error).__name__}: {error}\n")
                self._done = self._refused = True
                with suppress(Exception):  # without a final flag, the client would wait forever
                    self.sender.send(flags=final)


class Bridge:
    """The connection to the engine on the socket `path`, and the requests that wait for it."""

    def __init__(self, path: str) -> None:
        self.path, self._count = path, 0
        self._pending: dict[str, Pending] = {}
        self._lock = threading.Lock()  # of the connection and of what is pending
        self._end: socket.socket | None = None  # None while the engine is away
        self._closing = False
        self._gauges: dict[str, Any] = {}
        self._family = pb_utils.MetricFamily(
            name="labcore_engine",
            description="Statistics of the engine behind the model",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        works = (self._keep, self._watch)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def submit(self, pending: Pending) -> None:
        """Send a request to the engine now, or once the engine is back."""
        if (size := len(json.dumps(pending.message))) > LIMIT - 64:
            pending.fail("INVALID_ARG", f"a request must have at most {LIMIT} bytes, got {size}")
            return
        with self._lock:
            self._count += 1
            pending.message["id"] = name = f"t{self._count}"
            self._pending[name] = pending
            if self._end is not None:
                pending.sent = True
                self._write(pending.message)
            elif len(self._pending) > WAITING:
                del self._pending[name]
                pending.fail("UNAVAILABLE", "the engine is away, and many requests wait for it")

    def close(self) -> None:
        """End the connection and every request."""
        self._closing = True
        with self._lock, suppress(OSError):
            if self._end is not None:
                self._end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(2)
        self._lose(everything=True)

    def _write(self, message: dict[str, Any]) -> None:
        """Write a line; if that fails, end the connection, because half a line may be sent."""
        if self._end is None:
            return
        try:
            self._end.sendall(json.dumps(message).encode("ascii") + b"\n")
        except OSError:
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)  # the reader ends the requests

    def _lose(self, *, everything: bool = False) -> None:
        """End the requests that the engine had when it died."""
        with self._lock:
            lost = [one for one, it in self._pending.items() if it.sent or everything]
            gone = [self._pending.pop(name) for name in lost]
        for pending in gone:
            pending.fail("UNAVAILABLE", "the engine is gone; send the request again")

    def _keep(self) -> None:
        """Connect, read until the connection ends, and start over."""
        while not self._closing:
            end = socket.socket(socket.AF_UNIX)
            # A stopped engine must not hold up those who write; reading may wait.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 5, 0))
            try:
                end.connect(self.path)
                with self._lock:
                    self._end = end
                    self._write({"type": "stats"})  # answered before any request is
                    for pending in self._pending.values():  # came while the engine was away
                        if (left := pending.seconds_left()) is None or left > 0:
                            pending.sent = True
                            more = {} if left is None else {"timeout": left}
                            self._write({**pending.message, **more})
                with end.makefile("rb") as lines:
                    for line in lines:
                        self._hear(json.loads(line))
            except Exception as error:
                if not isinstance(error, OSError):  # else the engine is away
                    sys.stderr.write(f"model.py: {type(error).__name__}: {error}\n")
            with self._lock:
                self._end = None
            end.close()
            self._lose()
            time.sleep(LOOK_S)

    def _hear(self, message: dict[str, Any]) -> None:
        kind, name = message["type"], str(message.get("id"))
        if kind == "stats":
            for value, number in message["values"].items():
                if value not in self._gauges:
                    self._gauges[value] = self._family.Metric(labels={"value": value})
                with suppress(OverflowError):
                    self._gauges[value].set(float(number))
            return
        with self._lock:
            pending = self._pending.get(name) if kind == "tokens" else self._pending.pop(name, None)
        if pending is None:
            return
        if kind == "tokens":
            pending.part(message["tokens"], message["text"])
        elif kind == "finish" and message["finish"] != "error":
            pending.finish(message["finish"], message["reason"])
        else:
            codes = {"overloaded": "UNAVAILABLE", "invalid": "INVALID_ARG"}
            pending.fail(codes.get(message.get("code", ""), "INTERNAL"), message["reason"])

    def _watch(self) -> None:
        """Cancel requests whose client left, ask for statistics, and exit with the server."""
        server, asked = os.getppid(), 0.0
        while not self._closing:
            time.sleep(LOOK_S)
            if os.getppid() != server:
                os._exit(1)  # the server was killed
            with self._lock:
                there = list(self._pending.items())
            for name, pending in there:
                with self._lock:  # once it is sent, the engine looks at the deadline
                    left = None if pending.sent else pending.seconds_left()
                    late = left is not None and left <= 0
                    if late:
                        self._pending.pop(name, None)
                if late:
                    pending.finish("deadline", "the engine was away")
                if pending.abandoned():
                    with self._lock:
                        self._pending.pop(name, None)
                        self._write({"type": "cancel", "id": name})
                    pending.fail("CANCELLED", "the client disconnected")
            if time.monotonic() - asked > STATS_S:
                asked = time.monotonic()
                with self._lock:
                    self._write({"type": "stats"})


def read(request: Any) -> tuple[dict[str, Any], bool]:
    """Return the engine's submit message, and whether to stream.

    Raises ValueError if an input is unknown, missing or malformed.
    """
    # /generate passes inputs that the configuration doesn't list as parameters.
    told = json.loads(request.parameters() or "{}")
    unknown = [name for name in told if name != "id" and not name.startswith("triton_")]
    if unknown:
        raise ValueError(f"unknown input {unknown[0]!r}; the inputs are {', '.join(INPUTS)}")
    values = {}
    for name in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is not None:
            values[name] = list(tensor.as_numpy().reshape(-1))
            if name != "stop" and len(values[name]) != 1:
                raise ValueError(f"{name} must hold one value, got {len(values[name])}")
    if "text_input" not in values:
        raise ValueError("text_input is missing")
    prompt = text_of("text_input", values["text_input"][0])
    message: dict[str, Any] = {"type": "submit", "prompt": prompt}
    message |= {name: kind(values[name][0]) for name, kind in NUMBERS.items() if name in values}
    if "stop" in values:
        message["stop"] = [text_of("stop", value) for value in values["stop"]]
    return message, bool(values.get("stream", [True])[0])


def text_of(name: str, value: Any) -> str:
    """Return a string input as text; ValueError unless it is UTF-8."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {error}") from None


def response(tokens: list[int], text: str, finish: str, reason: str) -> Any:
    """Return one response with the model's four outputs."""
    np = pb_utils.np
    texts = {"text_output": text, "finish_reason": finish, "reason": reason}
    tensors = [
        pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))
        for name, value in texts.items()
    ]
    tensors.append(pb_utils.Tensor("token_ids", np.array(tokens, dtype=np.int32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)
