"""Servers side by side, and an engine that cannot be saved."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from labcore.serving.remote.supervisor import SupervisorError
from labcore.serving.triton.client import generate as whole
from labcore.serving.triton.client import generate_stream, grpc_stream, ready
from labcore.serving.triton.server import TritonServer
from labcore.serving.triton.state import alive, regions
from tests.serving.standin import expected
from tests.serving.triton import (
    ENVIRONMENT,
    FAULT_S,
    LONG_S,
    STANDIN,
    need_server,
    outcome,
    standin_server,
    stats,
    tokens_of,
    until,
    works,
)

pytestmark = pytest.mark.long


def test_two_servers_stand_side_by_side(tmp_path: Path) -> None:
    need_server()
    with standin_server(tmp_path / "a") as server:
        side_by_side(server, tmp_path / "b")


def side_by_side(server: TritonServer, folder: Path) -> None:
    ours = regions(server.folder)[1]
    with standin_server(folder) as other:
        held = generate_stream(other.addresses, "held", max_tokens=9000, timeout=LONG_S)
        assert next(held).tokens
        assert stats(other)["running"] == 1 and stats(server)["running"] == 0
        works(server)
        pids = server.pids()
        pid = other.pids()["server"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError):
            list(held)
        other.wait_healthy(FAULT_S)
        works(other)
        assert server.pids() == pids
    assert regions(server.folder)[1] == ours and len(ours) == 1
    assert not regions(other.folder)[1] and not other.socket.parent.exists()
    works(server)


def test_an_engine_that_dies_at_once_each_time_is_given_up(tmp_path: Path) -> None:
    """First from the start, then behind a time in which all was well."""
    need_server()
    bad = ("/bin/sh", "-c", "echo no such weights; exit 7")
    server = TritonServer(tmp_path / "a", environment=ENVIRONMENT, engine=bad)
    with pytest.raises(SupervisorError) as caught:
        server.start(FAULT_S)
    said = str(caught.value)
    assert "engine was started 5 times and was never healthy" in said and "code 7" in said
    assert "no such weights" in said and not server.socket.parent.exists()

    flag = tmp_path / "flag"
    script = f'[ -e {flag} ] && echo the disk is gone && exit 7; exec "$@"'
    with standin_server(tmp_path / "b", ("/bin/sh", "-c", script, "sh", *STANDIN)) as server:
        pids = server.pids()
        flag.touch()
        good = {pids["engine"], server.supervisor.spare_pid("engine")}
        end = time.monotonic() + FAULT_S
        while not server.supervisor.failure and time.monotonic() < end:
            pid = server.supervisor.pid("engine")
            if pid is not None and pid in good:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        assert "engine was started 5 times and was never healthy" in server.supervisor.failure
        assert "the disk is gone" in server.supervisor.report()
        with pytest.raises(SupervisorError, match="the disk is gone"):
            server.wait_healthy(FAULT_S)
        assert until(lambda: not any(alive(pid) for pid in pids.values() if pid is not None))
        assert isinstance(outcome(lambda: whole(server.addresses, "x", max_tokens=1)), OSError)


def test_a_server_that_is_told_to_end_lets_its_streams_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide to Kubernetes says of it."""
    need_server()
    command = TritonServer._server_command

    def patient(server: TritonServer, backends: Path) -> list[str]:
        told = command(server, backends)
        return [arg.replace("exit-timeout-secs=3", "exit-timeout-secs=120") for arg in told]

    monkeypatch.setattr(TritonServer, "_server_command", patient)
    with standin_server(tmp_path) as server, ThreadPoolExecutor(2) as pool:
        streams = [
            ask(server.addresses, "p", max_tokens=900, timeout=LONG_S)
            for ask in (generate_stream, grpc_stream)
        ]
        first = [next(parts) for parts in streams]
        pid = server.pids()["server"]
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        ended = [pool.submit(lambda parts=parts: outcome(lambda: parts)) for parts in streams]
        # It is left alone until its streams are over; then the supervisor starts another.
        assert until(lambda: not ready(server.addresses))
        for one, rest in zip(first, ended, strict=True):
            parts = [one, *rest.result(FAULT_S)]
            assert tokens_of(parts) == expected("p", 900) and parts[-1].finish == "length"
        assert until(lambda: not alive(pid))
        server.wait_healthy(FAULT_S)
        works(server)
