"""nbgrader's gradebook for one course in one folder, filled one notebook at a time.

nbgrader's three steps run in this process. It releases a lab, which adds the lab to the gradebook;
it autogrades a notebook, taking the judged results instead of running it; and it writes the
feedback as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbformat import NotebookNode, ValidationError, from_dict, validate
from nbformat.v4 import new_output
from nbgrader import api  # type: ignore[import-untyped]
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

from labcore.grading import feedback
from labcore.grading.judged import GradingError, Judged
from labcore.labs.nbgrader_settings import course_settings, open_gradebook, quiet_log
from labcore.labs.source import HIDDEN, Lab, cell_text, import_cells, nbgrader_of

__all__ = ["Gradebook", "Graded"]

OUTPUTS = ("stream", "display_data", "execute_result", "error")
PLACE = "labcore_place"  # a cell's metadata: its index in the repaired notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """points: by grade_id in reading order, including manual points. feedback: the page.

    changes: one phrase for each manual score that was withdrawn.
    """

    points: Mapping[str, float]
    feedback: Path
    changes: Sequence[str] = ()


class FillIn(NbGraderPreprocessor):
    """Replaces nbgrader's Execute: fills in the outputs that the cells gave in the sandbox.

    Only errors decide a graded cell's points. nbgrader itself would give no points to a cell that
    writes to stderr, such as a warning from correct code, and partial points to a cell whose last
    value is a number.
    """

    def __init__(self, judged: Judged, **more: Any) -> None:
        super().__init__(**more)
        self._judged = judged

    def preprocess_cell(
        self, cell: NotebookNode, resources: Any, _index: int
    ) -> tuple[NotebookNode, Any]:
        """Fills in a code cell's outputs; a graded cell that failed gets its error."""
        if cell.cell_type != "code":
            return cell, resources
        if is_grade(cell):
            error = self._judged.errors.get(cell.metadata.nbgrader.grade_id)
            cell.outputs = [_error(*error)] if error else []
            cell.execution_count = 1  # without one, nbgrader treats the cell as not run
        elif (place := cell.metadata.pop(PLACE, None)) is not None:
            cell.outputs = [_checked(one) for one in self._judged.outputs[place]]
            cell.execution_count = self._judged.counts[place]
        return cell, resources


def _error(name: str, message: str) -> NotebookNode:
    return new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"])


def _checked(output: Mapping[str, Any]) -> NotebookNode:
    """A valid notebook output; an invalid one becomes a line that says so."""
    node = from_dict(dict(output))
    try:
        if node.get("output_type") not in OUTPUTS:
            raise ValidationError("unknown output_type")
        validate(node, ref=node.output_type, version=4)
    except (ValidationError, KeyError, AttributeError, TypeError):
        return new_output("stream", name="stderr", text="[An invalid output was left out.]\n")
    return node


class OneAutograde(Autograde):
    """An autograder that keeps the exception of a failed notebook instead of only logging it."""

    failure: Exception | None = None

    def convert_single_notebook(self, notebook_filename: str) -> None:
        """Grades one notebook."""
        try:
            super().convert_single_notebook(notebook_filename)
        except Exception as error:
            self.failure = error
            raise


def _with_imports(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """A source whose graded cells begin with the lab's own imports, in a hidden region.

    A student's notebook may have lost the imports or rebound their names.
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


class Gradebook:
    """An nbgrader course in its own folder, new or from an earlier grading.

    Only one process at a time may use it. As a context manager, it closes the log on exit.
    log: the file for nbgrader's log.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = quiet_log(log)
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

    def _start(self, kind: type[Any], slug: str, student: str = "*") -> Any:
        """An nbgrader converter for one lab and student; the caller runs it."""
        config = Config(course_settings(self._folder, self._folder))
        course = CourseDirectory(
            config=config, assignment_id=slug, student_id=student, log=self._log
        )
        return kind(coursedir=course, config=config, log=self._log, force=True)

    def open_lab(self, lab: Lab) -> dict[str, Any]:
        """Adds a lab to the gradebook once; returns nbgrader's release of it as JSON.

        Raises GradingError if nbgrader rejects the lab.
        """
        slug = lab.metadata.slug
        if slug not in self._releases:
            source = self._folder / "source" / slug / f"{slug}.ipynb"
            made = self._folder / "release" / slug / f"{slug}.ipynb"
            text = json.dumps(_with_imports(lab.notebook))
            if not made.is_file() or source.read_text(encoding="utf-8") != text:
                source.parent.mkdir(parents=True, exist_ok=True)
                made.unlink(missing_ok=True)
                source.write_text(text, encoding="utf-8")
                try:
                    self._start(GenerateAssignment, slug).start()
                except Exception as error:
                    raise GradingError(
                        f"the lab {slug} could not be opened: {_reason(error)}"
                    ) from error
            self._releases[slug] = json.loads(made.read_text(encoding="utf-8"))
        return self._releases[slug]

    def record(
        self, slug: str, student: str, notebook: Mapping[str, Any], judged: Judged, *, name: str
    ) -> Graded:
        """Records the result for a repaired notebook; replaces that of an earlier submission.

        A manual score stays unless the answer above its cell has changed. student: a plain word;
        name: what the gradebook shows for it. Raises GradingError if nbgrader fails.
        """
        place = self._folder / "submitted" / student / slug / f"{slug}.ipynb"
        place.parent.mkdir(parents=True, exist_ok=True)
        cells = [
            {**cell, "metadata": {**cell["metadata"], PLACE: at}}
            for at, cell in enumerate(notebook["cells"])
        ]
        place.write_text(json.dumps({**notebook, "cells": cells}), encoding="utf-8")
        converter = self._start(OneAutograde, slug, student)
        converter.autograde_preprocessors = [
            FillIn(judged) if step is Execute else step
            for step in converter.autograde_preprocessors
        ]
        try:
            converter.start()
        except Exception as error:
            raise GradingError(_reason(converter.failure or error)) from error
        changes = self._settle_points_by_hand(slug, student, name, notebook)
        self._prepare_feedback(slug, student)
        try:
            self._start(GenerateFeedback, slug, student).start()
        except Exception as error:
            raise GradingError(_reason(error)) from error
        page = self._folder / "feedback" / student / slug / f"{slug}.html"
        named = feedback.titles(self._releases[slug])
        page.write_text(feedback.finish(page.read_text("utf-8"), named), encoding="utf-8")
        return Graded(points=self._points(slug, student), feedback=page, changes=changes)

    def _settle_points_by_hand(
        self, slug: str, student: str, name: str, notebook: Mapping[str, Any]
    ) -> list[str]:
        """Withdraws manual scores for answers that have changed; returns a phrase for each."""
        now = _answers(notebook)
        known = self._folder / "answers" / student / f"{slug}.json"
        before = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else now
        said = []
        with api.Gradebook(f"sqlite:///{self._folder / 'gradebook.db'}") as book:
            book.update_or_create_student(student, last_name=name)
            for grade in book.find_submission_notebook(slug, slug, student).grades:
                by_hand = grade.manual_score
                if by_hand is not None and before.get(grade.name) != now.get(grade.name):
                    said.append(
                        f"{grade.name} had {by_hand:g} manual points for an earlier answer, now"
                        " withdrawn"
                    )
                    grade.manual_score = None
                # nbgrader requests manual grading again after every run.
                grade.needs_manual_grade = False
            book.db.commit()
        # Written last, so that an interrupted run repeats all of this.
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(now), encoding="utf-8")
        return said

    def _points(self, slug: str, student: str) -> dict[str, float]:
        with api.Gradebook(f"sqlite:///{self._folder / 'gradebook.db'}") as book:
            grades = book.find_submission_notebook(slug, slug, student).grades
            found = {grade.name: float(grade.score) for grade in grades}
        order = [cell["metadata"].get("nbgrader", {}) for cell in self._releases[slug]["cells"]]
        return {cell["grade_id"]: found[cell["grade_id"]] for cell in order if cell.get("grade")}

    def _prepare_feedback(self, slug: str, student: str) -> None:
        """Removes the hidden tests from the graded copy, because students get the feedback.

        Locked cells get their released text back, and their errors lose the traceback, which quotes
        code. The rest is rewritten for a page without scripts.
        """
        path = self._folder / "autograded" / student / slug / f"{slug}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        ours = {
            cell["metadata"]["nbgrader"]["grade_id"]: cell
            for cell in self._releases[slug]["cells"]
            if cell["metadata"].get("nbgrader", {}).get("locked")
        }
        for cell in notebook["cells"]:
            errors = [out for out in cell.get("outputs", ()) if out["output_type"] == "error"]
            name = cell["metadata"].get("nbgrader", {}).get("grade_id")
            if name in ours:
                cell["source"] = ours[name]["source"]
                for error in errors:
                    error["traceback"] = [f"{error['ename']}: {error['evalue']}"]
        feedback.make_readable(notebook, self._releases[slug])
        # nbgrader leaves the file write-protected.
        path.unlink()
        path.write_text(json.dumps(notebook), encoding="utf-8")


def _answers(notebook: Mapping[str, Any]) -> dict[str, str]:
    """The text of the answer that each graded cell judges, by grade_id."""
    found: dict[str, str] = {}
    answer, closed = "", False
    for cell in notebook["cells"]:
        meta = nbgrader_of(cell)
        if meta.get("solution"):
            # An answer may span several cells.
            answer = cell_text(cell) if closed else answer + cell_text(cell)
            closed = False
        if meta.get("grade"):
            found[str(meta["grade_id"])] = answer
            closed = True
    return found


def _reason(error: Exception) -> str:
    return f"nbgrader failed on it ({type(error).__name__}); see grading.log"
