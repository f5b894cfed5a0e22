"""Requests over a Unix socket: every request hears its end, whatever else comes down the line."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcore.decoding import SamplingConfig
from labcore.serving.remote import client as client_module
from labcore.serving.remote.client import EngineClient, EngineError
from labcore.serving.remote.ipc import Listener
from labcore.serving.remote.messages import (
    LineBuffer,
    MessageError,
    encode,
    parse,
    parse_submit,
)
from tests.serving.standin import StandIn, expected, until


class Raw:
    """A client that sends whatever bytes it likes."""

    def __init__(self, path: Path) -> None:
        self.end = socket.socket(socket.AF_UNIX)
        self.end.settimeout(120)
        self.end.connect(str(path))
        self.lines = self.end.makefile("rb")

    def send(self, message: bytes | dict[str, Any]) -> None:
        self.end.sendall(message if isinstance(message, bytes) else encode(message))

    def hear(self) -> dict[str, Any]:
        return dict(json.loads(self.lines.readline()))

    def close(self) -> None:
        self.lines.close()
        self.end.close()


def submit(id: str = "a", prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"type": "submit", "id": id, "prompt": prompt, **fields}


# Lines


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    limit=st.integers(1, 30),
)
def test_lines_come_whole_wherever_the_bytes_are_cut(
    lines: list[bytes], cuts: list[int], limit: int
) -> None:
    data = b"".join(line + b"\n" for line in lines)
    buffer, found, place = LineBuffer(limit), [], 0
    while place < len(data):
        size = cuts[place % len(cuts)]
        found += list(buffer.feed(data[place : place + size]))
        place += size
    wanted = [None if len(line) > limit else line for line in lines]
    assert found == [line for line in wanted if line is None or line.strip()]


def test_endless_line_is_refused_early_and_keeps_no_memory() -> None:
    buffer = LineBuffer(10)
    said = [line for _ in range(1000) for line in buffer.feed(b"x" * 64)]
    assert said == [None]
    assert len(buffer._rest) <= 10
    assert list(buffer.feed(b"\nback\n")) == [b"back"]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=80), st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "id", "prompt", "max_tokens", "stop", "seed"]) | st.text(
            max_size=3), inner, max_size=5),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_no_line_raises_anything_but_a_message_error(line: bytes) -> None:
    try:
        message = parse(line)
        if message["type"] == "submit":
            parse_submit(message)
    except MessageError as error:
        assert len(str(error)) < 600 and "\n" not in str(error)


BAD = [
    (b"[" * 100_000, "malformed"),
    (b"\xff\xfe", "malformed"),
    (b'{"type": "submit"', "malformed"),
    (b"[1, 2]", "malformed"),
    (b'{"type": "subnit", "id": "a"}', "malformed"),
    (b'{"type": "submit", "id": 7, "prompt": "x"}', "malformed"),
    (b'{"type": "submit", "id": "", "prompt": "x"}', "malformed"),
    (encode(submit(max_tokens=-3)), "invalid"),
    (encode(submit(max_tokens=2.5)), "invalid"),
    (encode(submit(max_tokens=True)), "invalid"),
    (encode(submit(max_tokens="4")), "invalid"),
    (encode(submit(temperature="hot")), "invalid"),
    (encode(submit(temperature=-1)), "invalid"),
    (b'{"type": "submit", "id": "a", "prompt": "x", "temperature": NaN}', "malformed"),
    (b'{"type": "submit", "id": "a", "prompt": "x", "temperature": 1e999}', "invalid"),
    (encode(submit(top_p=0)), "invalid"),
    (encode(submit(stop="a text")), "invalid"),
    (encode(submit(stop=[""])), "invalid"),
    (encode(submit(seed=2**64)), "invalid"),
    (encode(submit(timeout=0)), "invalid"),
    (encode(submit(timeout=-1.5)), "invalid"),
    (encode(submit(priority=0.5)), "invalid"),
    (encode(submit(prompt="")), "invalid"),
    (encode(submit(prompt=[])), "invalid"),
    (encode(submit(prompt=[1, -2])), "invalid"),
    (encode(submit(prompt=[1, "x"])), "invalid"),
    (encode(submit(prompt="\ud800")), "invalid"),
    (encode(submit(prompt=None)), "invalid"),
    (encode(submit(max_token=4)), "invalid"),  # misspelt
    (b'{"type": "submit", "id": "a", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "malformed"),
]


def test_malformed_lines_are_answered_and_nothing_else_is_lost(path: Path, seed: int) -> None:
    """Between good requests on one connection, in any order."""
    engine = StandIn()
    lines = [*BAD, (b"x" * 70_000, "too_long")]
    random.Random(seed).shuffle(lines)
    with Listener(engine, path, limit=60_000):
        raw = Raw(path)
        for number, (line, code) in enumerate(lines):
            good = f"good-{number}"
            raw.send(line.rstrip(b"\n") + b"\n" + encode(submit(good, good, max_tokens=2)))
            code = "too_long" if len(line) > 60_000 else code
            heard = [raw.hear() for _ in range(4)]
            errors = [message for message in heard if message["type"] == "error"]
            assert [error["code"] for error in errors] == [code], (line[:80], heard)
            if code == "invalid":
                assert errors[0]["id"] == "a"
            tokens = [token for one in heard if one["type"] == "tokens" for token in one["tokens"]]
            assert tokens == expected(good, 2)
            assert {"type": "finish", "id": good, "finish": "length", "reason": ""} in heard
        raw.close()
        assert until(engine.quiet)


def test_every_field_reaches_the_engine() -> None:
    asked = submit(
        prompt=[5, 6], max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, repetition_penalty=1.1,
        stop=["a", "b"], seed=11, priority=-2, timeout=1.5,
    )  # fmt: skip
    told = parse_submit(parse(encode(asked).strip()))
    assert told.prompt == (5, 6) and told.priority == -2 and told.timeout == 1.5
    assert told.sampling == SamplingConfig(
        max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, repetition_penalty=1.1,
        stop=("a", "b"), seed=11,
    )  # fmt: skip


# Many requests


def test_every_request_of_many_clients_hears_its_own_output(path: Path, seed: int) -> None:
    """Ids are each client's own: all of them use the same ones."""
    draw = random.Random(seed)
    sizes = [[draw.randrange(1, 30) for _ in range(9)] for _ in range(5)]
    wrong: list[object] = []

    def ask(client_number: int) -> None:
        with EngineClient(path) as client:
            asked = [
                client.submit(f"{client_number}/{n}", id=f"r{n}", max_tokens=size, seed=n)
                for n, size in enumerate(sizes[client_number])
            ]
            for n, replies in enumerate(asked):
                result = replies.result()
                wanted = expected(f"{client_number}/{n}", sizes[client_number][n], n)
                if list(result.tokens) != wanted or result.finish != "length":
                    wrong.append((client_number, n, result))
                if result.text != "".join(f"{token} " for token in wanted):
                    wrong.append(result.text)

    engine = StandIn(max_num_seqs=3)
    with Listener(engine, path):
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == [] and not any(thread.is_alive() for thread in threads)
        assert until(engine.quiet)
        assert len(engine.names) == 45


def test_cancel_ends_a_request_and_leaves_the_others(path: Path) -> None:
    engine = StandIn(delay=0.002)
    with Listener(engine, path), EngineClient(path) as client:
        gone, stays = client.submit("gone", max_tokens=5000), client.submit("stays", max_tokens=40)
        parts = iter(gone)
        assert next(parts).tokens
        gone.cancel()
        assert list(parts)[-1].finish == "cancelled"
        assert list(stays.result().tokens) == expected("stays", 40)
        gone.cancel()  # harmless
        raw = Raw(path)
        raw.send({"type": "cancel", "id": "never was"})
        raw.send({"type": "health", "id": "h"})
        assert raw.hear()["type"] == "health"
        raw.close()
        assert until(engine.quiet)


@pytest.mark.parametrize("how", ["close", "half a line", "kill the reader"])
def test_a_lost_connection_gives_back_what_it_held(path: Path, how: str) -> None:
    engine = StandIn(delay=0.002, max_num_seqs=4)
    with Listener(engine, path) as listener, EngineClient(path) as other:
        stays = other.submit("stays", max_tokens=60)
        raw = Raw(path)
        for number in range(7):  # more than run at once: some wait
            raw.send(submit(f"r{number}", f"p{number}", max_tokens=9000))
        assert until(lambda: engine.stats()["running"] == 4)
        if how == "half a line":
            raw.send(b'{"type": "submit", "id": "z", "pro')
        if how == "kill the reader":
            raw.end.shutdown(socket.SHUT_RD)
        else:
            raw.close()
        assert list(stays.result().tokens) == expected("stays", 60)
        assert until(engine.quiet), engine.stats()
        assert until(lambda: len(listener.clients()) == 1)
        if how == "kill the reader":
            raw.close()


def test_a_client_that_does_not_read_is_lost_and_holds_nobody_up(path: Path) -> None:
    engine = StandIn()
    with Listener(engine, path, patience=0.3) as listener:
        raw = Raw(path)
        raw.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(8):
            raw.send(submit(f"r{number}", "x" * 50, max_tokens=9000))
        with EngineClient(path) as client:
            assert list(client.submit("mine", max_tokens=20).result().tokens) == expected(
                "mine", 20
            )
            assert until(lambda: [one["name"] for one in listener.clients()] == ["client"])
            assert until(engine.quiet)
        raw.close()


def test_full_queue_used_id_or_fault_fails_only_that_request(path: Path) -> None:
    engine = StandIn(max_num_seqs=1, waiting=2, delay=0.002)
    with Listener(engine, path, most=50), EngineClient(path) as client:
        long = client.submit("long", max_tokens=9000)
        assert until(lambda: engine.stats()["running"] == 1)
        waiting = [client.submit(f"w{n}", max_tokens=3) for n in range(2)]
        assert until(lambda: engine.stats()["waiting"] == 2)
        with pytest.raises(EngineError, match="may wait") as caught:
            client.submit("one too many", max_tokens=3).result()
        assert caught.value.code == "overloaded"
        with pytest.raises(EngineError, match="RuntimeError: planted") as caught:
            client.submit("raise").result()
        assert caught.value.code == "internal"
        raw = Raw(path)
        raw.send(submit("same", "p1", max_tokens=9000))
        raw.send(submit("same", "p2", max_tokens=1))
        assert raw.hear()["code"] in ("overloaded", "duplicate")
        raw.close()
        long.cancel()
        assert [replies.result().finish for replies in waiting] == ["length"] * 2
        refused = client.submit("huge", max_tokens=10**6).result()
        assert refused.finish == "refused" and "pool" in refused.reason
        assert until(engine.quiet)


def test_a_duplicate_never_ends_the_first(path: Path) -> None:
    engine = StandIn(delay=0.001)
    with Listener(engine, path):
        raw = Raw(path)
        raw.send(submit("same", "first", max_tokens=300))
        raw.send(submit("same", "second", max_tokens=300))
        heard = [raw.hear() for _ in range(302)]
        errors = [message for message in heard if message["type"] == "error"]
        assert [(e["id"], e["code"]) for e in errors] == [(None, "duplicate")]
        tokens = [token for one in heard if one["type"] == "tokens" for token in one["tokens"]]
        assert tokens == expected("first", 300)
        raw.send(submit("same", "again", max_tokens=1))  # free once its end was said
        assert raw.hear()["tokens"] == expected("again", 1)
        raw.close()


def test_at_most_so_many_requests_are_in_flight(path: Path) -> None:
    engine = StandIn(max_num_seqs=1, delay=0.002)
    with Listener(engine, path, most=3), EngineClient(path) as one, EngineClient(path) as two:
        held = [one.submit(f"p{n}", max_tokens=9000) for n in range(3)]
        assert until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 3)
        with pytest.raises(EngineError, match="in flight"):
            two.submit("x", max_tokens=1).result()
        for replies in held:
            replies.cancel()
        assert [list(replies)[-1].finish for replies in held] == ["cancelled"] * 3
        assert two.submit("x", max_tokens=1).result().finish == "length"  # the places came back


def test_closing_tells_every_client_and_cancels_what_ran(path: Path) -> None:
    engine = StandIn(delay=0.002, max_num_seqs=2)
    listener = Listener(engine, path).start()
    with EngineClient(path) as client:
        asked = [client.submit(f"p{n}", max_tokens=9000) for n in range(5)]
        assert until(lambda: engine.stats()["running"] == 2)
        listener.close()
        for replies in asked:
            with pytest.raises(EngineError) as caught:
                replies.result()
            assert caught.value.code == "lost"
        with pytest.raises(EngineError, match="lost"):
            client.submit("later").result()
        with pytest.raises(EngineError, match="lost"):
            client.health()
    assert until(engine.quiet)
    assert not path.exists()
    listener.close()  # harmless


def test_an_engine_in_a_long_step_holds_up_no_other_line(path: Path) -> None:
    class Stuck(StandIn):
        gate = threading.Event()

        def stats(self) -> dict[str, Any]:
            self.gate.wait()
            return super().stats()

    engine = Stuck()
    with Listener(engine, path), ExitStack() as stack:
        stack.callback(engine.gate.set)  # Or the listener would wait where this fails.
        raw = Raw(path)
        for number in range(20):
            raw.send({"type": "stats", "id": f"s{number}"})
        raw.send({"type": "health", "id": "h"})
        raw.send(submit("a", "x", max_tokens=1))
        said = [raw.hear() for _ in range(7)]
        refused = [one["id"] for one in said if one.get("code") == "overloaded"]
        assert refused == [f"s{number}" for number in range(16, 20)]
        assert {one["type"] for one in said if one["id"] == "h"} == {"health"}
        assert [one["type"] for one in said if one["id"] == "a"] == ["tokens", "finish"]
        engine.gate.set()
        assert {raw.hear()["id"] for _ in range(16)} == {f"s{number}" for number in range(16)}
        raw.close()


def test_where_no_thread_is_to_be_had_nothing_is_lost_for_good(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, ["ipc-request", "ipc-request", "ipc-3"]

    def refuses(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with Listener(StandIn(), path, most=2), EngineClient(path) as one, EngineClient(path) as two:
        assert two.health()["clients"]
        for _ in range(2):
            with pytest.raises(EngineError, match="can't start new thread"):
                one.submit("x", max_tokens=1).result()
        assert one.submit("x", max_tokens=1).result().finish == "length"
        with EngineClient(path) as third, pytest.raises(EngineError, match="lost"):
            third.health()
        with EngineClient(path) as fourth:
            assert [told["name"] for told in fourth.health()["clients"]] == ["client"] * 3
    assert not refused and not path.exists()


def test_where_no_descriptor_is_free_it_waits_and_comes_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        asked = 0

        def accept(self) -> None:
            self.asked += 1
            raise OSError(24, "Too many open files")

    listener, full = Listener(StandIn(), path), Full()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(listener, "_socket", full)
        listener.start()
        assert until(lambda: full.asked > 20)
    with EngineClient(path) as client:
        assert client.health()["status"] == "ok"
    assert full.asked <= (time.monotonic() - began) / 0.01 + 2  # One that spins asks thousands.
    listener.close()


def test_a_name_that_is_made_is_nobody_elses(path: Path) -> None:
    with Listener(StandIn(delay=0.002), path), EngineClient(path) as client:
        own = [client.submit(name, id=name, max_tokens=9) for name in ("r1", "r2", "r4")]
        assert client.health()["status"] == "ok"
        assert client.submit("x", max_tokens=1).id not in ("r1", "r2", "r4")
        for replies in own:
            assert list(replies.result().tokens) == expected(replies.id, 9)


# The client's deadline, and the socket


def test_unresponsive_engine_is_lost_by_the_clients_deadline(path: Path) -> None:
    """As one that was stopped: what fills its socket must not hold the client for ever."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        with EngineClient(path, timeout=0.3) as client:
            asked = [client.submit("x" * 900_000, timeout=100.0) for _ in range(3)]
            for replies in asked:
                with pytest.raises(EngineError, match="was lost") as caught:
                    replies.result()
                assert caught.value.code == "lost"
            with pytest.raises(EngineError, match="was lost"):
                client.health()


def test_a_deadline_is_the_engines_first_and_the_clients_second(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandIn(delay=0.005)
    with Listener(engine, path), EngineClient(path) as client:
        assert client.submit("slow", max_tokens=9000, timeout=0.1).result().finish == "deadline"
        monkeypatch.setattr(client_module, "SLACK_S", 0.5)
        engine.delay = 2.0  # longer than the client waits: it hangs
        with pytest.raises(TimeoutError, match="did not end within"):
            client.submit("hangs", max_tokens=9000, timeout=0.05).result()
        engine.delay = 0.0
        assert until(engine.quiet)


def test_health_and_stats_answer_with_clients_by_name(path: Path) -> None:
    engine = StandIn()
    with Listener(engine, path), EngineClient(path, name="mine") as client:
        told = client.health()
        assert told["status"] == "ok"
        assert [(c["name"], c["pid"], c["requests"]) for c in told["clients"]] == [
            ("mine", os.getpid(), 0)
        ]
        assert client.stats()["blocks_free"] == engine.blocks


def test_socket_is_the_users_alone_and_replaces_a_stale_one(path: Path) -> None:
    engine = StandIn()
    with Listener(engine, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ValueError, match="another process listens"):
            Listener(engine, path)
        with EngineClient(path) as client:
            assert client.health()["status"] == "ok"  # the one that was there is unharmed
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with Listener(engine, path), EngineClient(path) as client:
        assert client.health()["status"] == "ok"
    path.write_text("a file")
    with pytest.raises(ValueError, match="path must be unused or a socket"):
        Listener(engine, path)
    assert path.read_text() == "a file"
    with pytest.raises(ValueError, match="at most 107 bytes"):
        Listener(engine, path.parent / ("x" * 120))
    with pytest.raises(ConnectionError, match="no engine listens"):
        EngineClient(path.parent / "nothing")


def test_client_itself_refuses_a_request_over_the_limit(path: Path) -> None:
    with Listener(StandIn(), path), EngineClient(path) as client:
        with pytest.raises(ValueError, match="at most 1048576 bytes"):
            client.submit("x" * (1 << 20))
        assert client.submit("x" * 1000, max_tokens=1).result().finish == "length"
