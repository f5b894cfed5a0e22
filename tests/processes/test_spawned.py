"""A fresh Python for each child, the form for macOS and Windows, keeps the same promises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from labcore import processes
from labcore.processes import Worker, WorkerError, child


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FRESH", True)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(timeout_s=60, memory_mib=1024) as one:
        yield one


def loop() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [(loop, "timeout", "longer than 0.4 s"), (lambda: os._exit(7), "died", "exit code 7")],
)
def test_what_ends_the_process_is_told_and_the_next_call_works(
    worker: Worker, fn: Any, kind: str, words: str
) -> None:
    pid = worker.call(os.getpid)
    with pytest.raises(WorkerError, match=words) as caught:
        worker.call(fn, timeout_s=0.4 if kind == "timeout" else 60)
    assert caught.value.kind == kind
    assert worker.pid is None and not psutil.pid_exists(pid)
    offset = 2
    assert worker.call(lambda x: x + offset, 1) == 3


def test_exceptions_and_what_is_printed_come_back(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.call(lambda: print("word\n" * 40_000))
    out = capsys.readouterr().out
    assert out.startswith("[worker] word\n")
    assert out.endswith("[the rest of the output is left out]\n")
    worker.call(lambda: print("ü"))
    assert capsys.readouterr().out.endswith("[worker] ü\n")
    with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
        worker.call(lambda: 1 // 0)
    assert caught.value.kind == "exception" and "Traceback" in caught.value.traceback


def test_more_than_a_pipe_holds_crosses_both_ways(worker: Worker) -> None:
    many = np.arange(2**20, dtype=np.float64)
    np.testing.assert_array_equal(worker.call(np.negative, many), -many)
    (back,) = processes.run(lambda x: x[::-1].copy(), 1, many)
    np.testing.assert_array_equal(back, many[::-1])


def test_ranks_meet_and_say_which_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def meet(ours: int) -> float:
        total = torch.tensor([float(dist.get_rank() + ours)])
        dist.all_reduce(total)
        print("met")
        if ours < 0 and dist.get_rank() == 1:
            raise ValueError("planted")
        return total.item()

    assert processes.run(meet, 2, 3, timeout_s=240) == [7.0, 7.0]
    assert "[rank 1] met" in capsys.readouterr().out
    with pytest.raises(processes.ProcessesError, match="rank 1 raised") as caught:
        processes.run(meet, 2, -1, timeout_s=240)
    assert isinstance(caught.value.__cause__, ValueError)


SCRIPT = """
import os, sys
from labcore.processes import Worker, child
child.FRESH = True
def wait(name):
    with open(name + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(name + ".new", name)
    while True: pass
worker = Worker(timeout_s=600)
worker.call({call})
"""


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT.format(call=f"wait, {str(written)!r}")])
    until = time.monotonic() + 240
    while not written.exists():
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.05)
    there = psutil.Process(int(written.read_text()))
    parent.kill()
    parent.wait(60)
    there.wait(60)


def test_a_worker_that_nobody_closed_does_not_hold_up_the_end() -> None:
    code = SCRIPT.format(call="os.getpid")
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
