"""The form of a child for macOS and Windows, a fresh Python, keeps the same promises on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from labcore import processes
from labcore.processes import Worker, WorkerError, child

# Collected here once more, to run with a fresh Python for each child.
from tests.processes.test_run import (
    gone,
    pids_in,
    test_a_hang_ends_and_says_where,  # noqa: F401
)
from tests.processes.test_worker import (  # noqa: F401
    test_arrays_and_plain_values_cross,
    test_output_is_shown_up_to_a_limit,
    test_what_ends_the_process_is_told_and_the_next_call_works,
    worker,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FRESH", True)


def test_the_child_is_no_fork(worker: Worker) -> None:  # noqa: F811
    assert worker.call(os.getppid) == os.getpid()
    assert isinstance(worker._child.process, child.Spawned)  # type: ignore[union-attr]


def test_more_than_a_pipe_holds_crosses_both_ways() -> None:
    many = np.arange(2**20, dtype=np.float64)
    with Worker(timeout_s=60) as one:
        np.testing.assert_array_equal(one.call(np.negative, many), -many)
        with pytest.raises(WorkerError) as caught:  # while the request is still on its way
            one.call(lambda _: os._exit(3), np.zeros(2**22))
        assert caught.value.kind == "died"
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

    assert processes.run(meet, 2, 3) == [7.0, 7.0]
    assert "[rank 1] met" in capsys.readouterr().out
    with pytest.raises(processes.ProcessesError, match="rank 1 raised") as caught:
        processes.run(meet, 2, -1)
    assert isinstance(caught.value.__cause__, ValueError)


SCRIPT = """
import os, sys
from labcore.processes import Worker, child
child.FRESH = True
def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while True: pass
Worker(timeout_s=600).call(wait, sys.argv[1])
"""


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, folder])
    pids = pids_in(folder, 1)
    parent.kill()
    parent.wait(60)
    assert gone(pids)


def test_a_worker_that_nobody_closed_does_not_hold_up_the_end() -> None:
    code = SCRIPT.replace("Worker(timeout_s=600)", "worker = Worker()\nworker").replace(
        "call(wait, sys.argv[1])", "call(os.getpid)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0
