"""Grades a class's notebooks: `make grade SUBMISSIONS=folder`.

There are three steps, in one command or, on a cluster, in one command each. `prepare` makes a queue
of the submissions, any number of processes `work` on it, and a single `collect` writes the
gradebook, the tables and a feedback page for each notebook. Everything is in one folder, which the
instructor keeps private except for `feedback`. Unchanged submissions are not run again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from labcore.grading import sandbox
from labcore.grading.intake.collection import collect as take_in
from labcore.grading.judged import Judged, run_and_judge
from labcore.grading.plan import COURSE, NOT_YET, ClassPlan, Entry, Settings, code_of
from labcore.grading.queue import Job, Queue, locked, write_whole
from labcore.grading.report import Row, lateness, summary, write_csv, write_export
from labcore.labs.nbgrader_settings import quiet_log
from labcore.labs.releases import source_paths
from labcore.labs.source import read_lab

__all__ = ["NOT_YET", "Settings", "collect", "grade", "prepare", "refusal", "work"]

PLAN, QUEUE, LOG = "plan.json", "queue", "grading.log"
LOOK_S = 0.3
USUAL = Settings()
REFUSED = 3  # exit code of a helper that found a job of another version
FAILURES = 3  # helpers that may fail before grading gives up

Say = Callable[[str], object]


def refusal() -> str:
    """Why student code is not run here, "" if there is a sandbox for it."""
    if not (lack := sandbox.missing()):
        return ""
    return f"""Student code runs only in a sandbox, and this machine has none: {lack}.
book/teaching/hardware.md says what the sandbox needs.
To run it with your own privileges anyway, on a machine where it can do no harm:
  make grade SUBMISSIONS=<folder> UNSANDBOXED=1
  .venv/bin/python -m labcore grade <folder> --unsandboxed"""


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Makes this the only process that writes to out. Raises ValueError if there is another."""
    with locked(out / "writer.lock") as mine:
        if not mine:
            raise ValueError(f"another run writes to {out}; wait for it or choose another --out")
        yield


def _make_ready(out: Path, submissions: Path) -> None:
    """Makes out, unless it is the output of an earlier run. Raises ValueError for other folders."""
    here, theirs = out.resolve(), submissions.resolve()
    if not theirs.exists():
        raise ValueError(f"{theirs} does not exist; name a folder, a .zip, a .txt or a .csv")
    if here == theirs or here in theirs.parents or theirs in here.parents:
        raise ValueError(f"{out} and {submissions} overlap; choose another --out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / LOG).is_file():
        raise ValueError(f"{out} is not empty and not an earlier output; choose another --out")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    (out / LOG).touch(mode=0o600)


@contextlib.contextmanager
def _open(root: Path, out: Path) -> Iterator[ClassPlan]:
    (out / COURSE).mkdir(exist_ok=True, mode=0o700)
    # Processes that only run notebooks don't pay for importing nbgrader.
    from labcore.grading.gradebook import Gradebook

    with Gradebook(out / COURSE, out / LOG) as course, warnings.catch_warnings():
        # The warnings of nbgrader's database library concern only nbgrader's authors.
        warnings.simplefilter("ignore")
        yield ClassPlan(root, out, course)


def _prepare(
    course: ClassPlan, root: Path, submissions: Path, out: Path, settings: Settings, say: Say
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = take_in(submissions, Path(folder), source_paths(root))
        except OSError as error:
            raise ValueError(f"{submissions} cannot be read ({error.strerror})") from error
        students = len({one.student for one in found})
        due = f"due {settings.due:%Y-%m-%d %H:%M} UTC; " if settings.due else ""
        say(f"{len(found)} notebooks from {students} students; {due}the log is {out / LOG}")
        # An invalid lab raises here, before anything runs.
        for slug in sorted({one.lab for one in found} & source_paths(root).keys()):
            course.lab(slug)
        planned = [course.plan(one, settings) for one in found]
    Queue(out / QUEUE).fill(job for _, job in planned if job is not None)
    plan = {
        "entries": [asdict(entry) for entry, _ in planned],
        "due": settings.due and settings.due.isoformat(),
        "columns": dict(settings.columns),
        "roster": {student: dict(row) for student, row in settings.roster.items()},
    }
    write_whole(out / PLAN, json.dumps(plan, ensure_ascii=False, indent=1))
    shutil.rmtree(out / "feedback", ignore_errors=True)


def prepare(
    root: Path, submissions: Path, out: Path, *, settings: Settings = USUAL, say: Say
) -> None:
    """Fills out's queue with the submissions without running any. Raises ValueError."""
    _make_ready(out, submissions)
    with _alone(out), _open(root, out) as course:
        _prepare(course, root, submissions, out, settings, say)


def _plan(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((out / PLAN).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{out} has no queue; make it with: .venv/bin/python -m labcore grade <submissions> "
            f"--only-queue --out {out}"
        ) from error


def work(
    root: Path,
    out: Path,
    *,
    settings: Settings = USUAL,
    go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Runs jobs of out's queue that no other process has taken until all are done.

    Returns how many it ran. Of the settings it uses only `sandboxed`; limits are part of each job.
    Raises ValueError if the queue was made with another version of the code.
    """
    _plan(out)
    log = quiet_log(out / LOG)
    labs = {slug: read_lab(path) for slug, path in source_paths(root).items()}

    def run(job: Job) -> Judged:
        lab = labs.get(job.lab)
        if lab is None or code_of(lab) != job.code:
            raise ValueError(
                f"{out} was made with another version of labcore or of the lab {job.lab} than "
                "this checkout's; run both from the same checkout"
            )
        try:
            return run_and_judge(
                lab,
                job.notebook,
                number=job.number,
                limits=job.limits,
                sandboxed=settings.sandboxed,
            )
        except (OSError, MemoryError):
            raise  # the machine's fault, not the notebook's
        except Exception:
            log.exception("running %s by %s", job.lab, job.student)
            cells = job.notebook["cells"]
            return Judged(
                outputs=[[] for _ in cells],
                counts=[None] * len(cells),
                errors={},
                problem="judging it failed; see grading.log, and please report this",
            )

    try:
        return Queue(out / QUEUE).work(run, go_on)
    finally:
        for handler in log.handlers:
            handler.close()


def _help(root: Path, out: Path, settings: Settings, parent: int) -> None:
    """Runs in a process that works alongside the collecting one and ends with it."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            work(root, out, settings=settings, go_on=lambda: os.getppid() == parent)
        except ValueError:
            sys.exit(REFUSED)


@contextlib.contextmanager
def _helpers(root: Path, out: Path, settings: Settings, jobs: int) -> Iterator[Callable[[], None]]:
    """Processes that work on the queue; yields a function that replaces those that ended early."""
    context = multiprocessing.get_context("spawn")
    running: list[Any] = []
    failed = 0
    queue = Queue(out / QUEUE)

    def keep_up() -> None:
        nonlocal failed
        ended = {one: one.exitcode for one in running if one.exitcode is not None}
        if REFUSED in ended.values():
            raise ValueError("labcore or a lab changed during grading; run the command again")
        # Killed helpers do not count: a notebook may cause that, and its tries are counted.
        failed += sum(code > 0 for code in ended.values())
        if failed > FAILURES:
            raise RuntimeError(
                f"processes that run notebooks failed {failed} times; their output above says why "
                "(a full disk, for example). Fix that and run the command again to continue"
            )
        running[:] = [one for one in running if one not in ended]
        for _ in range(min(jobs, len(queue.left())) - len(running)):
            process = context.Process(target=_help, args=(root, out, settings, os.getpid()))
            process.start()
            running.append(process)

    try:
        yield keep_up
    finally:
        for process in running:
            process.terminate()
            process.join()


class _Collecting:
    """The rows so far, printed and written as they arrive."""

    def __init__(self, course: ClassPlan, out: Path, say: Say) -> None:
        plan = _plan(out)
        due = plan["due"] and datetime.fromisoformat(plan["due"])
        self._due: datetime | None = due
        self._columns, self._roster = plan["columns"], plan["roster"]
        self._entries = [Entry(**entry) for entry in plan["entries"]]
        self._course, self._out, self._say = course, out, say
        self._queue = Queue(out / QUEUE)
        self._rows: dict[int, Row] = {}

    def take(self, *, all_of_them: bool = False) -> bool:
        """Enters new results; returns whether all are in.

        all_of_them: also enters the submissions that were not run.
        """
        for place, entry in enumerate(self._entries):
            if place in self._rows:
                continue
            judged = self._queue.result(entry.key) if entry.key else None
            if entry.key and judged is None and not all_of_them:
                continue
            job = self._queue.job(entry.key) if judged is not None else None
            row = self._course.row(entry, job, judged)
            self._rows[place] = replace(row, late=lateness(row.handed_in, self._due))
            self._tell(self._rows[place])
        return len(self._rows) == len(self._entries)

    def _tell(self, row: Row) -> None:
        # Written after each row, so that an interrupt keeps what was graded.
        write_csv(self._out / "grades.csv", self.rows)
        got = "" if row.points is None else f" {row.points:g}/{row.maximum:g}"
        notes = [f"late by {row.late}"] if row.late else []
        if count := len(row.flags):
            notes.append(f"{count} flag{'s' * (count > 1)}")
        told = f" ({', '.join(notes)})" if notes else ""
        place = f"[{len(self._rows)}/{len(self._entries)}]"
        self._say(f"{place} {row.student} {row.lab}{got}: {row.status}{told}")

    @property
    def rows(self) -> list[Row]:
        """The rows so far, in the order of the plan."""
        return [self._rows[place] for place in sorted(self._rows)]

    def finish(self) -> list[Row]:
        """Writes the learning system's table and prints the summary."""
        written = [self._out / "grades.csv", self._out / "feedback"]
        export = self._out / "export.csv"
        if self._columns:
            written.insert(1, export)
            write_export(export, self.rows, self._columns, self._roster)
        else:
            export.unlink(missing_ok=True)  # from an earlier run
        self._say(summary(self.rows))
        if self._due and not any(row.handed_in for row in self.rows):
            self._say("no submission has a known time, so none counts as late")
        if self._roster:
            students = {row.student for row in self.rows if row.student}
            there = len(students & self._roster.keys())
            strangers = ", ".join(sorted(students - self._roster.keys())) or "nobody"
            self._say(f"on the roster: {there} of {len(students)} students; not on it: {strangers}")
        self._say(f"written: {', '.join(map(str, written))}")
        return self.rows


def collect(root: Path, out: Path, *, say: Say) -> list[Row]:
    """Enters the results of out's queue; a submission that was not run yet gets a row saying so.

    Raises ValueError if there is no queue.
    """
    _plan(out)
    with _alone(out), _open(root, out) as course:
        collecting = _Collecting(course, out, say)
        collecting.take(all_of_them=True)
        return collecting.finish()


def grade(
    root: Path, submissions: Path, out: Path, *, settings: Settings = USUAL, say: Say
) -> list[Row]:
    """Grades every notebook in submissions with the labs of the checkout at root.

    submissions: a folder, a zip or a list of repositories (see `intake.collect`); only read.
    out: gets grades.csv, export.csv if columns are set, feedback/<token>/<slug>.html, grading.log,
    and the gradebook in course. An earlier run there is continued, and unchanged submissions are
    not run again. say: called with each line of progress.
    Raises ValueError for unsuitable folders and for an invalid lab source, GradingError if nbgrader
    rejects a lab, RuntimeError if this machine fails. Never raises because of a submission.
    """
    _make_ready(out, submissions)
    jobs = settings.jobs or len(os.sched_getaffinity(0))
    with _alone(out), _open(root, out) as course:
        _prepare(course, root, submissions, out, settings, say)
        collecting = _Collecting(course, out, say)
        with _helpers(root, out, settings, jobs) as keep_up:
            while not collecting.take():
                keep_up()
                time.sleep(LOOK_S)
        return collecting.finish()
