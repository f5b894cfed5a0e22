"""The book's notebooks run side by side, each in a kernel that nothing else can reach."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from labcore.book import kernels
from tests.book.mini import notebook

pytestmark = pytest.mark.long

ASK = """import json, os
from ipykernel.connect import get_connection_info
told = get_connection_info(unpack=True)
print(json.dumps([told["transport"], os.listdir(), os.environ["LABCORE_BOOK"],
                  os.environ["OMP_NUM_THREADS"]]))"""
# The result leaves the kernel five seconds after the cell has ended.
LATE = """import sys, time
sys.stdout.flush_timeout = sys.stderr.flush_timeout = 0.1
get_ipython().kernel.iopub_thread.schedule(lambda: time.sleep(5))
"late\""""
# Ends only if the other runs at the same time.
MEET = """import pathlib, time
folder = pathlib.Path({folder!r})
(folder / "{mine}").touch()
end = time.monotonic() + 60
while not (folder / "{other}").exists() and time.monotonic() < end:
    time.sleep(0.01)
print((folder / "{other}").exists())"""


def test_a_kernel_has_a_private_socket_and_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "ask.ipynb"
    notebook(path, ASK)
    before = path.read_bytes()
    told = json.loads(kernels.run(path, seconds=60, threads=3).cells[1].outputs[0].text)
    assert told == ["ipc" if os.name == "posix" else "tcp", [], "1", "3"]
    assert path.read_bytes() == before
    # What a person has set is kept.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert json.loads(kernels.run(path, seconds=60, threads=3).cells[1].outputs[0].text)[3] == "1"


def test_an_output_that_comes_late_is_kept_and_one_that_never_comes_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "late.ipynb"
    notebook(path, LATE)
    assert kernels.run(path, seconds=60).cells[1].outputs[0].data["text/plain"] == "'late'"
    with pytest.raises(CellTimeoutError):
        kernels.run(path, seconds=2)


def test_notebooks_run_at_the_same_time_and_one_that_fails_harms_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    paths = [tmp_path / f"{name}.ipynb" for name in ("broken", "left", "right")]
    notebook(paths[0], "1 / 0")
    notebook(paths[1], MEET.format(folder=str(tmp_path), mine="a", other="b"))
    notebook(paths[2], MEET.format(folder=str(tmp_path), mine="b", other="a"))
    ran = dict(kernels.run_all(paths, seconds=90))
    broken = ran.pop(paths[0])
    assert isinstance(broken, CellExecutionError) and broken.ename == "ZeroDivisionError"
    for found in ran.values():
        assert not isinstance(found, Exception) and found.cells[1].outputs[0].text == "True\n"
    assert list(kernels.run_all([], seconds=1)) == []
