"""The file that the server's python backend runs, without the server: each request ends once."""

from __future__ import annotations

import ast
import json
import random
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from labcore.serving.triton.process import EngineServer
from labcore.serving.triton.server import FILES
from tests.serving import bridge
from tests.serving.bridge import MetricFamily, Request, Sender
from tests.serving.standin import StandIn, expected, until


def ask(model: Any, prompt: Any = b"hello", **inputs: Any) -> Sender:
    sender = Sender()
    model.execute([Request(sender, text_input=prompt, **inputs)])
    return sender


@contextmanager
def served(engine: Any, path: Path) -> Iterator[None]:
    """The engine behind a socket, in a thread."""
    server, ended = EngineServer(engine, path), threading.Event()
    thread = threading.Thread(target=server.serve, args=(ended.is_set,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def error_of(sender: Sender) -> Any:
    return sender.all()[2].error


def test_it_imports_only_the_standard_library_and_triton_utils() -> None:
    source = FILES / "model.py"
    tree = ast.parse(
        source.read_text("utf-8"), feature_version=(3, 9)
    )  # The oldest Python of the server's stubs.
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or "?"]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert names - set(sys.stdlib_module_names) == {"triton_python_backend_utils"}


def test_requests_stream_or_come_whole(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    engine = StandIn(max_num_seqs=3)
    with served(engine, path), bridge.loaded(path) as model:
        sizes = [draw.randrange(1, 40) for _ in range(12)]
        senders = [
            ask(
                model,
                f"p{n}".encode(),
                max_tokens=numpy.array([size], dtype=numpy.int32),
                seed=numpy.array([n], dtype=numpy.int64),
                stream=numpy.array([n % 2 == 0]),
            )
            for n, size in enumerate(sizes)
        ]
        for n, (sender, size) in enumerate(zip(senders, sizes, strict=True)):
            tokens, text, last = sender.all()
            assert tokens == expected(f"p{n}", size, n)
            assert text == "".join(f"{token} " for token in tokens)
            assert last.outputs["finish_reason"][0] == b"length"
            if n % 2:
                assert last.outputs["token_ids"].tolist() == tokens  # all in one
        assert until(lambda: engine.idle)


def test_what_is_no_request_is_said_at_once(path: Path) -> None:
    engine = StandIn()
    with served(engine, path), bridge.loaded(path) as model:
        int32 = numpy.array([-4], dtype=numpy.int32)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompt": b"\xff\xfe"}, "text_input must be UTF-8"),
            ({"prompt": b""}, "prompt must hold at least one token"),
            ({"prompt": numpy.array([b"a", b"b"], dtype=object)}, "must hold one value, got 2"),
            ({"prompt": numpy.array([], dtype=object)}, "must hold one value, got 0"),
            ({"max_tokens": int32}, "max_tokens must be at least 1"),
            (
                {"temperature": numpy.array([numpy.nan], dtype=numpy.float32)},
                "temperature must be 0",
            ),
            ({"timeout": numpy.array([-1.0], dtype=numpy.float32)}, "timeout must be above 0"),
            ({"stop": numpy.array([b"ok", b"\xff"], dtype=object)}, "stop must be UTF-8"),
            ({"prompt": b"x" * (1 << 20)}, "at most 1048576 bytes"),
            ({"max_tokens": numpy.array([10**6], dtype=numpy.int32)}, "must fit into the pool"),
        ]
        for inputs, words in cases:
            error = error_of(ask(model, **inputs))
            assert words in str(error) and error.code == "invalid", (inputs, error)
        sender = Sender()
        model.execute([Request(sender, text_input=b"x", parameters='{"max_token": 3}')])
        assert "unknown input 'max_token'; the inputs are text_input" in str(error_of(sender))
        own = '{"id": "mine", "triton_enable_empty_final_response": true}'  # the server's
        sender = Sender()
        one = numpy.array([1], dtype=numpy.int32)
        model.execute([Request(sender, text_input=b"x", max_tokens=one, parameters=own)])
        assert sender.all()[0] == expected("x", 1)
        sender = Sender()
        model.execute([Request(sender, text_input=b"x", parameters="[")])
        assert error_of(sender).code == "invalid"
        sender = Sender()
        model.execute([Request(sender)])
        assert "text_input is missing" in str(error_of(sender))
        assert until(lambda: engine.idle)


def test_a_client_that_leaves_is_cancelled_even_while_it_waits(path: Path) -> None:
    engine = StandIn(max_num_seqs=1, delay=0.002)
    with served(engine, path), bridge.loaded(path) as model:
        long = numpy.array([9000], dtype=numpy.int32)
        runs, waits = ask(model, b"runs", max_tokens=long), ask(model, b"waits", max_tokens=long)
        assert until(lambda: len(engine.waiting) == 1)
        for sender in (waits, runs):
            sender.client_left = True
            assert error_of(sender).code == "cancelled"
        assert until(lambda: engine.idle)


def test_response_the_server_refuses_costs_only_that_request(path: Path) -> None:
    """Its blocks are free again; the bridge's threads and its connection live on."""
    engine = StandIn(delay=0.002)
    with served(engine, path), bridge.loaded(path) as model:
        long = numpy.array([9000], dtype=numpy.int32)
        bad = ask(model, b"bad", max_tokens=long)
        good = ask(model, b"good", max_tokens=numpy.array([600], dtype=numpy.int32))
        assert until(lambda: len(engine.running) == 2)
        bad.refuses = True
        assert good.all()[0] == expected("good", 600)
        assert until(lambda: engine.idle)
        few = numpy.array([3], dtype=numpy.int32)
        assert ask(model, b"next", max_tokens=few).all()[0] == expected("next", 3)


def test_odd_numbers_and_lines_end_no_thread(path: Path) -> None:
    """An engine that says nonsense is left, and the next one is used."""
    nonsense = socket.socket(socket.AF_UNIX)
    with nonsense, bridge.loaded(path) as model:
        nonsense.bind(str(path))
        nonsense.listen()
        end, _ = nonsense.accept()
        end.sendall(json.dumps({"type": "stats", "values": {"blocks": 10**400}}).encode() + b"\n")
        end.sendall(b'{"type": "tokens", "id": "t9", "tokens": [1], "text": ""}\n[1]\n')
        assert end.recv(1) in (b"{", b"")  # a question for numbers, or the end
        nonsense.close()
        end.close()
        with served(StandIn(), path):
            few = numpy.array([3], dtype=numpy.int32)
            # A request may still have gone to the old connection, and ends with it.
            assert until(
                lambda: ask(model, b"next", max_tokens=few).all()[0] == expected("next", 3)
            )


def test_a_line_that_is_half_sent_ends_the_connection(path: Path) -> None:
    """An engine that stops reading: what follows half a line would be read as part of it."""
    deaf = socket.socket(socket.AF_UNIX)
    with deaf, bridge.loaded(path) as model:
        deaf.bind(str(path))
        deaf.listen()
        end, _ = deaf.accept()
        with end:
            senders = [ask(model, b"x" * 400_000) for _ in range(2)]
            assert [error_of(sender).code for sender in senders] == ["unavailable"] * 2


def test_a_deadline_counts_while_the_engine_is_away(path: Path) -> None:
    def seconds(value: float) -> Any:
        return numpy.array([value], dtype=numpy.float32)

    with bridge.loaded(path) as model:
        late = ask(model, b"late", timeout=seconds(0.3))
        long = ask(model, b"long", max_tokens=numpy.array([9000]), timeout=seconds(3.0))
        assert late.all()[2].outputs["finish_reason"][0] == b"deadline"
        with served(engine := StandIn(delay=0.002), path):
            assert until(lambda: engine.running)
            assert engine.running[0].deadline < engine.clock.now() + 2.8
            assert long.all()[2].outputs["finish_reason"][0] == b"deadline"
            assert engine.names == {"long"}


def test_requests_wait_for_an_absent_engine_and_a_dead_ones_end(path: Path) -> None:
    few, long = (numpy.array([n], dtype=numpy.int32) for n in (3, 9000))
    with bridge.loaded(path) as model:
        waiting = ask(model, b"early", max_tokens=few)
        with served(engine := StandIn(delay=0.002), path):
            assert waiting.all()[0] == expected("early", 3)
            senders = [ask(model, max_tokens=long) for _ in range(5)]
            assert until(lambda: len(engine.running) == 5)
        assert [error_of(sender).code for sender in senders] == ["unavailable"] * 5
        again = ask(model, b"again", max_tokens=few)
        with served(StandIn(), path):
            assert again.all()[0] == expected("again", 3)


def test_unloading_ends_requests_and_engine_numbers_are_metrics(path: Path) -> None:
    MetricFamily.values.clear()
    engine = StandIn(delay=0.002)
    with served(engine, path):
        with bridge.loaded(path) as model:
            sender = ask(model, max_tokens=numpy.array([9000], dtype=numpy.int32))
            assert until(lambda: MetricFamily.values.get("running") == 1.0)
            assert MetricFamily.values["blocks"] == 64.0
        assert error_of(sender).code == "unavailable"
        assert until(lambda: engine.idle)
