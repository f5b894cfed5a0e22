"""An engine behind its socket: what it answers, whom it serves, and how it ends."""

from __future__ import annotations

import json
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
from labcore.serving.triton.client import ServerError, engine_stream
from labcore.serving.triton.process import EngineServer
from tests.serving.standin import StandIn, engine_stats, expected, until


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


def tokens_of(path: Path, prompt: str, count: int) -> list[int]:
    parts = list(engine_stream(path, prompt, max_tokens=count))
    assert parts[-1].finish == "length"
    return [token for part in parts for token in part.tokens]


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(120)
        end.connect(str(path))
        yield end


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", "must be a JSON object, got a list"),
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000, "while decoding a JSON array"),
        (b'{"type": "subm"}', "did you mean 'submit'"),
        (b'{"type": "submit", "prompt": "x", "top": 3}', "field of submit"),
        (b'{"type": "submit"}', "at least one token"),
        (b'{"type": "submit", "prompt": "x", "timeout": 0}', "above 0"),
        (b'{"type": "submit", "prompt": "x", "top_p": 2}', "top_p must be"),
        (b'{"type": "submit", "prompt": "x", "top_k": "9"}', "top_k must"),
        (b'"' + b"x" * (1 << 20) + b'"', "at most 1048576 bytes"),
    ],
)
def test_a_malformed_line_is_an_error_and_the_connection_goes_on(
    path: Path, line: bytes, words: str
) -> None:
    with served(path), connected(path) as end, end.makefile("rb") as lines:
        end.sendall(line + b"\n")
        told = json.loads(lines.readline())
        assert (told["finish"], told["code"]) == ("error", "INVALID_ARG") and words in told[
            "reason"
        ]
        end.sendall(b'{"type": "submit", "prompt": "next", "max_tokens": 3}\n')
        tokens = [token for _ in range(3) for token in json.loads(lines.readline())["tokens"]]
        assert tokens == expected("next", 3)


def test_a_line_without_end_ends_its_connection_alone(path: Path) -> None:
    with served(path), connected(path) as end:
        with pytest.raises(OSError):
            while True:
                end.sendall(b"x" * (1 << 20))
        assert tokens_of(path, "next", 3) == expected("next", 3)


def test_a_leaving_client_is_canceled_and_a_full_queue_reported(path: Path) -> None:
    with served(path, max_num_seqs=1, waiting=1, delay=0.001) as engine:
        runs = engine_stream(path, "runs", max_tokens=9000)
        assert next(runs).tokens
        waits = threading.Thread(target=lambda: list(engine_stream(path, "waits", max_tokens=2)))
        waits.start()
        assert until(lambda: engine.waiting)
        with pytest.raises(ServerError, match="at most 1 requests may wait") as caught:
            list(engine_stream(path, "too many", max_tokens=1))
        assert caught.value.status == "UNAVAILABLE"
        runs.close()  # type: ignore[attr-defined]  # it is cancelled, and the waiting one runs
        waits.join()
        assert until(lambda: engine.idle)


def test_a_client_that_does_not_read_is_lost_and_holds_nobody_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labcore.serving.triton.process.UNREAD", 10_000)
    with served(path) as engine, connected(path) as deaf:
        deaf.sendall(b'{"type": "submit", "prompt": "deaf", "max_tokens": 10000}\n')
        assert until(lambda: engine.running)
        assert tokens_of(path, "next", 30) == expected("next", 30)
        assert until(lambda: engine.idle)


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
    with served(path):
        assert tokens_of(path, "x", 2) == expected("x", 2)


@pytest.mark.long
def test_the_program_serves_the_model_until_told_to_end(path: Path) -> None:
    model, tokenizer = pretrained("target"), shipped_tokenizer()
    ids = [tokenizer.encode("def f(x):\n")]
    alone = generate(model, ids, SamplingConfig(max_tokens=9), tokenizer=tokenizer)
    command = [sys.executable, "-m", "labcore.serving.triton.process", "--socket", str(path)]
    with subprocess.Popen([*command, "--threads", "1"]) as program:
        assert until(path.exists)
        parts = list(engine_stream(path, "def f(x):\n", max_tokens=9))
        assert "".join(part.text for part in parts) == (alone.texts or [""])[0]
        assert engine_stats(path)["finished_length"] == 1
        program.terminate()
        assert program.wait(60) == 0 and not path.exists()
    refused = subprocess.run([*command, "--model", "nowhere"], capture_output=True, text=True)
    assert refused.returncode == 1 and "model must be target, draft or" in refused.stderr


def test_the_clients_errors_are_sentences(path: Path) -> None:
    with pytest.raises(ConnectionError, match="no engine listens on"):
        list(engine_stream(path, "x"))
