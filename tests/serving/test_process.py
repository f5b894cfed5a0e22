"""The engine as a process of its own, and the supervisor that keeps processes alive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labcore.decoding import SamplingConfig, generate
from labcore.models import pretrained, shipped_tokenizer
from labcore.serving.remote import process
from labcore.serving.remote.client import EngineClient, EngineError
from labcore.serving.remote.supervisor import Part, Supervisor, SupervisorError
from tests.serving.standin import StandIn, until

ROOT = Path(__file__).resolve().parents[2]
STANDIN = [sys.executable, "-m", "tests.serving.standin"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="labcore-") as name:
        yield Path(name)


def answers(path: Path) -> bool:
    try:
        with EngineClient(path, timeout=5.0) as client:
            return bool(client.health())
    except (ConnectionError, EngineError, TimeoutError):
        return False


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Process:
    """A command in the checkout's root, killed at the end."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stderr):
            if stream is not None:
                stream.close()


def test_the_engines_process_says_what_generate_says(folder: Path) -> None:
    """The shipped target, greedy and drawn, with text prompts and ids; then SIGTERM."""
    path = folder / "engine"
    command = [sys.executable, "-m", "labcore.serving.remote.process", "--socket", str(path)]
    command += ["--threads", "1", "--num-blocks", "40", "--max-num-seqs", "3", "--max-waiting", "2"]
    with Process(command) as program:
        model, tokenizer = pretrained("target"), shipped_tokenizer()
        assert until(lambda: answers(path)), program.poll()
        with EngineClient(path) as client:
            prompt = "def area(width, height):\n"
            ids = tokenizer.encode(prompt)
            for how in ({"max_tokens": 9}, {"max_tokens": 9, "temperature": 0.8, "seed": 5}):
                alone = generate(
                    model, [ids], sampling=[SamplingConfig(**how)], tokenizer=tokenizer
                )
                for asked in (prompt, ids):
                    said = client.submit(asked, **how).result()
                    assert said.text == (alone.texts or [])[0]
                    assert list(said.tokens) == list(alone.tokens[0])
            with pytest.raises(EngineError) as caught:
                client.submit("x", max_tokens=100_000).result()
            assert caught.value.code == "invalid"
            stats = client.stats()
            assert stats["held"] == 0 and stats["free"] + stats["cached"] == stats["num_blocks"]
            assert stats["waiting"] == stats["running"] == 0
        program.send_signal(signal.SIGTERM)
        assert program.wait(120) == 0
        assert not path.exists()


def test_process_ends_with_its_input_and_spares_wait_for_a_line(folder: Path) -> None:
    path = folder / "engine"
    with Process([*STANDIN, "--socket", str(path), "--spare"]) as spare:
        with Process([*STANDIN, "--socket", str(path)]) as first:
            assert until(lambda: answers(path)), first.poll()
            assert spare.poll() is None
            first.kill()  # leaves its socket
        assert spare.stdin is not None and first.stdin is not None
        spare.stdin.write(b"begin\n")
        spare.stdin.flush()
        assert until(lambda: answers(path)), spare.poll()
        spare.stdin.close()
        assert spare.wait(120) == 0
    assert not path.exists()


def test_spare_ends_with_its_input_though_its_output_is_unread(folder: Path) -> None:
    """The kernel then tells it of a reset, and not of the end."""
    ours, theirs = socket.socketpair()
    command = [*STANDIN, "--socket", str(folder / "engine"), "--spare"]
    with subprocess.Popen(command, stdin=theirs.fileno()) as spare:
        theirs.close()
        ours.sendall(b"begin\n")
        assert until(lambda: answers(folder / "engine")), spare.poll()
        ours.close()
        try:
            assert spare.wait(120) == 0
        finally:
            spare.kill()


def test_a_spare_that_is_never_needed_makes_no_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.os, "read", lambda *_: b"")
    monkeypatch.setattr(process.os, "write", lambda *_: 0)
    assert process.attend(lambda: pytest.fail("made"), folder / "engine", spare=True) == 0


def test_a_bad_command_line_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert process.main(["--socket", str(folder / "x"), "--model", "no such folder"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("model must be") and said.endswith("got 'no such folder'\n")
    assert said.count("\n") == 1


def test_an_engine_that_breaks_ends_its_process(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a supervisor starts another; the socket is gone and the backend was closed."""

    class Broken(StandIn):
        closed = False

        def health(self) -> dict[str, Any]:
            raise RuntimeError("planted")

        def close(self) -> None:
            self.closed = True

    engine = Broken()
    assert process.attend(lambda: engine, folder / "engine", attached=False) == 1
    assert engine.closed and not (folder / "engine").exists()
    assert capsys.readouterr().err == "the engine is exiting: planted\n"


STALLED = """
import sys, time
from labcore.serving.remote import process
process.STALLED_S = 0.3
class Service:
    healthy, since = True, time.monotonic()
    busy = property(lambda self: time.monotonic() - self.since)
    close = lambda self: time.sleep(1000)
process.attend(lambda: process.ServiceBackend(Service()), sys.argv[1], attached=False)
"""


def test_an_engine_that_hangs_ends_its_process(folder: Path) -> None:
    """Its thread cannot be joined, so that nothing is closed."""
    command = [sys.executable, "-c", STALLED, str(folder / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "a step has taken more than 0 s" in done.stderr


# The supervisor, over processes that only touch files: no torch


WORKER = """
import os, select, stat, sys, time
name, spare = sys.argv[1], "--spare" in sys.argv
if spare:
    os.write(0, b"ready\\n")
    if not os.read(0, 100):
        sys.exit(0)
open(name, "a").write(f"{os.getpid()} {'spare' if spare else 'cold'}\\n")
attached = stat.S_ISSOCK(os.fstat(0).st_mode)
while True:
    if attached and select.select([0], [], [], 0)[0] and not os.read(0, 100):
        sys.exit(0)
    time.sleep(0.01)
    if os.path.exists(name + ".die"):
        os.remove(name + ".die")
        sys.exit(3)
"""


def worker(folder: Path, name: str, **options: Any) -> Part:
    file = folder / name
    told = {"healthy": lambda: bool(starts(folder, name)), **options}
    return Part(
        name=name,
        command=[sys.executable, "-S", "-c", WORKER, str(file)],
        log=folder / f"{name}.log",
        **told,
    )


def starts(folder: Path, name: str) -> list[tuple[int, str]]:
    """(pid, how) of each process of a worker that began."""
    if not (folder / name).exists():
        return []
    lines = (folder / name).read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def test_what_dies_is_started_again_and_the_rest_is_left_alone(folder: Path) -> None:
    cleaned: list[str] = []
    parts = [
        worker(folder, "one", spare=True, attached=True, clean=lambda: cleaned.append("one")),
        worker(folder, "two", clean=lambda: cleaned.append("two")),
    ]
    with Supervisor(parts) as supervisor:
        first = {name: supervisor.pid(name) for name in ("one", "two")}
        assert starts(folder, "one")[0][1] == "cold"
        assert until(lambda: supervisor.spare_ready("one"))
        assert not supervisor.spare_ready("two")
        killed = first["one"]
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert until(lambda: len(starts(folder, "one")) == 2)
        assert starts(folder, "one")[1][1] == "spare"  # the one that was ready
        (folder / "one.die").touch()
        assert until(lambda: len(starts(folder, "one")) == 3)
        assert supervisor.reasons()["one"] == "it ended with code 3"
        assert supervisor.pid("two") == first["two"]
        assert supervisor.restarts() == {"one": 2, "two": 0}
        assert cleaned == ["one", "one"]
        last = [supervisor.pid(name) for name in ("one", "two")]
    assert not any(alive(pid) for pid in last if pid is not None)
    assert len(starts(folder, "one")) == 3  # a spare that was never needed ended in peace
    supervisor.stop()  # harmless


def test_what_is_broken_or_silent_is_killed_and_started_again(folder: Path) -> None:
    broken, healthy = [""], [True]
    part = worker(folder, "one", broken=lambda: broken[0], healthy=lambda: healthy[0], silence=0.3)
    with Supervisor([part]) as supervisor:
        first = supervisor.pid("one")
        assert until(lambda: len(starts(folder, "one")) == 1)
        broken[0] = "it lost its arm"
        assert until(lambda: supervisor.restarts()["one"] > 0)
        broken[0] = ""
        assert supervisor.reasons()["one"] == "it lost its arm"
        assert first is not None and not alive(first)
        supervisor.wait_healthy(120)
        count = supervisor.restarts()["one"]
        healthy[0] = False
        assert until(lambda: supervisor.restarts()["one"] == count + 1)
        healthy[0] = True
        assert "unhealthy for" in supervisor.reasons()["one"]
        supervisor.wait_healthy(120)


def test_what_dies_at_once_is_given_up_with_the_end_of_its_log(folder: Path) -> None:
    code = "import sys; print('no such weights'); sys.exit(7)"
    bad = Part(
        name="bad",
        command=[sys.executable, "-S", "-c", code],
        log=folder / "logs" / "bad.log",
        healthy=lambda: False,
    )
    supervisor = Supervisor([worker(folder, "good"), bad], most=3, within=60.0)
    with pytest.raises(SupervisorError) as caught:
        supervisor.start(120)
    said = str(caught.value)
    assert "bad had to be started 3 times in 60 s" in said and "ended with code 7" in said
    assert "no such weights" in said
    assert not any(alive(pid) for pid, _ in starts(folder, "good"))


def test_futile_starts_are_given_up_however_long_each_takes(folder: Path) -> None:
    """Also behind a healthy time, and a spare that cannot live is not made for ever."""
    code = WORKER.replace(
        "name, spare", "name, dead = sys.argv[1], sys.argv[1] + '.dead'\nname, spare", 1
    )
    code = code.replace("if spare:", "if os.path.exists(dead): sys.exit(5)\nif spare:", 1)
    part = worker(folder, "one", spare=True, attached=True)
    part = replace(part, command=[sys.executable, "-S", "-c", code, str(folder / "one")])
    supervisor = Supervisor([part], most=1000, within=0.001, vain=3)
    with supervisor:
        assert until(lambda: supervisor.spare_ready("one"))
        (folder / "one.dead").touch()
        first, spare = supervisor.pid("one"), supervisor.spare_pid("one")
        assert first is not None and spare is not None
        os.kill(spare, signal.SIGKILL)
        state = supervisor._states["one"]
        assert until(lambda: state.spares == 3 and supervisor.spare_pid("one") is None)
        looks = supervisor._healthy_looks
        assert until(lambda: supervisor._healthy_looks > looks + 3)
        assert state.spares == 3 and supervisor.pid("one") == first and not supervisor.failure
        os.kill(first, signal.SIGKILL)
        assert until(lambda: supervisor.failure)
        assert "one was started 3 times and was never healthy" in supervisor.failure
        assert "it ended with code 5" in supervisor.report()
        with pytest.raises(SupervisorError, match="was never healthy"):
            supervisor.wait_healthy(120)


def test_a_process_that_cannot_be_made_takes_no_other_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refused = subprocess.Popen, []

    def refuses(command: list[str], **options: Any) -> Any:
        if str(folder / "one") in command and len(refused) < 3:
            refused.append("--spare" in command)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return make(command, **options)

    parts = [worker(folder, "one", spare=True), worker(folder, "two")]
    with Supervisor(parts) as supervisor:
        first, two = supervisor.pid("one"), supervisor.pid("two")
        assert until(lambda: supervisor.spare_ready("one"))
        spare = supervisor.spare_pid("one")
        assert first is not None and spare is not None
        monkeypatch.setattr("labcore.serving.remote.supervisor.subprocess.Popen", refuses)
        os.kill(spare, signal.SIGKILL)
        assert until(lambda: refused == [True])
        os.kill(first, signal.SIGKILL)
        assert until(lambda: len(refused) == 3 and supervisor.pid("one") not in (None, first))
        supervisor.wait_healthy(120)
        assert supervisor.pid("two") == two and not supervisor.failure


def test_parts_end_though_one_cannot_be_cleaned_up(folder: Path) -> None:
    def fails() -> None:
        raise OSError("planted")

    with Supervisor([worker(folder, "one"), worker(folder, "two", clean=fails)]) as supervisor:
        first = supervisor.pid("one")
    assert first is not None and not alive(first)
    assert supervisor.failure == "two was not cleaned up: planted"


def test_what_never_becomes_healthy_is_said_by_name(folder: Path) -> None:
    never = worker(folder, "never", healthy=lambda: False)
    fine = worker(folder, "fine", healthy=lambda: True)
    with pytest.raises(SupervisorError, match=r"never was not healthy within 2\.0 s"):
        Supervisor([fine, never]).start(2.0)
    assert not any(alive(pid) for name in ("fine", "never") for pid, _ in starts(folder, name))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_nothing_outlives_a_supervisor_that_is_killed(folder: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from tests.serving.test_process import worker; "
        "from labcore.serving.remote.supervisor import Supervisor; folder = Path(sys.argv[1]); "
        "parts = [worker(folder, 'one', spare=True), worker(folder, 'two')]; "
        "Supervisor(parts).start(); time.sleep(600)"
    )
    with Process([sys.executable, "-c", code, str(folder)]) as program:
        assert until(lambda: starts(folder, "one") and starts(folder, "two")), program.poll()
    pids = [starts(folder, name)[0][0] for name in ("one", "two")]
    assert until(lambda: not any(alive(pid) for pid in pids))
