"""A class's notebooks graded: `make grade SUBMISSIONS=folder`.

Points into `grades.csv`, a page of feedback for each notebook, what nbgrader logs into
`grading.log`. Students' code runs with the rights of whoever grades: there is no sandbox yet.
"""

from __future__ import annotations

import csv
import html
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labcore.publish.autograding import Course, GradingError
from labcore.publish.feedback import PAGE_HEAD
from labcore.publish.lab_source import Lab, read_lab
from labcore.publish.labs import source_paths
from labcore.publish.nbgrader_settings import CELL_SECONDS
from labcore.publish.references import uses_of_answers
from labcore.publish.submissions import Submission, find, mend, number_of, read_notebook

__all__ = ["NOT_SANDBOXED", "Row", "grade"]

NOT_SANDBOXED = """Grading is not sandboxed yet: it runs the students' code with your rights.
To grade all the same, on a machine where that is acceptable:
  make grade SUBMISSIONS=<folder> UNSANDBOXED=1
  python -m labcore grade <folder> --unsandboxed"""
COLUMNS = ("student", "lab", "number", "points", "maximum", "status", "flags")
LOG = "grading.log"

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
{head}<title>{lab}</title></head>
<body><main><h1>{lab}: not graded</h1><p>{reason}.</p></main></body>
</html>
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of grades.csv. status: "graded", or what happened; flags: for a person to look at.

    number: what the notebook has as STUDENT. points: None where the lab is not known. exercises:
    points by graded cell; worth: the most that each can give.
    """

    student: str
    lab: str
    status: str
    number: str = ""
    flags: Sequence[str] = ()
    exercises: Mapping[str, float] = field(default_factory=dict)
    worth: Mapping[str, float] = field(default_factory=dict)

    @property
    def points(self) -> float | None:
        """The sum over the exercises."""
        return sum(self.exercises.values()) if self.worth else None

    @property
    def maximum(self) -> float | None:
        """The most that the lab can give."""
        return sum(self.worth.values()) if self.worth else None

    def cells(self) -> dict[str, str]:
        """The row by column."""
        numbers = {"points": self.points, "maximum": self.maximum}
        named = {
            f"{self.lab}: {name} ({self.worth[name]:g})": value
            for name, value in self.exercises.items()
        }
        return {
            "student": self.student,
            "lab": self.lab,
            "number": self.number,
            "status": self.status,
            "flags": "; ".join(self.flags),
        } | {key: f"{value:g}" for key, value in (numbers | named).items() if value is not None}


def _clear(out: Path, submissions: Path) -> None:
    """Makes out ready: new, or rid of an earlier grading. Raises ValueError for other folders."""
    here, theirs = out.resolve(), submissions.resolve()
    if here == theirs or here in theirs.parents or theirs in here.parents:
        raise ValueError(f"{out} and {submissions} lie in each other; name another --out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no folder; name another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / LOG).is_file():
        raise ValueError(f"{out} holds something else than an earlier grading; name another --out")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "feedback", ignore_errors=True)
    for name in ("grades.csv", LOG):
        (out / name).unlink(missing_ok=True)


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    exercises = dict.fromkeys(key for row in rows for key in row.cells() if key not in COLUMNS)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *exercises], restval="")
        writer.writeheader()
        writer.writerows(row.cells() for row in rows)


class _Grading:
    """One run over a class: the course, the labs read so far, the output folder."""

    def __init__(self, root: Path, out: Path, course: Course) -> None:
        self._sources = source_paths(root)
        self._out = out
        self._course = course
        self._labs: dict[str, Lab] = {}

    def lab(self, slug: str) -> Lab:
        """The lab, read and entered into the course at the first call."""
        if slug not in self._labs:
            lab = read_lab(self._sources[slug])
            self._course.open_lab(lab)
            self._labs[slug] = lab
        return self._labs[slug]

    def one(self, submission: Submission, number: int) -> Row:
        """Grades one submission; a submission that cannot be graded gives a row that says why."""
        if submission.problem:
            row = Row(
                student=submission.student,
                lab=submission.lab,
                status=f"not graded: {submission.problem}",
            )
            known = submission.lab in self._sources
            return self._none(submission, submission.problem) if known else row
        try:
            return self._graded(submission, number)
        except (ValueError, GradingError) as problem:
            return self._none(submission, str(problem))
        except OSError as problem:
            return self._none(submission, f"the file cannot be read ({problem.strerror})")

    def _none(self, submission: Submission, reason: str) -> Row:
        """No points, and a page that says why."""
        lab = html.escape(submission.lab)
        page = PAGE.format(head=PAGE_HEAD, lab=lab, reason=html.escape(reason))
        self._page(submission).write_text(page, encoding="utf-8")
        points = self.lab(submission.lab).points
        return Row(
            student=submission.student,
            lab=submission.lab,
            status=f"not graded: {reason}",
            exercises=dict.fromkeys(points, 0.0),
            worth=points,
        )

    def _page(self, submission: Submission) -> Path:
        path = self._out / "feedback" / submission.student / f"{submission.lab}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _graded(self, submission: Submission, number: int) -> Row:
        notebook = read_notebook(submission.path)
        release = self._course.open_lab(self.lab(submission.lab))
        mended = mend(notebook, release)
        # nbgrader takes a student's name for a pattern and a part of paths: it gets a plain one.
        graded = self._course.grade(submission.lab, f"student{number:05}", mended.notebook)
        shutil.copyfile(graded.feedback, self._page(submission))
        status = "graded"
        if graded.timeouts:
            cells = "a cell" if graded.timeouts == 1 else f"{graded.timeouts} cells"
            status += f"; {cells} ran out of time and got stopped"
        if graded.unchecked:
            cells = "a cell" if graded.unchecked == 1 else f"{graded.unchecked} cells"
            status += f"; {cells} could not be checked on this machine, see the feedback page"
        return Row(
            student=submission.student,
            lab=submission.lab,
            status=status,
            number=number_of(notebook, release),
            flags=(*uses_of_answers(notebook, release), *mended.changes),
            exercises=graded.points,
            worth=self.lab(submission.lab).points,
        )


def grade(
    root: Path,
    submissions: Path,
    out: Path,
    *,
    say: Callable[[str], object],
    cell_seconds: float = CELL_SECONDS,
) -> list[Row]:
    """Grades every notebook below submissions with the labs of the checkout at root.

    submissions: `<student>/<slug>.ipynb` or `<student>/<slug>/<slug>.ipynb`; only read.
    out: gets grades.csv, feedback/<student>/<slug>.html and grading.log; an earlier grading there
    gives way. say: takes a line of progress at a time. cell_seconds: the limit of a cell.
    Runs the students' code without a sandbox. Raises ValueError for folders that do not fit and
    for a lab whose source has a fault, GradingError where nbgrader does not take a lab; never for
    a submission.
    """
    found = find(submissions, source_paths(root))
    _clear(out, submissions)
    students = len({one.student for one in found})
    say(f"{len(found)} notebooks of {students} students; the log is {out / LOG}")
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Course(Path(folder), out / LOG, cell_seconds=cell_seconds) as course,
        warnings.catch_warnings(),
    ):
        # What nbgrader's database library has to say is for nbgrader's authors.
        warnings.simplefilter("ignore")
        run = _Grading(root, out, course)
        for slug in sorted({one.lab for one in found} & source_paths(root).keys()):
            run.lab(slug)
        for number, submission in enumerate(found, 1):
            row = run.one(submission, number)
            rows.append(row)
            # After each one: an interrupt leaves what was graded until then.
            _write_csv(out / "grades.csv", rows)
            got = "" if row.points is None else f" {row.points:g}/{row.maximum:g}"
            count = len(row.flags)
            flags = f" ({count} flag{'s' * (count > 1)})" if count else ""
            say(f"[{number}/{len(found)}] {row.student} {row.lab}{got}: {row.status}{flags}")
    say(f"written: {out / 'grades.csv'} and {out / 'feedback'}")
    return rows
