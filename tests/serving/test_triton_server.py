"""NVIDIA's Triton Inference Server itself, started here: streams, faults, and what comes after."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from labcore.serving.triton.client import (
    Addresses,
    ServerError,
    Streamed,
    generate_stream,
    grpc_stream,
    metrics,
)
from labcore.serving.triton.machine import child, command, regions
from labcore.serving.triton.server import ServerFailed, TritonServer
from tests.serving.standin import expected
from tests.serving.triton import (
    ENVIRONMENT,
    FAULT_S,
    LONG_S,
    need_server,
    outcome,
    standin_server,
    stats,
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


def test_a_stream_is_parts_and_an_end_by_each_of_the_three_ways(server: TritonServer) -> None:
    at = server.addresses
    wanted = expected("hello", 7, 3)
    for stream in (generate_stream, grpc_stream):
        parts = list(stream(at, "hello", max_tokens=7, seed=3, temperature=0.5, stop=["x", "y"]))
        assert len(parts) == 8 and tokens_of(parts) == wanted
        assert "".join(part.text for part in parts) == "".join(f"{token} " for token in wanted)
        assert [part.finish for part in parts] == [""] * 7 + ["length"]
    one = whole(at, "hello", max_tokens=7, seed=3)
    assert tokens_of(one) == wanted and one[-1].finish == "length"
    works(server)


def test_thirty_two_streams_at_once_hear_each_their_own(server: TritonServer, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(5, 80) for _ in range(32)]

    def ask(number: int) -> list[Streamed]:
        stream = grpc_stream if number % 2 else generate_stream
        asked = {"max_tokens": sizes[number], "seed": number, "timeout": FAULT_S}
        return list(stream(server.addresses, f"p{number}", **asked))

    with ThreadPoolExecutor(32) as pool:
        for number, parts in enumerate(pool.map(ask, range(32))):
            assert tokens_of(parts) == expected(f"p{number}", sizes[number], number)
            assert parts[-1].finish == "length"
    works(server)


def test_clients_that_vanish_give_their_blocks_back(server: TritonServer) -> None:
    at = server.addresses
    left = []
    for number in range(3):
        for stream in (generate_stream, grpc_stream):
            parts = stream(at, f"v{number}", max_tokens=9000, timeout=LONG_S)
            assert next(parts).tokens
            left.append(parts)
    body = json.dumps({"text_input": "raw", "max_tokens": 9000}).encode()
    head = f"POST /v2/models/lm/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    raw = []
    for sent in (*[body] * 5, body[:10]):  # two run, three wait, one is never whole
        raw.append(socket.create_connection((at.host, at.http)))
        raw[-1].sendall(head.encode() + sent)
    assert until(lambda: stats(server)["running"] == 8 and stats(server)["waiting"] == 3)
    for end in raw:
        end.close()
    for parts in left:
        parts.close()
    works(server)


def test_clients_that_vanish_at_once_leave_nothing(server: TritonServer) -> None:
    """40 that are gone before the first answer, the most that may wait, and one more stays."""
    at = server.addresses
    body = json.dumps({"text_input": "gone", "max_tokens": 9000}).encode()
    head = f"POST /v2/models/lm/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(40):
        with socket.create_connection((at.host, at.http)) as end:
            end.sendall(head.encode() + body)
    parts = list(generate_stream(at, "stays", max_tokens=9, timeout=LONG_S))
    assert tokens_of(parts) == expected("stays", 9)
    works(server)


def test_a_client_that_does_not_read_holds_nobody_up(server: TritonServer) -> None:
    at = server.addresses
    body = json.dumps({"text_input": "silent", "max_tokens": 9000}).encode()
    head = f"POST /v2/models/lm/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.connect((at.host, at.http))
        end.sendall(head.encode() + body)
        assert until(lambda: stats(server)["running"] == 1)
        for number in range(3):
            parts = list(generate_stream(at, f"r{number}", max_tokens=300, timeout=LONG_S))
            assert tokens_of(parts) == expected(f"r{number}", 300)
    works(server)


def test_a_deadline_ends_a_request_on_the_engines_side(server: TritonServer) -> None:
    for ask in (generate_stream, grpc_stream):
        parts = list(ask(server.addresses, "slow", max_tokens=9000, timeout=0.3))
        assert parts[-1].finish == "deadline"
    assert whole(server.addresses, "slow", max_tokens=9000, timeout=0.3)[0].finish == "deadline"
    works(server)


def test_a_full_queue_is_said_and_what_was_taken_is_served(server: TritonServer) -> None:
    """8 run and 40 wait: the next ones are told to come again."""
    at = server.addresses
    runs = [generate_stream(at, f"r{n}", max_tokens=9000, timeout=LONG_S) for n in range(8)]
    assert all(next(parts).tokens for parts in runs)

    def ask(number: int) -> Any:
        stream = grpc_stream if number % 5 == 0 else generate_stream
        return outcome(lambda: stream(at, f"q{number}", max_tokens=9, timeout=LONG_S))

    with ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(ask, number) for number in range(40)]
        assert until(lambda: stats(server)["waiting"] == 40)
        for stream in (generate_stream, grpc_stream, whole):
            with pytest.raises(ServerError, match="at most 40 requests may wait") as caught:
                list(stream(at, "one too many", max_tokens=1))
            assert stream is not grpc_stream or caught.value.status == ""
        # The queue stands in the engine; to the server nothing is pending.
        assert until(lambda: metrics(at).get('labcore_engine{value="waiting"}') == 40)
        assert metrics(at)['nv_inference_pending_request_count{model="lm",version="1"}'] == 0
        for parts in runs:
            parts.close()
        for number, one in enumerate(waiting):
            assert tokens_of(one.result(FAULT_S)) == expected(f"q{number}", 9)
    works(server)


def kill(server: TritonServer, victim: str) -> int:
    pid = server.pids()[victim]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("victim", ["stub", "engine", "server"])
def test_a_killed_process_is_replaced_and_every_client_hears(
    server: TritonServer, victim: str
) -> None:
    """Of 8 requests that run and 4 that wait, each ends with an error, none in silence."""
    before = server.pids()

    def ask(number: int) -> Any:
        stream = grpc_stream if number % 3 == 0 else generate_stream
        return outcome(
            lambda: stream(server.addresses, f"k{number}", max_tokens=9000, timeout=LONG_S)
        )

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(12)]
        assert until(lambda: stats(server)["running"] == 8 and stats(server)["waiting"] == 4)
        pid = kill(server, victim)
        assert until(lambda: server.pids()[victim] not in (None, pid))
        server.wait_ready(FAULT_S)
        said = [one.result(FAULT_S) for one in asked]
    assert all(isinstance(one, Exception) for one in said), said
    fresh = server.pids()
    assert fresh[victim] != pid and fresh[victim] is not None
    assert (victim == "engine") == (fresh["engine"] != before["engine"])
    assert (victim == "engine") == (fresh["server"] == before["server"])
    works(server)
    assert len(regions(server.folder)) == 1  # the dead server's is gone


def test_requests_while_the_engine_is_away_run_after_it(server: TritonServer) -> None:
    """They wait in the bridge, and are served by the next engine."""
    pid = kill(server, "engine")
    assert until(lambda: server.pids()["engine"] != pid)
    time.sleep(0.2)  # the bridge has seen the end of its connection
    with ThreadPoolExecutor(5) as pool:
        asked = [
            pool.submit(
                lambda n=number: outcome(
                    lambda: generate_stream(server.addresses, f"w{n}", max_tokens=5, timeout=LONG_S)
                )
            )
            for number in range(5)
        ]
        said = [one.result(FAULT_S) for one in asked]
    assert server.pids()["engine"] not in (None, pid)
    assert [tokens_of(one) for one in said] == [expected(f"w{n}", 5) for n in range(5)]
    works(server)


def test_a_child_is_found_by_its_command_and_not_when_it_has_ended() -> None:
    """A server that crashes starts addr2line for each line of its trace: that is not the stub."""
    with subprocess.Popen(["cat", "-"], stdin=subprocess.PIPE) as other:
        assert child(os.getpid(), "labcore_sleep") is None
        with subprocess.Popen([sys.executable, "-c", "input() # labcore_sleep"], stdin=-1) as one:
            assert until(lambda: child(os.getpid(), "labcore_sleep") == one.pid)
            one.kill()
            assert until(lambda: command(one.pid) == "")  # a zombie: nobody has waited for it
            assert child(os.getpid(), "labcore_sleep") is None and other.poll() is None


def test_an_engine_that_dies_again_and_again_ends_the_server(tmp_path: Path) -> None:
    need_server()
    server = TritonServer(tmp_path / "s", environment=ENVIRONMENT, engine=["false"])
    with pytest.raises(ServerFailed, match="the engine had to be started 8 times in 60 s"):
        server.start(FAULT_S)
    assert server.pids() == {"server": None, "stub": None, "engine": None}


def test_metrics_speak_of_the_server_and_of_the_engine(server: TritonServer) -> None:
    before = metrics(server.addresses)
    name = 'nv_inference_request_success{model="lm",version="1"}'
    works(server)
    assert until(lambda: metrics(server.addresses).get(name, 0) > before.get(name, 0))
    assert until(lambda: metrics(server.addresses)['labcore_engine{value="blocks"}'] == 64)


def test_a_port_or_a_folder_in_use_is_said(server: TritonServer, tmp_path: Path) -> None:
    taken = Addresses(http=server.addresses.http, grpc=0, metrics=0)
    with pytest.raises(ValueError, match="http port .* must be free"):
        TritonServer(tmp_path, environment=ENVIRONMENT, addresses=taken)
    second = TritonServer(server.folder, environment=ENVIRONMENT, engine=["true"])
    with pytest.raises(RuntimeError, match="a server runs from"):
        second.start()
    second.stop()
    assert not second.socket.parent.exists()
    works(server)  # failing to start the second did not stop the first
