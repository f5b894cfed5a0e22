"""The plan of one grading run: each submission's job, and the row that its result fills."""

from __future__ import annotations

import hashlib
import hmac
import html
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from labcore.grading.feedback import PAGE_HEAD
from labcore.grading.intake.submissions import Submission, mend, read_notebook
from labcore.grading.judged import GradingError, Judged
from labcore.grading.queue import Job, write_whole
from labcore.grading.references import uses_of_answers
from labcore.grading.report import Row
from labcore.grading.sandbox import Limits
from labcore.labs.releases import source_paths
from labcore.labs.source import Lab, read_lab
from labcore.labs.students import number_of
from labcore.records import hashes

if TYPE_CHECKING:
    from labcore.grading.gradebook import Gradebook

__all__ = ["COURSE", "NOT_YET", "ClassPlan", "Entry", "Settings", "code_of", "deciding_modules"]

COURSE = "course"
NOT_YET = "it has not been run yet"
JUDGE = Path(__file__).with_name("judged.py")  # imports everything that decides points
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
{head}<title>{lab}</title></head>
<body><main><h1>{lab}: not graded</h1><p>Why: {reason}.</p><p>{then}</p></main></body>
</html>
"""
HAND_IN_AGAIN = (
    "What to do: open the notebook in JupyterLab. If it opens and is this lab, save it, and hand "
    "in that one file, whose name ends in .ipynb. If it does not open, open the file in a text "
    "editor, copy your answers from there into a new copy of the lab, save that, and hand it in. "
    "If the same message comes again, ask your instructor."
)
ASK = "Your instructor sees this message too. Ask them before you hand in another file."


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a class is graded.

    jobs: concurrent processes; 0 means one per processor. due: in UTC. columns: what each column of
    the learning system holds, by title (`report.read_columns`). roster: the roster's columns, by
    student. numbers: each student's STUDENT, if the notebooks were handed out with one.
    """

    limits: Limits = field(default_factory=Limits)
    sandboxed: bool = True
    jobs: int = 0
    due: datetime | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    roster: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of the plan. key: that of its job, "" if it has a problem instead."""

    student: str
    lab: str
    key: str = ""
    problem: str = ""
    number: str = ""
    flags: Sequence[str] = ()
    handed_in: str = ""


@cache
def deciding_modules(lab: Path) -> list[str]:
    """The modules that decide a lab's points: the judge, and what it and the lab import.

    Modules that draw do not count, so a new figure does not change a class's grades.
    """
    modules = {"labcore.grading.judged", *hashes.modules(JUDGE), *hashes.modules(lab)}
    return sorted(name for name in modules if not name.startswith("labcore.ui"))


def code_of(lab: Lab) -> str:
    """A digest of what decides a lab's points: its source and the code that judges it."""
    return hashlib.sha256(
        lab.path.read_bytes() + hashes.digest_modules(deciding_modules(lab.path)).encode()
    ).hexdigest()[:32]


class ClassPlan:
    """The gradebook of one grading run, with the labs under root and the students' tokens."""

    def __init__(self, root: Path, out: Path, course: Gradebook) -> None:
        self._sources = source_paths(root)
        self._course = course
        self._labs: dict[str, Lab] = {}
        self._out = out
        secret = out / COURSE / "secret"
        if not secret.is_file():
            write_whole(secret, secrets.token_hex(32))
            secret.chmod(0o600)
        self._secret = bytes.fromhex(secret.read_text())

    def lab(self, slug: str) -> Lab:
        """The lab; the first call reads it and adds it to the gradebook."""
        if slug not in self._labs:
            lab = read_lab(self._sources[slug])
            self._course.open_lab(lab)
            self._labs[slug] = lab
        return self._labs[slug]

    def token(self, student: str) -> str:
        """The token that replaces a student's name in paths; it does not reveal the name."""
        return hmac.new(self._secret, student.encode(), hashlib.sha256).hexdigest()[:20]

    def plan(self, submission: Submission, settings: Settings) -> tuple[Entry, Job | None]:
        """The entry and, if it can be graded, the job of one submission."""
        entry = Entry(
            student=submission.student,
            lab=submission.lab,
            problem=submission.problem,
            flags=submission.notes,
            handed_in="" if submission.handed_in is None else submission.handed_in.isoformat(),
        )
        if submission.problem:
            return entry, None
        lab = self.lab(submission.lab)
        release = self._course.open_lab(lab)
        try:
            notebook = read_notebook(submission.path)
            mended = mend(notebook, release)
        except ValueError as problem:
            return replace(entry, problem=str(problem)), None
        except OSError as problem:
            return replace(entry, problem=f"the file cannot be read ({problem.strerror})"), None
        flags = [*submission.notes, *uses_of_answers(notebook, release), *mended.changes]
        number = number_of(notebook, release)
        used = {"": 0, "?": None}.get(number, int(number) if number.isdigit() else None)
        if number and settings.numbers:
            own = settings.numbers.get(submission.student)
            if own is None:
                flags.append("the student is not on the roster")
            elif used != own:
                flags.append(f"STUDENT is {number} but should be {own}; graded as {own}")
            used = used if own is None else own
        job = Job(
            student=submission.student,
            lab=submission.lab,
            code=code_of(lab),
            notebook=mended.notebook,
            number=used,
            limits=settings.limits,
        )
        return replace(entry, key=job.key, number=number, flags=tuple(flags)), job

    def row(self, entry: Entry, job: Job | None, judged: Judged | None) -> Row:
        """Records the result in the gradebook; without one, the row says why."""
        handed_in = datetime.fromisoformat(entry.handed_in) if entry.handed_in else None
        row = Row(
            student=entry.student,
            lab=entry.lab,
            status=f"not graded: {entry.problem or NOT_YET}",
            number=entry.number,
            flags=entry.flags,
            handed_in=handed_in,
        )
        if entry.lab not in self._sources:
            return row
        worth = self.lab(entry.lab).points
        page = self._page(entry)
        row = replace(
            row, worth=worth, exercises=dict.fromkeys(worth, 0.0), feedback=self._below(page)
        )
        if job is None or judged is None:
            return self._not_graded(row, page, HAND_IN_AGAIN if entry.problem else ASK)
        row = replace(row, flags=(*entry.flags, *judged.concerns), timed_out=judged.stopped)
        if judged.problem:
            return self._not_graded(replace(row, status=f"not graded: {judged.problem}"), page)
        try:
            graded = self._course.record(
                entry.lab, self.token(entry.student), job.notebook, judged, name=entry.student
            )
        except GradingError as problem:
            return self._not_graded(replace(row, status=f"not graded: {problem}"), page)
        shutil.copyfile(graded.feedback, page)
        return replace(
            row,
            status="; ".join(["graded", *_happened(judged)]),
            flags=(*row.flags, *graded.changes),
            exercises=graded.points,
            unchecked=judged.unchecked,
        )

    def _page(self, entry: Entry) -> Path:
        path = self._out / "feedback" / self.token(entry.student) / f"{entry.lab}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _below(self, page: Path) -> str:
        return page.relative_to(self._out).as_posix()

    def _not_graded(self, row: Row, page: Path, then: str = ASK) -> Row:
        """Writes a page that says why there are no points and what to do; returns the row."""
        reason = row.status.removeprefix("not graded: ")
        text = PAGE.format(
            head=PAGE_HEAD, lab=html.escape(row.lab), reason=html.escape(reason), then=then
        )
        write_whole(page, text)
        return row


def _happened(judged: Judged) -> Iterator[str]:
    def cells(count: int) -> str:
        return "a cell" if count == 1 else f"{count} cells"

    if judged.stopped:
        yield f"{cells(judged.stopped)} ran out of time"
    if judged.died:
        yield f"{cells(judged.died)} killed the kernel (skipped)"
    if judged.unchecked:
        what = "could not be checked on this machine; see the feedback page"
        yield f"{cells(judged.unchecked)} {what}"
