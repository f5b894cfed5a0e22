"""The server as a program: what it prints, how it ends, and what stands behind it then: nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import pretrained, shipped_tokenizer
from labcore.serving.triton.client import (
    Addresses,
    EngineClient,
    ServerError,
    Streamed,
    examples,
    generate_stream,
    ready,
)
from labcore.serving.triton.client import generate as whole
from labcore.serving.triton.server import main, region_prefix, running
from tests.serving.triton import (
    ENVIRONMENT,
    FAULT_S,
    LONG_S,
    need_server,
    outcome,
    standin_server,
    until,
    works,
)

pytestmark = pytest.mark.long

PROMPT = "def area(width, height):\n"


def family(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            for child in task.read_text().split():
                found += [int(child), *family(int(child))]
    return found


@contextmanager
def program(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`start` with free ports, killed at the end if it still runs."""
    command = [sys.executable, "-m", "labcore.serving.triton.server", "start"]
    command += ["--folder", str(folder), "--environment", str(ENVIRONMENT), *more]
    with subprocess.Popen(
        [*command, "--http", "0"], cwd=folder.parent, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return False
    return state[0] not in "ZX"


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def regions(folder: Path) -> list[Path]:
    """The shared memory that the folder's server has, or left."""
    return sorted(Path("/dev/shm").glob(f"{region_prefix(folder)}*"))


def greeting(started: subprocess.Popen[str]) -> str:
    """What it prints once it is ready."""
    lines = []
    for line in started.stdout or ():
        lines.append(line)
        if "Ctrl-C" in line:
            break
    return "".join(lines)


def addresses(folder: Path) -> tuple[Addresses, str]:
    state = running(folder)
    assert state is not None
    ports = {name: state[name] for name in ("host", "http", "grpc", "metrics")}
    return Addresses(**ports), state["socket"]


def held(path: str) -> Any:
    """Blocks that the real engine holds; None while it is away."""
    try:
        with EngineClient(path) as client:
            return client.stats()["held"]
    except OSError:
        return None


def text_of(prompt: str, count: int) -> str:
    model, tokenizer = pretrained("target"), shipped_tokenizer()
    ids = [tokenizer.encode(prompt)]
    alone = generate(model, ids, SamplingConfig(max_tokens=count), tokenizer=tokenizer)
    return (alone.texts or [""])[0]


def test_printed_commands_work_and_stopping_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by a shell elsewhere; clients that leave, a killed engine; one request at the end."""
    need_server()
    folder = tmp_path / "s"
    options = ["--folder", str(folder), "--environment", str(ENVIRONMENT)]
    assert main(["status", *options]) == 1
    with program(folder) as started:
        said = greeting(started)
        assert said.startswith("ready: http://127.0.0.1:"), said
        at, path = addresses(folder)
        commands = examples(at)
        assert commands in said
        wanted = text_of(PROMPT, 24)
        blocks = [b for b in commands.split("\n\n") if shutil.which("curl") or "curl" not in b]
        shell = subprocess.run(
            ["bash", "-e"],
            input="\n\n".join(blocks),
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=FAULT_S,
        )
        assert shell.returncode == 0 and not shell.stderr, shell
        if shutil.which("curl"):
            assert shell.stdout.count("data: ") == 25
            assert json.dumps(wanted)[1:-1] in shell.stdout
            assert 'labcore_engine{value="num_blocks"}' in shell.stdout

        with pytest.raises(ServerError):
            list(generate_stream(at, PROMPT, max_tokens=1_000_000))
        left = [generate_stream(at, PROMPT, max_tokens=400, seed=n) for n in range(4)]
        assert all(next(parts).tokens for parts in left)
        for parts in left:
            parts.close()
        assert until(lambda: held(path) == 0)
        pid = next(child for child in family(started.pid) if "process" in command_of(child))
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not alive(pid) and held(path) == 0)
        assert until(lambda: isinstance(outcome(lambda: whole(at, PROMPT, max_tokens=2)), Streamed))
        for command in re.findall(r"^.* status --folder .*$", said, re.MULTILINE):
            shown = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True
            )
            assert shown.returncode == 0 and "server ready" in shown.stdout, shown
            assert "held 0" in shown.stdout
        assert main(["start", *options]) == 1
        assert capsys.readouterr().err.count(f"a server runs from {folder}") == 1

        there = family(started.pid)
        assert len(there) >= 3 and regions(folder)
        busy = generate_stream(at, PROMPT, max_tokens=900, timeout=LONG_S)
        assert next(busy).tokens
        assert main(["stop", *options]) == 0
        assert started.wait(FAULT_S) == 0
        assert isinstance(outcome(lambda: busy), list | Exception)
    assert until(lambda: not any(alive(pid) for pid in there))
    assert not regions(folder) and not Path(path).parent.exists() and not ready(at)
    assert not (folder / "server.json").exists()
    capsys.readouterr()
    assert main(["stop", *options]) == 1 and main(["status", *options]) == 1
    assert capsys.readouterr().out.count("no server runs from") == 2


def test_a_killed_parent_ends_all_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    need_server()
    folder = tmp_path / "s"
    with program(folder, "--model", "draft") as started:
        assert greeting(started)
        there = family(started.pid)
        assert len(there) >= 3
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert until(lambda: not any(alive(pid) for pid in there)), there
    assert running(folder) is None and (folder / "server.json").exists()
    left = regions(folder)
    assert left
    # Its number may be another's by now: that one must not be taken for a server, nor be ended.
    with subprocess.Popen(["sleep", "600"]) as other:
        state = json.loads((folder / "server.json").read_text())
        (folder / "server.json").write_text(json.dumps({**state, "pid": other.pid}))
        assert main(["stop", "--folder", str(folder)]) == 1
        with standin_server(folder) as server:
            assert not set(left) & set(regions(folder))
            works(server)
        assert other.poll() is None
        other.kill()
    assert not regions(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_told_to_end_while_it_starts_it_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    need_server()
    folder = tmp_path / "s"
    with program(folder) as started:
        assert until(lambda: (folder / "logs").exists() and family(started.pid))
        there = family(started.pid)
        started.send_signal(number)
        assert started.wait(FAULT_S) == 0
        assert "ready" not in (started.stdout.read() if started.stdout else "")
    assert until(lambda: not any(alive(pid) for pid in there))
    assert running(folder) is None and not regions(folder)
