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


def test_odd_lines_end_no_thread(path: Path) -> None:
    """Each request of an engine that says nonsense ends with an error; the next one is served."""
    nonsense = socket.socket(socket.AF_UNIX)
    with nonsense, bridge.loaded(path) as model:
        nonsense.bind(str(path))
        nonsense.listen()
        senders = [ask(model) for _ in range(3)]
        lines = (b"[1]\n", b"{}\n", b'{"finish": "", "tokens": 3}\n', b"{", b"1e999\n")
        for line in (line for line in lines for _ in range(3)):
            end, _ = nonsense.accept()
            end.sendall(line)
            end.close()
            if all(not sender.sent.empty() for sender in senders):
                break
        nonsense.close()
        path.unlink()
        assert {error_of(sender).code for sender in senders} <= {"internal", "unavailable"}
        with served(StandIn(), path):
            few = numpy.array([3], dtype=numpy.int32)
            assert ask(model, b"next", max_tokens=few).all()[0] == expected("next", 3)
            assert until(lambda: MetricFamily.values.get("running") == 0)


def test_an_engine_that_is_slow_to_read_gets_whole_lines(path: Path) -> None:
    slow = socket.socket(socket.AF_UNIX)
    with slow, bridge.loaded(path) as model:
        slow.bind(str(path))
        slow.listen()
        senders = [ask(model, letter * 400_000) for letter in (b"x", b"y")]
        prompts = set()
        while len(prompts) < 2:
            end, _ = slow.accept()
            with end, end.makefile("rb") as lines:
                prompts.add(json.loads(lines.readline()).get("prompt"))
                prompts.discard(None)  # a question for numbers
        assert prompts == {"x" * 400_000, "y" * 400_000}
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
        assert error_of(sender).code == "cancelled"
        assert until(lambda: engine.idle)
