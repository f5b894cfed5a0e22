"""What is no request, sent to the real server: each is an error, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from labcore.serving.triton.client import ServerError, generate_stream, grpc_stream
from labcore.serving.triton.server import TritonServer
from tests.serving.standin import expected
from tests.serving.triton import (
    FAULT_S,
    need_server,
    outcome,
    post,
    standin_server,
    tokens_of,
    until,
    whole,
    works,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    need_server()
    with standin_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def body(**fields: Any) -> bytes:
    return json.dumps({"text_input": "x", **fields}).encode()


BODIES = [
    (b"", "document is empty"),
    (b"{", "failed to parse"),
    (b"[]", ""),
    (b'{"text_input": "\xff\xfe"}', "error"),
    (b'{"text_input": "\\ud800"}', "surrogate"),
    (b'{"max_tokens": 3}', "text_input"),
    (body(text_input=""), "prompt must hold at least one token"),
    (body(text_input=5), "non-string"),
    (body(text_input=None), "non-string"),
    (body(text_input=["x", "y"]), "text_input"),
    (body(text_input="x" * (1 << 20)), "at most 1048576 bytes"),
    (body(text_input="x" * 10_000_000), "at most 1048576 bytes"),
    (body(max_tokens="many"), "integer"),
    (body(max_tokens=2.5), "integer"),
    (body(max_tokens=True), "integer"),
    (body(max_tokens=None), "integer"),
    (body(max_tokens=-4), "max_tokens must be at least"),
    (body(max_tokens=0), "max_tokens must be at least"),
    (body(max_tokens=2**40), "error"),
    (body(max_tokens=10**6), "must fit into the pool"),
    (body(temperature=-1), "temperature must be 0"),
    (body(temperature="hot"), "error"),
    (body(top_p=0), "top_p must be"),
    (body(timeout=-1), "timeout must be above 0"),
    (body(seed=2**63), "integer"),
    (body(stop=[""]), "stop must be"),
    (body(stream="yes"), "boolean"),
    (body(max_token=3), "unknown input 'max_token'; the inputs are text_input, max_tokens"),
    (body(parameters={"depth": 3}), "unknown input 'depth'"),
]


def test_what_is_no_request_is_an_error_and_the_server_goes_on(server: TritonServer) -> None:
    at = server.addresses
    for path in ("generate_stream", "generate"):
        for sent, words in BODIES:
            status, text = post(at, sent, f"/v2/models/lm/{path}")
            assert status != 200 and words in text, (path, sent[:60], status, text)
    assert post(at, b"{}", "/v2/models/none/generate_stream")[0] != 200
    works(server)


def test_what_looks_odd_and_is_a_request_is_served(server: TritonServer) -> None:
    at = server.addresses
    prompt = "é\x00😀"
    parts = list(generate_stream(at, prompt, max_tokens=[3], seed=-1, stop="y", timeout=FAULT_S))
    assert tokens_of(parts) == expected(prompt, 3, -1)
    status, text = post(at, body(max_tokens=2, id="mine"))
    assert status == 200 and '"id":"mine"' in text  # the server's own, given back by it
    works(server)


def test_generate_without_stream_false_says_why_it_fails(
    server: TritonServer,
) -> None:
    """The server's rule for decoupled models; its error has status 200."""
    status, text = post(server.addresses, body(max_tokens=2), "/v2/models/lm/generate")
    assert status == 200 and "exactly 1 response" in text
    assert tokens_of(whole(server.addresses, "x", max_tokens=2)) == expected("x", 2)
    works(server)


def test_invalid_grpc_request_is_an_error_and_the_server_goes_on(server: TritonServer) -> None:
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    at = server.addresses
    for wanted, words in (
        ({"prompt": b"\xff\xfe"}, "must be UTF-8"),
        ({"prompt": b""}, "prompt must hold at least one token"),
        ({"prompt": b"x" * 10_000_000}, "at most 1048576 bytes"),
        ({"max_tokens": -4}, "max_tokens must be at least 1"),
        ({"max_tokens": 2**31 - 1}, "must fit into the pool"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"max_tokens": [1, 2]}, "max_tokens"),
        ({"timeout": -1.0}, "timeout must be"),
    ):
        prompt: Any = wanted.pop("prompt", "x")
        with pytest.raises((ServerError, ValueError), match=words):
            list(grpc_stream(at, prompt, **wanted))
    with pytest.raises(ValueError, match="input must be one of .*did you mean 'max_tokens'"):
        list(grpc_stream(at, "x", max_token=3))
    client = triton.InferenceServerClient(f"{at.host}:{at.grpc}")
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error))
    wrong = triton.InferInput("text_input", [1], "INT32")
    wrong.set_data_from_numpy(numpy.array([1], dtype=numpy.int32))
    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(numpy.array([b"x"], dtype=object))
    strange = triton.InferInput("max_token", [1], "INT32")
    strange.set_data_from_numpy(numpy.array([3], dtype=numpy.int32))
    asked: list[tuple[list[Any], dict[str, Any]]] = [
        ([wrong], {}),
        ([], {}),
        ([prompt, strange], {}),
        ([prompt], {"parameters": {"max_token": 3}}),
    ]
    for inputs, more in asked:
        client.async_stream_infer("lm", inputs, **more)
    assert until(lambda: len(answers) == len(asked)), answers
    assert all(isinstance(error, InferenceServerException) for error in answers)
    assert "unknown input 'max_token'" in " ".join(error.message() for error in answers)
    client.stop_stream()
    client.close()
    works(server)


def test_nobody_there_is_an_error_of_each_client(server: TritonServer) -> None:
    free = type(server.addresses)(http=1, grpc=1, metrics=1)
    for ask in (generate_stream, grpc_stream, whole):
        said = outcome(lambda ask=ask: ask(free, "x", max_tokens=1, timeout=5.0))  # type: ignore[misc]
        assert isinstance(said, Exception), said
