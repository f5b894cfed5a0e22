"""Worker: limits of time and memory, and answers that are refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labcore.processes import Worker, WorkerError, wire
from tests.processes.test_run import alive, gone, pids_in


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(timeout_s=5, memory_mib=256, answer_mib=1) as one:
        yield one


def test_arrays_and_plain_values_cross(worker: Worker, seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(100))
    x = rng.standard_normal((3, 1, 5)).astype(np.float32)
    t = torch.from_numpy(x[::2, :, ::-1].copy()).to(torch.bfloat16).transpose(0, 2)

    def f(a: Any, b: Any, *, flags: Any) -> Any:
        return {"a": a + offset, "b": (b, [None, True, 3, "ü", float("-inf")]), "flags": ~flags}

    came = worker.call(f, x, t, flags=np.array([[True], [False]]))
    np.testing.assert_array_equal(came["a"], x + offset)
    assert came["a"].dtype == np.float32
    assert torch.equal(came["b"][0], t)
    assert came["b"][1] == [None, True, 3, "ü", float("-inf")]
    assert came["flags"].tolist() == [[False], [True]]
    came["a"][0] = 0  # Its own memory, so it can be written.
    pid = worker.pid
    assert worker.call(os.getpid) == pid != os.getpid()


def loop() -> None:
    while True:
        pass


def crash(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (loop, "timeout", "longer than 0.4 s"),
        (lambda: os._exit(7), "died", "exit code 7"),
        (lambda: crash(signal.SIGSEGV), "died", "SIGSEGV"),
    ],
)
def test_what_ends_the_process_is_told_and_the_next_call_works(
    worker: Worker, fn: Any, kind: str, words: str
) -> None:
    pid = worker.call(os.getpid)
    with pytest.raises(WorkerError, match=words) as caught:
        worker.call(fn, timeout_s=0.4 if kind == "timeout" else 20)
    assert caught.value.kind == kind
    assert worker.pid is None
    assert not alive(pid)
    assert worker.call(lambda x: x + 1, 1) == 2


def test_an_exception_is_text_and_the_process_stays(worker: Worker) -> None:
    pid = worker.call(os.getpid)
    with pytest.raises(WorkerError, match="ValueError: planted") as caught:
        worker.call(lambda: int("1") and (_ for _ in ()).throw(ValueError("planted")))
    assert (caught.value.kind, caught.value.type_name) == ("exception", "ValueError")
    assert "Traceback" in caught.value.traceback
    assert worker.pid == pid


@pytest.mark.parametrize("ask", [lambda: np.ones(2**27), lambda: torch.ones(2**27)])
def test_memory_is_bounded(worker: Worker, ask: Any) -> None:
    with pytest.raises(WorkerError, match="memory_mib=256") as caught:
        worker.call(ask)
    assert caught.value.kind == "memory"
    assert worker.call(lambda: float(np.ones(1000).sum())) == 1000


def test_only_plain_things_cross(worker: Worker) -> None:
    with pytest.raises(TypeError, match="got set"):
        worker.call(print, {1})
    with pytest.raises(TypeError, match="array of object"):
        worker.call(print, np.array([None]))
    with pytest.raises(WorkerError, match="got object"):
        worker.call(object)
    with pytest.raises(WorkerError, match="arrays may have at most 1048576 bytes"):
        worker.call(np.ones, 2**18)


def frame(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return wire.LENGTH.pack(len(text)) + text + data


class Evil:
    def __reduce__(self) -> Any:
        return os._exit, (99,)


def described(*one: Any) -> bytes:
    return frame({"value": {"array": 0}, "arrays": [list(one)]})


MALICIOUS = {
    "a pickle": (pickle.dumps(Evil()) * 9, "header may have"),
    "a pickle as header": (frame(pickle.dumps(Evil())), "not JSON"),
    "a false length": (wire.LENGTH.pack(2**63), "header may have"),
    "a huge array": (described("numpy", "float64", [2**40]), "arrays may have"),
    "huge products": (described("torch", "int8", [2**40, 2**40, 2**40]), "arrays may have"),
    "an overflow": (described("torch", "int8", [2**47, 2**47, 0]), "is impossible"),
    "a negative size": (described("numpy", "int8", [-1]), "sizes of at least 0"),
    "objects": (described("numpy", "object", [1]), "not allowed"),
    "an unknown library": (described("pickle", "int8", [1]), "not allowed"),
    "an absent array": (frame({"value": {"array": 3}, "arrays": []}), "must be an array"),
    "deep nesting": (frame(b'{"arrays": [], "value": ' + b"[" * 99999), "not JSON"),
    "no result": (frame({"value": [1, 2, 3], "arrays": []}), "neither a result"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_answer_is_refused(worker: Worker, name: str) -> None:
    data, words = MALICIOUS[name]

    def answer_for_itself() -> None:
        for descriptor in range(3, 50):  # One of them is the pipe of answers.
            try:
                os.write(descriptor, data)
            except OSError:
                continue
        loop()

    with pytest.raises(WorkerError, match=words) as caught:
        worker.call(answer_for_itself)
    assert caught.value.kind == "answer"
    assert worker.pid is None
    assert worker.call(lambda: 1) == 1


def test_an_answer_that_nobody_asked_for_is_not_believed(worker: Worker, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def leave_another() -> int:
        import threading

        def later() -> None:
            time.sleep(0.5)
            for descriptor in range(3, 50):
                try:
                    os.write(descriptor, frame({"value": [True, "false"], "arrays": []}))
                except OSError:
                    continue
            open(os.path.join(folder, str(os.getpid())), "w").close()

        threading.Thread(target=later, daemon=True).start()
        return os.getpid()

    pid = worker.call(leave_another)
    assert pids_in(tmp_path, 1) == [pid]  # it was written
    assert worker.call(lambda: "true") == "true"
    assert gone([pid])


def test_a_short_answer_times_out(worker: Worker) -> None:
    def promise() -> None:
        for descriptor in range(3, 50):
            try:
                os.write(descriptor, described("numpy", "int8", [1000]))
            except OSError:
                continue
        loop()

    with pytest.raises(WorkerError, match="longer than") as caught:
        worker.call(promise, timeout_s=0.4)
    assert caught.value.kind == "timeout"


def test_output_is_shown_up_to_a_limit(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.call(lambda: print("word\n" * 40_000))
    out = capsys.readouterr().out
    assert out.startswith("[worker] word\n")
    assert out.endswith("[the rest of the output is left out]\n")
    worker.call(lambda: print("again"))
    assert capsys.readouterr().out.endswith("[worker] again\n")


SCRIPT = """
import os, sys
from labcore.processes import Worker
def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while True: pass
if __name__ == "__main__":
    Worker(timeout_s=600).call(wait, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, script, folder], stderr=subprocess.DEVNULL)
    pids = pids_in(folder, 1)
    parent.send_signal(number)
    parent.wait(60)
    assert parent.returncode != 0
    assert gone(pids)
