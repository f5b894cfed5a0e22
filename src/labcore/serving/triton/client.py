"""Clients: server-sent events over HTTP, gRPC streaming, and the engine's own socket.

Every call sends a deadline with its request. The engine ends the request at the deadline with
finish "deadline"; a TimeoutError means that the server itself didn't answer. Leaving an iterator
early, by `close()` or `break`, closes the connection. The server notices that when it next writes
to the stream. It doesn't notice an abandoned `generate`: there the deadline ends the work.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.checks import positive

__all__ = [
    "Addresses",
    "EngineClient",
    "ServerError",
    "Streamed",
    "examples",
    "generate",
    "generate_stream",
    "grpc_stream",
    "metrics",
    "ready",
]

SLACK_S = 5.0  # for the engine's deadline message to arrive
# The model's inputs: tritonclient's name of the data type, and numpy's.
INPUTS = {
    "text_input": ("BYTES", "object"),
    "max_tokens": ("INT32", "int32"),
    "temperature": ("FP32", "float32"),
    "top_k": ("INT32", "int32"),
    "top_p": ("FP32", "float32"),
    "repetition_penalty": ("FP32", "float32"),
    "stop": ("BYTES", "object"),
    "seed": ("INT64", "int64"),
    "priority": ("INT32", "int32"),
    "timeout": ("FP32", "float32"),
    "stream": ("BOOL", "bool"),
}


class ServerError(RuntimeError):
    """The server or the model answered with an error.

    status: the HTTP status number or the gRPC status name; "" if a stream sent none.
    """

    def __init__(self, reason: str, *, status: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where a server listens: one host, three ports."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True, kw_only=True, slots=True)
class Streamed:
    """One part of an output: new text and token ids; finish is "" until the last part."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: str = ""


CURL = """\
curl -sN {http}/v2/models/lm/generate_stream \\
  -d '{{"text_input": "{prompt}", "max_tokens": 24}}'

curl -s {http}/v2/models/lm/generate \\
  -d '{{"text_input": "{prompt}", "max_tokens": 24, "stream": false}}'; echo

curl -s {metrics}/metrics | grep -E '^(labcore_engine|nv_inference_request)'
"""


def examples(addresses: Addresses) -> str:
    """Return shell commands that query the server."""
    host = f"http://{addresses.host}"
    return CURL.format(
        http=f"{host}:{addresses.http}",
        metrics=f"{host}:{addresses.metrics}",
        prompt="def area(width, height):\\n",
    )


def get(addresses: Addresses, path: str, *, port: int | None = None, timeout: float = 1.0) -> str:
    """Return the body of GET `path`. Raises OSError, or ServerError if the status isn't 200."""
    connection = http.client.HTTPConnection(
        addresses.host, addresses.http if port is None else port, timeout=timeout
    )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"the connection to the server broke: {error!r}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise ServerError(text or answer.reason, status=str(answer.status))
    return text


def ready(addresses: Addresses, *, timeout: float = 1.0) -> bool:
    """Return whether the server reports that it accepts requests."""
    try:
        get(addresses, "/v2/health/ready", timeout=timeout)
    except (OSError, ServerError):
        return False
    return True


def metrics(addresses: Addresses, *, timeout: float = 5.0) -> dict[str, float]:
    """Return the server's metrics by name, with labels in Prometheus's format."""
    lines = get(addresses, "/metrics", port=addresses.metrics, timeout=timeout).splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def generate(
    addresses: Addresses, prompt: str, *, timeout: float = 30.0, **wanted: Any
) -> Streamed:
    """Return the whole output in one answer, by POST /v2/models/lm/generate.

    The server reports an error if a decoupled model sends two responses to this address. The input
    `stream` is therefore false here, which makes the model send one.
    """
    body = {"text_input": prompt, "timeout": timeout, **wanted, "stream": False}
    parts = list(_events(addresses, "/v2/models/lm/generate", body, timeout))
    return parts[-1]


def generate_stream(
    addresses: Addresses, prompt: str, *, timeout: float = 30.0, **wanted: Any
) -> Iterator[Streamed]:
    """Yield the parts of an output as they arrive, by POST /v2/models/lm/generate_stream.

    wanted: inputs of the model, such as max_tokens, temperature, seed. timeout: seconds for the
    whole output. The first `next` sends the request. Before the first part, any error of the
    model, even a full queue, is HTTP status 400. After it, an error is an event in a response
    whose status was 200. Raises ServerError, TimeoutError and ConnectionError.
    """
    body = {"text_input": prompt, "timeout": timeout, **wanted}
    return _events(addresses, "/v2/models/lm/generate_stream", body, timeout)


def _events(
    addresses: Addresses, path: str, body: dict[str, Any], timeout: float
) -> Iterator[Streamed]:
    seconds = positive("timeout", timeout) + SLACK_S
    ends = time.monotonic() + seconds
    connection = http.client.HTTPConnection(addresses.host, addresses.http, timeout=seconds)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        transport: socket.socket = connection.sock
        answer = connection.getresponse()
        if answer.status != 200:
            raise ServerError(_error_of(answer.read()), status=str(answer.status))
        finished = False
        while True:
            transport.settimeout(max(ends - time.monotonic(), 0.001))
            line = answer.readline()
            if not line:
                break
            told = line.removeprefix(b"data:").strip()
            if told:
                part = _part(json.loads(told))
                finished = finished or bool(part.finish)
                yield part
        if not finished:
            raise ConnectionError("the server closed the connection before the output's end")
    except TimeoutError:
        raise TimeoutError(f"the server did not end the output within {seconds} s") from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"the connection to the server broke: {error!r}") from None
    finally:
        connection.close()


def _part(event: dict[str, Any]) -> Streamed:
    if "error" in event:
        raise ServerError(str(event["error"]), status="200")
    ids = event.get("token_ids", [])
    return Streamed(
        text=event.get("text_output", ""),
        tokens=tuple(ids if isinstance(ids, list) else [ids]),  # a single id arrives without a list
        finish=event.get("finish_reason", ""),
        reason=event.get("reason", ""),
    )


def _error_of(body: bytes) -> str:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body.removeprefix(b"data:"))["error"])
    return body.decode("utf-8", "replace")


def grpc_stream(
    addresses: Addresses, prompt: str, *, timeout: float = 30.0, **wanted: Any
) -> Iterator[Streamed]:
    """Yield the parts of an output as they arrive, over a gRPC stream of NVIDIA's `tritonclient`.

    Arguments and errors are those of `generate_stream`. Raises ModuleNotFoundError if tritonclient
    isn't installed.
    """
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    seconds = positive("timeout", timeout) + SLACK_S
    ends = time.monotonic() + seconds
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(f"{addresses.host}:{addresses.grpc}")
    finished = False
    try:
        client.start_stream(lambda result, error: answers.put((result, error)), seconds)
        inputs = _grpc_inputs(triton, {"text_input": prompt, "timeout": timeout, **wanted})
        client.async_stream_infer("lm", inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=max(ends + SLACK_S - time.monotonic(), 0.001))
            if error is not None:
                raise ServerError(str(error.message()), status=str(error.status() or ""))
            last = result.get_response().parameters["triton_final_response"].bool_param
            if result.as_numpy("text_output") is not None:
                part = _grpc_part(result)
                finished = finished or bool(part.finish)
                yield part
            if last:
                break
        if not finished:
            raise ConnectionError("the server ended the stream before the output's end")
    except queue.Empty:
        raise TimeoutError(f"the server did not end the output within {seconds} s") from None
    except ServerError as error:
        if "Deadline Exceeded" in str(error) or "DEADLINE" in error.status:
            raise TimeoutError(f"the server did not end the output within {seconds} s") from None
        raise
    except InferenceServerException as error:
        raise ConnectionError(f"the connection to the server broke: {error}") from None
    finally:
        client.stop_stream(cancel_requests=not finished)
        client.close()


def _grpc_inputs(triton: Any, wanted: dict[str, Any]) -> list[Any]:
    import numpy

    inputs = []
    for name, value in wanted.items():
        if name not in INPUTS:
            raise ValueError(f"an input must be one of {', '.join(INPUTS)}, got {name!r}")
        kind, dtype = INPUTS[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if kind == "BYTES":
            values = [v if isinstance(v, bytes) else str(v).encode("utf-8") for v in values]
        told = triton.InferInput(name, [len(values)], kind)
        told.set_data_from_numpy(numpy.array(values, dtype=dtype))
        inputs.append(told)
    return inputs


def _grpc_part(result: Any) -> Streamed:
    texts = {
        name: result.as_numpy(name).reshape(-1)[0].decode("utf-8")
        for name in ("text_output", "finish_reason", "reason")
    }
    return Streamed(
        text=texts["text_output"],
        tokens=tuple(int(token) for token in result.as_numpy("token_ids").reshape(-1)),
        finish=texts["finish_reason"],
        reason=texts["reason"],
    )


def unix_socket() -> socket.socket:
    """Return a new Unix socket. Raises RuntimeError on Windows, where Python has none."""
    if not hasattr(socket, "AF_UNIX"):
        raise RuntimeError(
            "an engine in a separate process needs Linux or macOS; use labcore.serving.Service in "
            "this process, or WSL"
        )
    return socket.socket(socket.AF_UNIX)


class EngineClient:
    """The engine's own socket, without a server: one request at a time, for measurements.

    timeout: seconds for each line. Raises ConnectionError if no engine listens there.
    """

    def __init__(self, path: str | Path, *, timeout: float = 30.0) -> None:
        self._end = unix_socket()
        self._end.settimeout(positive("timeout", timeout))
        try:
            self._end.connect(str(path))
        except OSError as error:
            self._end.close()
            raise ConnectionError(f"no engine listens on {path} ({error})") from None
        self._lines = self._end.makefile("rb")
        self._count = 0

    def submit(self, prompt: str | list[int], **wanted: Any) -> Iterator[Streamed]:
        """Yield the parts of an output. Raises ServerError if the engine refuses the request."""
        self._count += 1
        name = f"r{self._count}"
        self._send({"type": "submit", "id": name, "prompt": prompt, **wanted})
        finish = ""
        while not finish:
            told = self._read()
            if told.get("id") != name:  # of an output that was left
                continue
            if told["type"] == "error":
                raise ServerError(told["reason"], status=told["code"])
            finish = told.get("finish", "")
            yield Streamed(
                text=told.get("text", ""),
                tokens=tuple(told.get("tokens", ())),
                finish=finish,
                reason=told.get("reason", ""),
            )

    def stats(self) -> dict[str, Any]:
        """Return the engine's queues, blocks and counters by name."""
        self._send({"type": "stats"})
        values: dict[str, Any] = self._read()["values"]
        return values

    def close(self) -> None:
        """Close the connection; the engine cancels its request."""
        self._lines.close()
        self._end.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._end.sendall(json.dumps(message).encode("ascii") + b"\n")

    def _read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the connection to the engine was lost; ask again later")
        told: dict[str, Any] = json.loads(line)
        return told
