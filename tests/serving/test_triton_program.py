"""The server as a program: what it prints, how it ends, and what stands behind it then: nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import pretrained, save_pretrained, shipped_tokenizer
from labcore.models.recipes import END_OF_TEXT
from labcore.serving.triton.client import (
    Addresses,
    ServerError,
    examples,
    generate_stream,
    metrics,
)
from labcore.serving.triton.machine import region_prefix, regions, running
from labcore.serving.triton.server import ENGINE_PID, main
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


def family(pid: int) -> list[psutil.Process]:
    """The processes that a process started, and those that they started."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
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


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie doesn't count."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def greeting(started: subprocess.Popen[str]) -> str:
    """What it prints once it is ready."""
    lines = []
    for line in started.stdout or ():
        lines.append(line)
        if "Ctrl-C" in line:
            break
    return "".join(lines)


def addresses(folder: Path) -> Addresses:
    state = running(folder)
    assert state is not None
    return state[1]


def held(at: Addresses) -> Any:
    """Blocks that the real engine holds; None while it is away."""
    shown = metrics(at)
    return shown['labcore_engine{value="held"}'] if shown[ENGINE_PID] else None


def text_of(prompt: str, count: int, model: str = "target") -> str:
    tokenizer, sampling = shipped_tokenizer(), SamplingConfig(max_tokens=count)
    alone = generate(pretrained(model), [tokenizer.encode(prompt)], sampling, tokenizer=tokenizer)
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
        at = addresses(folder)
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
            assert shell.stdout.count("data: ") == 24
            assert json.dumps(wanted)[1:-1] in shell.stdout
            assert 'labcore_engine{value="num_blocks"}' in shell.stdout

        with pytest.raises(ServerError):
            list(generate_stream(at, PROMPT, max_tokens=1_000_000))
        left = [generate_stream(at, PROMPT, max_tokens=400, seed=n) for n in range(4)]
        assert all(next(parts).tokens for parts in left)
        for parts in left:
            parts.close()
        assert until(lambda: held(at) == 0)
        engine = psutil.Process(int(metrics(at)[ENGINE_PID]))
        path = Path(engine.cmdline()[-1])
        engine.kill()
        assert until(lambda: metrics(at)[ENGINE_PID] not in (0, engine.pid) and held(at) == 0)
        again = outcome(lambda: generate_stream(at, PROMPT, max_tokens=2, timeout=LONG_S))
        assert again[-1].finish == "length"
        for command in re.findall(r"^.* status --folder .*$", said, re.MULTILINE):
            shown = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True
            )
            assert shown.returncode == 0 and "ready: http" in shown.stdout, shown
            assert "held 0" in shown.stdout
        second = subprocess.run(started.args, cwd=tmp_path, capture_output=True, text=True)
        assert second.returncode == 1 and f"a server runs from {folder}" in second.stderr

        there = family(started.pid)
        assert len(there) >= 3 and regions(folder)
        busy = generate_stream(at, PROMPT, max_tokens=900, timeout=LONG_S)
        assert next(busy).tokens
        assert main(["stop", *options]) == 0
        assert started.wait(FAULT_S) == 0
        assert isinstance(outcome(lambda: busy), list | Exception)
    assert until(lambda: not any(map(alive, there)))
    assert not regions(folder) and not path.parent.exists() and running(folder) is None
    with pytest.raises(ConnectionError, match="no answer from 127.0.0.1"):
        metrics(at)
    capsys.readouterr()
    assert main(["stop", *options]) == 1 and main(["status", *options]) == 1
    assert capsys.readouterr().err.count("no server runs from") == 2


def test_a_killed_parent_ends_all_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    need_server()
    folder = tmp_path / "s"
    with program(folder, "--model", "draft") as started:
        assert greeting(started)
        there = family(started.pid)
        assert len(there) >= 3
        for one in there:
            if one.name() == "tritonserver":
                one.suspend()  # the stub waits for its answer, which never comes
        time.sleep(1.0)
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert until(lambda: not any(map(alive, there))), there
    assert running(folder) is None and (folder / "server.json").exists()
    left = Path("/dev/shm") / f"{region_prefix(folder)}left"  # as of a stub that was killed too
    left.touch()
    # Its number may be another's by now: that one must not be taken for a server, nor be ended.
    with subprocess.Popen(["sleep", "600"]) as other:
        state = json.loads((folder / "server.json").read_text())
        (folder / "server.json").write_text(json.dumps({**state, "pid": other.pid}))
        assert main(["stop", "--folder", str(folder)]) == 1
        with standin_server(folder) as server:
            assert not left.exists()
            works(server)
        assert other.poll() is None
        other.kill()
    assert not regions(folder)


def test_an_exported_model_is_served(tmp_path: Path) -> None:
    """`make server MODEL=<folder>`, of a model that the capstone exported."""
    need_server()
    folder, model, tokenizer = tmp_path / "model", pretrained("draft"), shipped_tokenizer()
    folder.mkdir()
    save_pretrained(model, folder)
    tokenizer.save(folder, end=END_OF_TEXT, length=model.config.max_position_embeddings)
    with program(tmp_path / "s", "--model", str(folder)) as started:
        assert "ready" in greeting(started)
        parts = generate_stream(addresses(tmp_path / "s"), PROMPT, max_tokens=12, timeout=FAULT_S)
        said = "".join(part.text for part in parts)
        started.send_signal(signal.SIGTERM)
        assert started.wait(FAULT_S) == 0
    assert said == text_of(PROMPT, 12, model="draft")


@pytest.mark.parametrize("name", ["aim", ""])
def test_a_model_that_is_none_is_refused_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "repository"
    for model in (name, str(tmp_path)):  # a folder without a model is none either
        assert main(["start", "--folder", str(folder), "--model", model]) == 1
        assert f"a folder with a config.json, got {model!r}" in capsys.readouterr().err
    assert not folder.exists()


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
    assert until(lambda: not any(map(alive, there)))
    assert running(folder) is None and not regions(folder)
