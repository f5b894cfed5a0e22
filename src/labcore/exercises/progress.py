"""What a reader has passed in the labs, kept beside the copies in `my/`. Grading never reads it."""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Progress", "Task", "kept", "kernel", "note", "summary"]

MINE, FOLDER = "my", "progress"  # the copies' folder, and in it the one with a file for each lab
GREEN, GRAY = "#009e73", "#808080"

_results: dict[str, dict[str, tuple[bool, int]]] = {}  # slug -> task -> (passed, attempts)
_displays: dict[str, list[str]] = {}  # slug -> ids of the displays in this kernel's notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One exercise of a lab. passed: what its last check said; attempts: how many were judged."""

    name: str
    points: int
    passed: bool
    attempts: int

    def __str__(self) -> str:
        tried = f"after {self.attempts} attempt{'s' * (self.attempts != 1)}"
        if self.passed:
            return f"✓ right {tried}"
        return f"not yet, {tried}" if self.attempts else "not begun"


def kernel() -> Any:
    """Return IPython's shell if this process is a notebook's kernel, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def note(exercise: str, *, passed: bool, judged: bool) -> int:
    """Keep the result of a check, and renew what this notebook shows. Return the attempts so far.

    exercise: its id; those that are not in a lab's list, such as a graded cell's own, are ignored
    and have 0. judged: whether it was an attempt, and not the stub.
    """
    slug, _, name = exercise.partition(".")
    rows = {row.name: row for row in _tasks(slug)} if find_spec(_topic(slug)) else {}
    if _words(name) not in rows:
        return 0
    attempts = rows[_words(name)].attempts + judged
    _results[slug][_words(name)] = passed, attempts
    if path := _path(slug):
        with contextlib.suppress(OSError):  # a full disk costs the record, not the check
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps([asdict(row) for row in _tasks(slug)]), encoding="utf-8")
            fresh.replace(path)
    for display in _displays.get(slug, ()):
        _publish(slug, display, update=True)
    return attempts


def kept(root: Path) -> dict[str, list[Task]]:
    """Return lab -> tasks for the labs that were begun in the copies of the course at `root`."""
    paths = sorted((root / MINE / FOLDER).glob("*.json"))
    return {path.stem: rows for path in paths if (rows := _read(path))}


def summary(rows: Sequence[Task]) -> str:
    """Return in a sentence how many tasks and points are done."""
    done = [row for row in rows if row.passed]
    points = sum(row.points for row in done), sum(row.points for row in rows)
    return f"{len(done)} of {len(rows)} tasks, {points[0]} of {points[1]} points"


def _topic(slug: str) -> str:
    return f"labcore.exercises.topics.{slug}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _path(slug: str) -> Path | None:
    """Where a lab's progress is kept: beside the copies, and nowhere in any other folder."""
    here = Path.cwd()
    return here / FOLDER / f"{slug}.json" if here.name == MINE else None


def _read(path: Path) -> list[Task]:
    """Return what a file says; nothing if it is missing or somebody broke it."""
    try:
        return [Task(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _tasks(slug: str) -> list[Task]:
    """A lab's exercises in order, with what this kernel or, after a restart, the file knows."""
    if slug not in _results:
        path = _path(slug)
        rows = _read(path) if path else []
        _results[slug] = {row.name: (row.passed, row.attempts) for row in rows}
    tasks = []
    for one in importlib.import_module(_topic(slug)).EXERCISES:
        name = _words(one.id.partition(".")[2])
        passed, attempts = _results[slug].get(name, (False, 0))
        tasks.append(Task(name=name, points=one.points, passed=passed, attempts=attempts))
    return tasks


class Progress:
    """A lab's tasks, with points and what is left; end a cell with it to display it.

    In a notebook it renews itself with every check.
    """

    def __init__(self, slug: str) -> None:
        self._slug = slug

    def __repr__(self) -> str:
        rows = _tasks(self._slug)
        width = max(len(row.name) for row in rows)
        lines = [f"{row.name:{width}}  {row.points:2} points  {row}" for row in rows]
        return "\n".join([*lines, _closing(rows)])

    def _repr_html_(self) -> str:
        rows = _tasks(self._slug)
        lines = "".join(
            f'<tr><td style="text-align:left">{html.escape(row.name)}</td>'
            f"<td>{row.points} points</td>"
            f'<td style="text-align:left;border-left:4px solid {GREEN if row.passed else GRAY}">'
            f"{row}</td></tr>"
            for row in rows
        )
        return f"<table>{lines}</table><p>{_closing(rows)}</p>"

    def _ipython_display_(self) -> None:
        if kernel() is None:
            raise NotImplementedError  # IPython then uses the other forms
        display = uuid.uuid4().hex
        _displays.setdefault(self._slug, []).append(display)
        _publish(self._slug, display, update=False)


def _publish(slug: str, display: str, *, update: bool) -> None:
    shown = Progress(slug)
    kernel().display_pub.publish(
        {"text/plain": repr(shown), "text/html": shown._repr_html_()},
        transient={"display_id": display},
        update=update,
    )


def _closing(rows: Sequence[Task]) -> str:
    left = [row.name for row in rows if not row.passed]
    text = f"{summary(rows)} by this notebook's checks; grading uses other numbers."
    return f"{text} Left: {', '.join(left)}." if left else text
