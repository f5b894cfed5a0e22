"""run(fn, n): results, failures of every kind, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labcore import processes

SHM = Path("/dev/shm")


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], within_s: float = 60) -> bool:
    until = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def pids_in(folder: Path, n: int, within_s: float = 120) -> list[int]:
    """The names of the n files that children leave in a folder."""
    until = time.monotonic() + within_s
    while len(found := [int(one.name) for one in folder.iterdir()]) < n:
        assert time.monotonic() < until, "the children did not start"
        time.sleep(0.02)
    return found


def leave_pid(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def every_collective(own: torch.Tensor) -> dict[str, torch.Tensor]:
    rank, n = processes.rank_and_world()
    mine = own * (rank + 1)
    total = mine.clone()
    dist.all_reduce(total)
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine)
    root = mine.clone()
    dist.broadcast(root, src=n - 1)
    assert torch.get_num_threads() == 1
    return {"total": total, "parts": torch.stack(parts), "root": root, "pid": os.getpid()}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives_are_right_and_results_come_by_rank(n: int, generator: torch.Generator) -> None:
    own = torch.randn(3, 1, 5, generator=generator, dtype=torch.float64)
    results = processes.run(every_collective, n, own)
    assert len(results) == n
    for result in results:
        torch.testing.assert_close(result["total"], own * (n * (n + 1) / 2))
        expected = torch.stack([own * (i + 1) for i in range(n)])
        torch.testing.assert_close(result["parts"], expected)
        torch.testing.assert_close(result["root"], own * n)
        assert not result["total"].is_shared()
    pids = [os.getpid(), *(result["pid"] for result in results)]
    assert [path for pid in pids for path in SHM.glob(f"torch_{pid}_*")] == []
    assert processes.rank_and_world() == (0, 1)


def test_tensors_travel_whole(seed: int) -> None:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(3, 2)
    big = torch.randn(40, 50).to(torch.bfloat16)
    things = [big[::2, 3:4], torch.tensor(True), torch.empty(0, 4), torch.randn(2, 3).t(),
              torch.tensor([1 + 2j]).conj()]  # fmt: skip
    (came,) = processes.run(
        lambda: ([x.clone() for x in things], layer, layer(torch.ones(1, 3))), 1
    )
    for one, other in zip(things, came[0], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert torch.equal(came[1].weight, layer.weight)
    assert isinstance(came[1].weight, torch.nn.Parameter)
    assert came[2].grad_fn is None


def test_output_is_shown_behind_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("from", dist.get_rank())
        os.write(2, b"no newline")

    processes.run(speak, 2)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        assert f"[rank {rank}] from {rank}" in lines
        assert f"[rank {rank}] no newline" in lines


class Awkward(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("awkward")


@pytest.mark.parametrize("kind", [ValueError, Awkward])
def test_the_first_exception_comes_back_with_its_rank(kind: type, tmp_path: Path) -> None:
    def fail() -> None:
        leave_pid(tmp_path)
        dist.barrier()
        if dist.get_rank() == 1:
            raise kind("the planted fault", 2)
        dist.all_reduce(torch.ones(1))  # Rank 0 loses its peer: a consequence, not the cause.

    with pytest.raises(processes.ProcessesError, match=r"rank 1 raised") as caught:
        processes.run(fail, 2)
    assert (caught.value.rank, caught.value.kind) == (1, "exception")
    assert 'raise kind("the planted fault", 2)' in str(caught.value)
    if kind is ValueError:
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.__cause__.args == ("the planted fault", 2)
    else:
        assert caught.value.__cause__ is None  # It cannot be unpickled; its text says it all.
    assert gone(pids_in(tmp_path, 2))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda: sys.exit(0), "SystemExit"),
    ],
)
def test_a_rank_that_dies_is_named(end: object, words: str, tmp_path: Path) -> None:
    def die() -> None:
        leave_pid(tmp_path)
        dist.barrier()
        if dist.get_rank() == 1:
            print("last words", flush=True)
            end()  # type: ignore[operator]
        dist.barrier()

    with pytest.raises(processes.ProcessesError, match=words) as caught:
        processes.run(die, 2)
    assert caught.value.rank == 1
    assert gone(pids_in(tmp_path, 2))


def test_a_hang_ends_and_says_where(tmp_path: Path) -> None:
    def hang() -> None:
        leave_pid(tmp_path)
        if dist.get_rank() == 1:
            subprocess.Popen(["sleep", "60"])
            time.sleep(600)  # the planted hang

    with pytest.raises(processes.ProcessesError, match=r"not finished: 1;") as caught:
        processes.run(hang, 2, timeout_s=10)
    assert (caught.value.rank, caught.value.kind) == (1, "timeout")
    assert "in hang" in str(caught.value)
    assert gone(pids_in(tmp_path, 2))


SCRIPT = """
import os, sys, time
from labcore import processes

def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(600)

if __name__ == "__main__":
    try:
        processes.run(wait, 2, {folder!r}, timeout_s=600)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_children_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder)))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = pids_in(folder, 2)
    assert all(map(alive, pids))
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=60)
    assert gone(pids)
    if number == signal.SIGINT:
        assert (out, parent.returncode) == ("interrupted\n", 0)


def test_a_function_of_a_notebook_travels() -> None:
    """A notebook's __main__ is no file that a child could import."""
    cell = (
        "import torch, torch.distributed as dist\n"
        "from labcore import processes\n"
        "factor = 3\n"
        "def f(x):\n"
        "    t = torch.tensor([x * factor + dist.get_rank()])\n"
        "    dist.all_reduce(t)\n"
        "    return t.item()\n"
        "def make(k):\n"
        "    return lambda: f(k)\n"
        "print(processes.run(f, 2, 5), processes.run(make(7), 2))\n"
    )
    done = subprocess.run([sys.executable, "-"], input=cell, text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("[31, 31] [43, 43]\n", "")


TORCHRUN = """
import torch, torch.distributed as dist
from labcore import processes

def f(x):
    rank, world = processes.rank_and_world()
    t = torch.tensor([float(rank + x)])
    dist.all_reduce(t)
    return rank, world, t

if __name__ == "__main__":
    assert processes.rank_and_world()[1] in (1, 2)
    for x in range(5):  # later calls must not meet what earlier ones left in torchrun's store
        results = processes.run(f, 2, x)
        total = torch.tensor([2.0 * x + 1])
        assert results == [(0, 2, total), (1, 2, total)], results
    print("agreed")
"""


@pytest.mark.parametrize("start", [["-m", "torch.distributed.run", "--standalone",
                                    "--nproc-per-node=2"], []])  # fmt: skip
def test_one_script_runs_under_torchrun_and_alone(start: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *start, script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == (2 if start else 1)


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="n must be at least 1"):
        processes.run(print, 0)
    with pytest.raises(TypeError, match="without calling it"):
        processes.run(print(), 2)  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(TypeError, match="cannot be passed.*generator"):
        processes.run(print, 1, (one for one in ()))
    with pytest.raises(processes.ProcessesError, match="cannot be passed.*generator"):
        processes.run(lambda: (one for one in ()), 1)
    with pytest.raises(processes.ProcessesError, match="cannot start others"):
        processes.run(lambda: processes.run(print, 1), 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="nproc-per-node 2"):
        processes.run(print, 2)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from labcore import processes\n"
        "class Own(Exception): pass\n"
        "def fail(): raise Own('mine')\n"
        "try:\n"
        "    processes.run(fail, 2)\n"
        "except processes.ProcessesError as problem:\n"
        "    print(isinstance(problem.__cause__, Own), __file__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.stderr) == (f"True {script}\n", "")
