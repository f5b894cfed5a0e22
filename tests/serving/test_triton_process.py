"""An engine behind its socket: what it answers, whom it serves, and how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import pretrained, shipped_tokenizer
from labcore.serving.triton.client import EngineClient, ServerError
from labcore.serving.triton.process import EngineServer
from tests.serving.standin import StandIn, expected, until


@contextmanager
def served(path: Path, **options: Any) -> Iterator[StandIn]:
    engine: Any = StandIn(**options)
    server, ended = EngineServer(engine, path), threading.Event()
    thread = threading.Thread(target=server.serve, args=(ended.is_set,))
    thread.start()
    try:
        yield engine
    finally:
        ended.set()
        thread.join()
        assert not path.exists()


def tokens_of(client: EngineClient, prompt: str, count: int) -> list[int]:
    parts = list(client.submit(prompt, max_tokens=count))
    assert parts[-1].finish == "length"
    return [token for part in parts for token in part.tokens]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b"[1]", "invalid", "must be a JSON object, got a list"),
        (b"{", "invalid", "Expecting"),
        (b"\xff", "invalid", "utf-8"),
        (b"[" * 100_000, "invalid", "recursion"),
        (b'{"type": "subm"}', "invalid", "did you mean 'submit'"),
        (b'{"type": "submit", "prompt": "x"}', "invalid", "id must be a string"),
        (b'{"type": "submit", "id": "a", "prompt": "x", "top": 3}', "invalid", "field of submit"),
        (b'{"type": "submit", "id": "a"}', "invalid", "at least one token"),
        (b'{"type": "submit", "id": "a", "prompt": "x", "timeout": 0}', "invalid", "above 0"),
        (b'{"type": "submit", "id": "a", "prompt": "x", "top_p": 2}', "invalid", "top_p must be"),
        (b'{"type": "submit", "id": "a", "prompt": "x", "top_k": "9"}', "invalid", "top_k must"),
        (b'"' + b"x" * (1 << 20) + b'"', "invalid", "at most 1048576 bytes"),
    ],
)
def test_a_malformed_line_is_an_error_and_the_connection_goes_on(
    path: Path, line: bytes, code: str, words: str
) -> None:
    with served(path), EngineClient(path) as client:
        client._end.sendall(line + b"\n")
        told = client._read()
        assert (told["type"], told["code"]) == ("error", code) and words in told["reason"], told
        assert tokens_of(client, "next", 3) == expected("next", 3)


def test_a_line_without_end_ends_its_connection_alone(path: Path) -> None:
    with served(path), EngineClient(path) as other, EngineClient(path) as client:
        with pytest.raises(OSError):
            while True:
                client._end.sendall(b"x" * (1 << 20))
        assert tokens_of(other, "next", 3) == expected("next", 3)


def test_ids_belong_to_their_connection_and_a_full_queue_is_said(path: Path) -> None:
    with served(path, max_num_seqs=1, waiting=1, delay=0.001) as engine:
        clients = [EngineClient(path) for _ in range(3)]
        runs = clients[0].submit("runs", max_tokens=9000)
        assert next(runs).tokens
        waits = threading.Thread(target=lambda: list(clients[1].submit("waits", max_tokens=2)))
        waits.start()
        assert until(lambda: engine.waiting)
        with pytest.raises(ServerError, match="at most 1 requests may wait") as caught:
            list(clients[2].submit("too many", max_tokens=1))
        assert caught.value.status == "overloaded"
        clients[0].close()  # its request is cancelled, and the waiting one runs
        waits.join()
        assert until(lambda: engine.idle)
        for client in clients[1:]:
            client.close()


def test_a_client_that_does_not_read_is_lost_and_holds_nobody_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labcore.serving.triton.process.UNREAD", 10_000)
    with served(path) as engine, EngineClient(path) as other:
        deaf = EngineClient(path)
        deaf._send({"type": "submit", "id": "r", "prompt": "deaf", "max_tokens": 10_000})
        assert until(lambda: engine.running)
        assert tokens_of(other, "next", 30) == expected("next", 30)
        assert until(lambda: engine.idle)
        deaf.close()


def test_a_path_in_use_or_too_long_is_refused(path: Path) -> None:
    engine: Any = StandIn()
    path.write_text("a file")
    for wrong in (path, path.with_name("x" * 200)):
        with pytest.raises(ValueError, match="path must be free and short enough"):
            EngineServer(engine, wrong)
    path.unlink()
    with served(path), pytest.raises(ValueError, match="another engine listens on"):
        EngineServer(engine, path)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with served(path), EngineClient(path) as client:
        assert tokens_of(client, "x", 2) == expected("x", 2)


@pytest.mark.long
def test_the_program_serves_the_model_and_ends_with_its_parent(path: Path) -> None:
    model, tokenizer = pretrained("target"), shipped_tokenizer()
    ids = [tokenizer.encode("def f(x):\n")]
    alone = generate(model, ids, SamplingConfig(max_tokens=9), tokenizer=tokenizer)
    command = [sys.executable, "-m", "labcore.serving.triton.process", "--attached"]
    with subprocess.Popen(
        [*command, "--socket", str(path), "--threads", "1"], stdin=subprocess.PIPE
    ) as program:
        assert until(path.exists)
        with EngineClient(path) as client:
            parts = list(client.submit("def f(x):\n", max_tokens=9))
            assert "".join(part.text for part in parts) == (alone.texts or [""])[0]
            assert client.stats()["finished_length"] == 1
        assert program.stdin is not None
        program.stdin.close()
        assert program.wait(60) == 0
    refused = subprocess.run(
        [*command, "--socket", str(path), "--model", "nowhere"], capture_output=True, text=True
    )
    assert refused.returncode == 1 and "model must be target, draft or" in refused.stderr


def test_the_clients_errors_are_sentences(path: Path) -> None:
    with pytest.raises(ConnectionError, match="no engine listens on"):
        EngineClient(path)
