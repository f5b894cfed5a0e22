"""Clients: server-sent events over HTTP, gRPC streaming, and the engine's own socket.

Every call sends a deadline with its request. The engine ends the request at the deadline with
finish "deadline"; a TimeoutError means that the server itself didn't answer. Leaving an iterator
early, by `close()` or `break`, closes the connection. The server notices that when it next writes
to the stream.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.checks import one_of, positive

__all__ = [
    "Addresses",
    "ServerError",
    "Streamed",
    "engine_stream",
    "examples",
    "generate_stream",
    "grpc_stream",
    "metrics",
]

SLACK_S = 5.0  # for the engine's deadline message to arrive
CURL = """\
curl -sN http://{0.host}:{0.http}/v2/models/lm/generate_stream \\
  -d '{{"text_input": "def area(width, height):\\n", "max_tokens": 24}}'

curl -s http://{0.host}:{0.http}/v2/models/lm/generate \\
  -d '{{"text_input": "def area(width, height):\\n", "max_tokens": 24, "stream": false}}'; echo

curl -s http://{0.host}:{0.metrics}/metrics | grep -E '^(labcore_engine|nv_inference_request)'
"""


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

    def __str__(self) -> str:
        """Name all three, for people."""
        at = self.host
        return f"http://{at}:{self.http}, gRPC {at}:{self.grpc}, metrics {at}:{self.metrics}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Streamed:
    """One part of an output: new text and token ids; finish is "" until the last part."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: str = ""


def examples(addresses: Addresses) -> str:
    """Return shell commands that query the server."""
    return CURL.format(addresses)


def metrics(addresses: Addresses, *, timeout: float = 5.0) -> dict[str, float]:
    """Return the server's metrics by name, with labels in Prometheus's format.

    Raises ServerError, TimeoutError and ConnectionError.
    """
    with _opened(addresses.host, addresses.metrics, "/metrics", timeout=timeout) as answer:
        lines = answer.read().decode("utf-8").splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def generate_stream(
    addresses: Addresses, prompt: str, *, timeout: float = 30.0, **wanted: Any
) -> Iterator[Streamed]:
    """Yield the parts of an output as they arrive, by POST /v2/models/lm/generate_stream.

    wanted: inputs of the model, such as max_tokens, temperature, seed. timeout: seconds for the
    whole output. The first `next` sends the request. Before the first part, any error of the
    model, even a full queue, is HTTP status 400. After it, an error is an event in a response
    whose status was 200. Raises ServerError, TimeoutError and ConnectionError.
    """
    body = json.dumps({"text_input": prompt, "timeout": positive("timeout", timeout), **wanted})
    path, seconds, finish = "/v2/models/lm/generate_stream", timeout + SLACK_S, ""
    with _opened(addresses.host, addresses.http, path, body=body, timeout=seconds) as answer:
        for line in answer:
            if told := line.removeprefix(b"data:").strip():
                event = json.loads(told)
                if "error" in event:
                    raise ServerError(str(event["error"]), status="200")
                ids, finish = event["token_ids"], event["finish_reason"]
                yield Streamed(
                    text=event["text_output"],
                    tokens=tuple(ids if isinstance(ids, list) else [ids]),  # one has no list
                    finish=finish,
                    reason=event["reason"],
                )
    if not finish:
        raise ConnectionError("the server closed the connection before the output's end")


@contextmanager
def _opened(
    host: str, port: int, path: str, *, body: str | None = None, timeout: float
) -> Iterator[http.client.HTTPResponse]:
    """Open GET `path`, or POST with a body; errors are those of `generate_stream`."""
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=timeout)) as connection:
            connection.request("POST" if body else "GET", path, body)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    error = _error_of(answer.read()) or answer.reason
                    raise ServerError(error, status=str(answer.status))
                yield answer
    except TimeoutError:
        raise TimeoutError(f"the server did not answer within {timeout} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"no answer from {host}:{port}: {error!r}; try again") from None


def _error_of(body: bytes) -> str:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body.removeprefix(b"data:"))["error"])
    return body.decode("utf-8", "replace")


def grpc_stream(
    addresses: Addresses, prompt: str, *, timeout: float = 30.0, **wanted: Any
) -> Iterator[Streamed]:
    """Yield the parts of an output as they arrive, over a gRPC stream of NVIDIA's `tritonclient`.

    Arguments and errors are those of `generate_stream`. Raises ModuleNotFoundError if tritonclient
    isn't installed, ValueError for an unknown input.
    """
    import numpy
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException, triton_to_np_dtype

    seconds = positive("timeout", timeout) + SLACK_S
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(f"{addresses.host}:{addresses.grpc}")
    inputs, finish = [], ""
    try:
        model = client.get_model_metadata("lm", client_timeout=seconds)
        kinds = {one.name: one.datatype for one in model.inputs}
        for name, value in {"text_input": prompt, "timeout": timeout, **wanted}.items():
            kind = kinds[one_of("input", name, kinds)]
            values = value if isinstance(value, list | tuple) else [value]
            inputs.append(triton.InferInput(name, [len(values)], kind))
            inputs[-1].set_data_from_numpy(numpy.array(values, dtype=triton_to_np_dtype(kind)))
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("lm", inputs, enable_empty_final_response=True)
        while not finish:
            result, error = answers.get(timeout=seconds)
            if error is not None:
                raise ServerError(str(error.message()), status=str(error.status() or ""))
            if result.as_numpy("text_output") is None:  # the final flag alone
                raise ConnectionError("the server ended the stream before the output's end")
            text, finish, reason = (
                result.as_numpy(name)[0].decode("utf-8")
                for name in ("text_output", "finish_reason", "reason")
            )
            tokens = tuple(result.as_numpy("token_ids").tolist())
            yield Streamed(text=text, tokens=tokens, finish=finish, reason=reason)
    except queue.Empty:
        raise TimeoutError(f"the server did not answer within {seconds} s") from None
    except InferenceServerException as error:
        raise ConnectionError(f"the connection to the server broke: {error}") from None
    finally:
        client.stop_stream(cancel_requests=not finish)
        client.close()


def engine_stream(
    path: str | Path, prompt: str | list[int], *, timeout: float = 30.0, **wanted: Any
) -> Iterator[Streamed]:
    """Yield the parts of an output as they arrive over the engine's own socket, without a server.

    Arguments and errors are those of `generate_stream`; the path is that of the socket, and the
    prompt may be token ids. Raises RuntimeError on Windows.
    """
    message = {"type": "submit", "prompt": prompt, "timeout": timeout, **wanted}
    with unix_socket() as end:
        end.settimeout(positive("timeout", timeout) + SLACK_S)
        try:
            end.connect(str(path))
        except OSError as error:
            raise ConnectionError(f"no engine listens on {path} ({error})") from None
        end.sendall(json.dumps(message).encode("ascii") + b"\n")
        with end.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                finish, reason = told["finish"], told["reason"]
                if "code" in told:
                    raise ServerError(reason, status=told["code"])
                tokens = tuple(told["tokens"])
                yield Streamed(text=told["text"], tokens=tokens, finish=finish, reason=reason)
                if finish:
                    return
    raise ConnectionError("the engine closed the connection before the output's end")


def unix_socket() -> socket.socket:
    """Return a new Unix socket. Raises RuntimeError on Windows, where Python has none."""
    if not hasattr(socket, "AF_UNIX"):
        raise RuntimeError(
            "an engine in a separate process needs Linux or macOS; use labcore.serving.Service in "
            "this process, or WSL"
        )
    return socket.socket(socket.AF_UNIX)
