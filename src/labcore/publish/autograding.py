"""One course in one folder, graded by nbgrader a notebook at a time.

nbgrader's three steps run in this process: its release of a lab with the gradebook's entries, the
autograder with a kernel of its own for each notebook, and the feedback as HTML.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.api import Gradebook  # type: ignore[import-untyped]
from nbgrader.converters import (  # type: ignore[import-untyped]
    Autograde,
    GenerateAssignment,
    GenerateFeedback,
)
from nbgrader.coursedir import CourseDirectory  # type: ignore[import-untyped]
from nbgrader.preprocessors import (  # type: ignore[import-untyped]
    Execute,
    NbGraderPreprocessor,
)
from nbgrader.utils import is_grade  # type: ignore[import-untyped]
from traitlets.config import Config

from labcore.exercises.core import NotCheckedError
from labcore.publish import feedback
from labcore.publish.lab_source import HIDDEN, Lab, cell_text, import_cells, nbgrader_of
from labcore.publish.nbgrader_settings import (
    CELL_SECONDS,
    course_settings,
    open_gradebook,
    quiet_log,
)

__all__ = ["Course", "Graded", "GradingError"]

TIMEOUT = "CellTimeoutError"
# A loop that catches the interrupt keeps the kernel busy, and every later cell waits in vain.
CELLS_PER_NOTEBOOK = 3


class GradingError(RuntimeError):
    """A notebook could not be graded to its end; the message says what happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """points by grade_id in reading order, and the feedback page.

    timeouts: cells that were stopped. unchecked: those that this machine could not check.
    """

    points: Mapping[str, float]
    timeouts: int
    unchecked: int
    feedback: Path


class ErrorsAlone(NbGraderPreprocessor):
    """Lets errors alone decide over a graded cell, and a cell that was not run is an error.

    nbgrader by itself gives no points for a line on stderr, such as a warning in right code, some
    points for a number as the last value, and all of them for a cell without any output.
    """

    def preprocess_cell(
        self, cell: NotebookNode, resources: Any, _index: int
    ) -> tuple[NotebookNode, Any]:
        """Keeps the errors of a graded cell, and adds one where it did not run."""
        if is_grade(cell) and cell.cell_type == "code":
            errors = [output for output in cell.outputs if output.output_type == "error"]
            if not errors and cell.execution_count is None:
                errors = [new_output("error", ename="NotRun", evalue="this cell was not run")]
            cell.outputs = errors
        return cell, resources


class OneAutograde(Autograde):
    """The autograder, which remembers why a notebook failed instead of only logging it."""

    failure: Exception | None = None

    def convert_single_notebook(self, notebook_filename: str) -> None:
        """Grades one notebook."""
        try:
            super().convert_single_notebook(notebook_filename)
        except Exception as error:
            self.failure = error
            raise


def _budget(seconds: float) -> Callable[[Any], float]:
    """Seconds for the next cell: its own limit, and at least 1 after the notebook's is spent."""
    end = time.monotonic() + CELLS_PER_NOTEBOOK * seconds
    return lambda _cell: max(1.0, min(seconds, end - time.monotonic()))


def _with_imports(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """A source whose graded cells begin with the lab's own imports, as a part of what is hidden.

    A student's notebook may have lost them, or have given their names to something else.
    """
    lines = [cell_text(cell).strip() for cell in import_cells(notebook["cells"])]
    region = "\n".join((f"### BEGIN {HIDDEN}", *lines, f"### END {HIDDEN}"))
    cells = [
        {**cell, "source": f"{region}\n{cell_text(cell)}"}
        if nbgrader_of(cell).get("grade")
        else cell
        for cell in notebook["cells"]
    ]
    return {**notebook, "cells": cells if lines else notebook["cells"]}


class Course:
    """nbgrader's course in an empty folder; a context manager, which closes the log.

    log: the file that takes what nbgrader logs. cell_seconds: for each cell of a notebook.
    """

    def __init__(self, folder: Path, log: Path, *, cell_seconds: float = CELL_SECONDS) -> None:
        self._folder = folder
        self._log = quiet_log(log)
        self._cell_seconds = cell_seconds
        self._releases: dict[str, dict[str, Any]] = {}
        open_gradebook(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handler in self._log.handlers:
            handler.close()

    def _start(self, kind: type[Any], slug: str, student: str = "*", **more: Any) -> Any:
        """A converter of nbgrader for one lab and student, run by the caller."""
        config = Config(course_settings(self._folder, self._folder))
        config.merge(Config(more))
        course = CourseDirectory(
            config=config, assignment_id=slug, student_id=student, log=self._log
        )
        return kind(coursedir=course, config=config, log=self._log)

    def open_lab(self, lab: Lab) -> dict[str, Any]:
        """Enters a lab into the gradebook once; returns nbgrader's release of it as JSON.

        Raises GradingError where nbgrader does not take it.
        """
        slug = lab.metadata.slug
        if slug not in self._releases:
            source = self._folder / "source" / slug / f"{slug}.ipynb"
            source.parent.mkdir(parents=True)
            source.write_text(json.dumps(_with_imports(lab.notebook)), encoding="utf-8")
            try:
                self._start(GenerateAssignment, slug).start()
            except Exception as error:
                raise GradingError(
                    f"the lab {slug} could not be opened: {_reason(error)}"
                ) from error
            made = self._folder / "release" / slug / f"{slug}.ipynb"
            self._releases[slug] = json.loads(made.read_text(encoding="utf-8"))
        return self._releases[slug]

    def grade(self, slug: str, student: str, notebook: Mapping[str, Any]) -> Graded:
        """Runs and grades one notebook in the release's form.

        student: a plain word that this course has not seen. Raises GradingError.
        """
        place = self._folder / "submitted" / student / slug / f"{slug}.ipynb"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(notebook), encoding="utf-8")
        limit = {"timeout_func": _budget(self._cell_seconds), "timeout": self._cell_seconds}
        converter = self._start(OneAutograde, slug, student, ExecutePreprocessor=limit)
        steps = list(converter.autograde_preprocessors)
        steps.insert(steps.index(Execute) + 1, ErrorsAlone)
        converter.autograde_preprocessors = steps
        try:
            converter.start()
        except Exception as error:
            raise GradingError(_reason(converter.failure or error)) from error
        errors = self._prepare_feedback(slug, student)
        try:
            self._start(GenerateFeedback, slug, student).start()
        except Exception as error:
            raise GradingError(_reason(error)) from error
        page = self._folder / "feedback" / student / slug / f"{slug}.html"
        named = feedback.titles(self._releases[slug])
        page.write_text(feedback.finish(page.read_text("utf-8"), named), encoding="utf-8")
        return Graded(
            points=self._points(slug, student),
            timeouts=errors.count(TIMEOUT),
            unchecked=errors.count(NotCheckedError.__name__),
            feedback=page,
        )

    def _points(self, slug: str, student: str) -> dict[str, float]:
        with Gradebook(f"sqlite:///{self._folder / 'gradebook.db'}") as book:
            grades = book.find_submission_notebook(slug, slug, student).grades
            found = {grade.name: float(grade.auto_score or 0) for grade in grades}
        order = [cell["metadata"].get("nbgrader", {}) for cell in self._releases[slug]["cells"]]
        return {cell["grade_id"]: found[cell["grade_id"]] for cell in order if cell.get("grade")}

    def _prepare_feedback(self, slug: str, student: str) -> list[str]:
        """Takes the hidden tests out of the graded copy, so that feedback can be given out.

        Locked cells get the text of the release again, errors lose their traceback, which quotes
        code, and the rest becomes what a page without scripts can show. Returns the names of the
        errors, each once a cell.
        """
        path = self._folder / "autograded" / student / slug / f"{slug}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        ours = {
            cell["metadata"]["nbgrader"]["grade_id"]: cell
            for cell in self._releases[slug]["cells"]
            if cell["metadata"].get("nbgrader", {}).get("locked")
        }
        names: list[str] = []
        for cell in notebook["cells"]:
            errors = [out for out in cell.get("outputs", ()) if out["output_type"] == "error"]
            names += {error["ename"] for error in errors}
            name = cell["metadata"].get("nbgrader", {}).get("grade_id")
            if name in ours:
                cell["source"] = ours[name]["source"]
                for error in errors:
                    error["traceback"] = [f"{error['ename']}: {error['evalue']}"]
        feedback.make_readable(notebook, self._releases[slug])
        # nbgrader leaves the file write-protected.
        path.unlink()
        path.write_text(json.dumps(notebook), encoding="utf-8")
        return names


def _reason(error: Exception) -> str:
    if isinstance(error, DeadKernelError):
        return "its kernel died while it ran (os._exit, a crash, or out of memory)"
    if isinstance(error, TimeoutError):
        return "a cell ran out of time and could not be interrupted"
    return f"nbgrader stopped at it, and grading.log says why ({type(error).__name__})"
