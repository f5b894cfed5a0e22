"""NVIDIA's Triton Inference Server in tests: where it is, and what is asked of it from outside.

`make server` installs it; without it the tests are skipped, and fail where CI=true. Most run in
front of the stand-in engine, whose blocks are counted from outside. The bounds on waiting are for
faults: they are long, since a machine may be busy.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from labcore.serving.triton import environment as triton_environment
from labcore.serving.triton.client import (
    Addresses,
    ServerError,
    Streamed,
    generate_stream,
)
from labcore.serving.triton.server import TritonServer
from tests.serving.standin import engine_stats, expected, until

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("LABCORE_TRITON_ENVIRONMENT", ROOT / ".venv-triton"))
CODE = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.serving.standin import main; main()"
)
STANDIN = (sys.executable, "-c", CODE, "--delay", "0.004", "--waiting", "40")
FAULT_S = 120.0
LONG_S = 300.0  # deadline of a request that must not end by itself


def need(lack: str) -> None:
    if lack and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the server: {lack}")
    if lack:
        pytest.skip(lack)


def need_client() -> None:
    try:
        import tritonclient.grpc  # noqa: F401
    except ImportError:
        need("tritonclient[grpc] is missing: install the extra `server`")


def need_server() -> None:
    need(triton_environment.missing(ENVIRONMENT))
    need_client()


@contextmanager
def standin_server(folder: Path, engine: Sequence[str] = STANDIN) -> Iterator[TritonServer]:
    """The server in front of a stand-in engine with 64 blocks, 8 slots and 40 places to wait."""
    server = TritonServer(folder, environment=ENVIRONMENT, engine=engine)
    server.start(FAULT_S)
    try:
        yield server
    finally:
        server.stop()


def stats(server: TritonServer) -> dict[str, Any]:
    return engine_stats(server.socket)


def quiet(server: TritonServer) -> bool:
    """Whether nothing runs or waits and every block is free."""
    try:
        now = stats(server)
    except OSError:
        return False
    return now["blocks_free"] == now["blocks"] and now["running"] == now["waiting"] == 0


def outcome(ask: Callable[[], Any]) -> Any:
    """What a client sees: its parts, or the error."""
    try:
        return list(ask())
    except (ServerError, OSError) as error:
        return error


def tokens_of(parts: list[Streamed]) -> list[int]:
    return [token for part in parts for token in part.tokens]


def works(server: TritonServer) -> None:
    """A request is served, and nothing is held behind it."""
    parts = list(generate_stream(server.addresses, "and now", max_tokens=3, timeout=FAULT_S))
    assert tokens_of(parts) == expected("and now", 3)
    assert until(lambda: quiet(server)), stats(server)


def post(at: Addresses, body: bytes, path: str = "/v2/models/lm/generate_stream") -> Any:
    connection = http.client.HTTPConnection(at.host, at.http, timeout=FAULT_S)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    text = answer.read().decode("utf-8", "replace")
    connection.close()
    return answer.status, text


def whole(at: Addresses, prompt: str, **wanted: Any) -> list[Streamed]:
    """The output in one answer, by POST /v2/models/lm/generate."""
    asked = json.dumps({"text_input": prompt, **wanted, "stream": False})
    status, text = post(at, asked.encode(), "/v2/models/lm/generate")
    told = json.loads(text)
    if status != 200:
        raise ServerError(told["error"], status=str(status))
    ids = told["token_ids"]
    tokens = tuple(ids if isinstance(ids, list) else [ids])
    return [Streamed(text=told["text_output"], tokens=tokens, finish=told["finish_reason"])]
