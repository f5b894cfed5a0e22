"""The queue: nothing is tried twice, nothing is lost when who works on it dies."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from labcore.grading.judged import Judged
from labcore.grading.queue import GAVE_UP, TRIES, Job, Queue, locked
from labcore.grading.sandbox import Limits

pytestmark = pytest.mark.long

SPAWN = multiprocessing.get_context("spawn")


def job(student: str) -> Job:
    return Job(student=student, lab="mini", code="1", notebook={"cells": [{}, {}]}, number=None)


def judged(text: str) -> Judged:
    return Judged(outputs=[[], []], counts=[1, None], errors={"double": ("E", text)}, stopped=2)


def at_work(tries: Path) -> set[str]:
    """The processes that tried something."""
    return {path.name.rpartition(".")[2] for path in tries.iterdir()}


def slow(folder: Path, tries: Path, seconds: float, together: int) -> None:
    """Works on the queue once so many have begun; each try leaves a file of its own."""

    def run(one: Job) -> Judged:
        (tries / f"{one.student}.{os.getpid()}").touch()
        end = time.monotonic() + 300
        while len(at_work(tries)) < together and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(seconds)
        return judged(f"{one.student} by {os.getpid()}")

    Queue(folder).work(run)


def begin(
    folder: Path, tries: Path, seconds: float, together: int = 1
) -> multiprocessing.process.BaseProcess:
    process = SPAWN.Process(target=slow, args=(folder, tries, seconds, together))
    process.start()
    return process


def tried(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


def until(what: object, folder: Path, count: int, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while len(tried(folder)) < count:
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def tries(tmp_path: Path) -> Path:
    (tmp_path / "tries").mkdir()
    return tmp_path / "tries"


STUDENTS = ["anna", "bo b.", "李雷", "=1", *(f"s{n}" for n in range(13))]


def test_a_job_and_a_trial_survive_the_file(tmp_path: Path) -> None:
    one = Job(
        student="李 \u2028雷", lab="x", code="c", notebook={"cells": []}, number=10**17,
        limits=Limits(cell_s=1.5),
    )  # fmt: skip
    (key,) = Queue(tmp_path).fill([one, one])
    assert Queue(tmp_path).job(key) == one and one.key == key
    assert job("a").key != job("b").key
    Queue(tmp_path).work(lambda _: judged("\ud7ff ünï"))
    assert Queue(tmp_path).result(key) == judged("\ud7ff ünï")


def test_two_at_work_try_each_job_once(tmp_path: Path, tries: Path) -> None:
    keys = Queue(tmp_path / "q").fill(map(job, STUDENTS))
    both = [begin(tmp_path / "q", tries, 0.05, together=2) for _ in range(2)]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    assert tried(tries) == sorted(STUDENTS)
    assert Queue(tmp_path / "q").left() == []
    told = [Queue(tmp_path / "q").result(key) for key in keys]
    assert all(one is not None for one in told)
    assert len(at_work(tries)) == 2, "one did it all"


def test_what_a_killed_one_held_is_tried_by_another(tmp_path: Path, tries: Path) -> None:
    keys = Queue(tmp_path / "q").fill(map(job, STUDENTS))
    held = begin(tmp_path / "q", tries, 3600)
    until("the first to begin", tries, 1)
    other = begin(tmp_path / "q", tries, 0)
    until("the second to do the rest", tries, len(STUDENTS))
    time.sleep(1.5)  # it must wait for the one that is held, and not take it
    assert len(list(tries.iterdir())) == len(STUDENTS) and other.is_alive()
    assert held.pid is not None
    os.kill(held.pid, signal.SIGKILL)
    held.join()
    other.join(300)
    assert other.exitcode == 0
    assert len(list(tries.iterdir())) == len(STUDENTS) + 1
    assert all(Queue(tmp_path / "q").result(key) for key in keys)


def test_a_job_that_ends_whoever_tries_it_is_given_up(tmp_path: Path) -> None:
    (key,) = Queue(tmp_path).fill([job("bomb")])
    for _ in range(TRIES):
        process = SPAWN.Process(target=end_at_once, args=(tmp_path,))
        process.start()
        process.join(300)
        assert process.exitcode == 9
    assert Queue(tmp_path).work(lambda _: pytest.fail("tried again")) == 1
    result = Queue(tmp_path).result(key)
    assert result is not None and result.problem == GAVE_UP and len(result.outputs) == 2
    Queue(tmp_path).fill([job("bomb")])
    assert Queue(tmp_path).work(lambda _: judged("better now")) == 1


def end_at_once(folder: Path) -> None:
    Queue(folder).work(lambda _: os._exit(9))


def test_a_new_run_counts_tries_anew_and_keeps_results(tmp_path: Path) -> None:
    done, bomb, gone = job("done"), job("bomb"), job("gone")
    queue = Queue(tmp_path)
    queue.fill([done, gone])
    queue.work(lambda one: judged(one.student))
    queue.fill([done, bomb])
    for _ in range(TRIES):
        with pytest.raises(ZeroDivisionError):
            queue.work(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    queue.fill([done, bomb])
    seen = []
    queue.work(lambda one: seen.append(one.student) or judged("again"))  # type: ignore[func-returns-value]
    assert seen == ["bomb"]
    assert queue.result(done.key) == judged("done") and queue.result(gone.key) is None
    assert {path.stem for path in (tmp_path / "jobs").iterdir()} == {done.key, bomb.key}


def test_who_is_told_to_stop_leaves_the_rest(tmp_path: Path, seed: int) -> None:
    queue = Queue(tmp_path)
    queue.fill(map(job, STUDENTS))
    allowed = random.Random(seed).randrange(1, len(STUDENTS))
    left = iter([True] * allowed)
    assert queue.work(lambda _: judged(""), go_on=lambda: next(left, False)) == allowed
    assert len(queue.left()) == len(STUDENTS) - allowed


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with locked(tmp_path / "x") as first, locked(tmp_path / "x") as second:
        assert first and not second
    with locked(tmp_path / "x") as again:
        assert again
