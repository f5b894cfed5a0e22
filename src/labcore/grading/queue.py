"""A folder of notebooks to run, from which any number of processes take work.

Any machine with access to the folder can help. A job belongs to the process that holds the lock on
its file. When that process ends, for whatever reason, the system releases the lock and the job is
free again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labcore.grading.judged import Judged
from labcore.grading.sandbox import Limits

__all__ = ["Job", "Queue", "locked", "write_whole"]

TRIES = 3
PATIENCE_S = 0.5
GAVE_UP = f"it crashed the grading process {TRIES} times"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A repaired notebook to run.

    number: the student number, None if unknown. code: a digest of the lab's source and of the code
    that judges it; a change to either makes a new job.
    """

    student: str
    lab: str
    code: str
    notebook: dict[str, Any]
    number: int | None
    limits: Limits = field(default_factory=Limits)

    def to_json(self) -> str:
        """The job as text; equal jobs have equal text."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job from the text of `to_json`."""
        told = json.loads(text)
        return cls(**{**told, "limits": Limits(**told["limits"])})

    @property
    def key(self) -> str:
        """The job's name in a queue: equal for equal jobs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: a reader never sees part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process got the lock on the file; it holds the lock until the block ends."""
    import fcntl  # does not exist on Windows, where grading does not run

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as problem:
            raise ValueError(
                f"{path.parent} is on a file system without file locks ({problem.strerror}), "
                "which grading needs; use another folder"
            ) from problem
        yield True


class Queue:
    """The queue in a folder: `jobs`, `claims` and `results`, each with one file per job."""

    def __init__(self, folder: Path) -> None:
        self._jobs, self._claims, self._results = (
            folder / name for name in ("jobs", "claims", "results")
        )

    def fill(self, jobs: Iterable[Job]) -> list[str]:
        """Makes the queue hold exactly these jobs; returns their keys. Earlier results stay.

        A job that was given up is tried again: the machine may have been at fault.
        """
        for folder in (self._jobs, self._claims, self._results):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {job.key: job for job in jobs}
        for folder in (self._jobs, self._claims, self._results):
            for path in folder.iterdir():
                if path.stem not in wanted and not path.name.startswith("."):
                    path.unlink(missing_ok=True)
        for key, job in wanted.items():
            if not self._path(self._jobs, key).is_file():
                write_whole(self._path(self._jobs, key), job.to_json())
            result = self.result(key)
            if result is not None and result.problem == GAVE_UP:
                self._path(self._results, key).unlink()
            elif result is not None:
                continue
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self._path(self._claims, key), 0)  # resets its tries
        return list(wanted)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{key}.json"

    def job(self, key: str) -> Job:
        """A job by its key."""
        return Job.from_json(self._path(self._jobs, key).read_text(encoding="utf-8"))

    def result(self, key: str) -> Judged | None:
        """A job's result, None until there is one."""
        try:
            text = self._path(self._results, key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return Judged.from_json(text)

    def left(self) -> list[str]:
        """The keys of the jobs without a result, including those in progress."""
        done = {path.name for path in self._results.glob("*.json")}
        return sorted(path.stem for path in self._jobs.glob("*.json") if path.name not in done)

    def work(self, run: Callable[[Job], Judged], go_on: Callable[[], bool] = lambda: True) -> int:
        """Runs jobs until all have a result, including those of a process that ended.

        Returns how many it ran. run: runs a job; an exception stops the work. go_on: called before
        each job; False stops the work.
        """
        count = 0
        while left := self.left():
            taken = False
            for key in left:
                if not go_on():
                    return count
                with locked(self._path(self._claims, key)) as mine:
                    # Another process may have finished the job since it was listed.
                    if mine and self.result(key) is None:
                        taken = True
                        write_whole(self._path(self._results, key), self._try(key, run).to_json())
                        count += 1
            if not taken:
                time.sleep(PATIENCE_S)
        return count

    def _try(self, key: str, run: Callable[[Job], Judged]) -> Judged:
        """One try, counted before it begins: the size of the claim file is the number of tries."""
        claim = self._path(self._claims, key)
        job = self.job(key)
        if claim.stat().st_size >= TRIES:
            cells = len(job.notebook["cells"])
            return Judged(
                outputs=[[] for _ in range(cells)],
                counts=[None] * cells,
                errors={},
                problem=GAVE_UP,
            )
        # A separate handle: the other one holds the lock.
        with claim.open("ab") as file:
            file.write(b".")
        return run(job)
