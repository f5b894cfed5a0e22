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
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Progress", "Task", "kept", "kernel", "note", "summary", "task"]

MINE, FOLDER = "my", "progress"  # the copies' folder, and in it the one with a file for each lab
GREEN, GRAY = "#009e73", "#808080"

_results: dict[str, dict[str, Task]] = {}  # slug -> words of its name -> task
_displays: dict[str, list[str]] = {}  # slug -> ids of the displays in this kernel's notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One exercise of a lab.

    points: what the lab gives for it; beyond: those of them for a rule that no check tests.
    passed: what its last check said. attempts: how many were judged until it passed.
    hints: how many are open; hinted: the attempts when the last one opened.
    """

    name: str
    points: int = 0
    beyond: int = 0
    passed: bool = False
    attempts: int = 0
    hints: int = 0
    hinted: int = -1

    def __str__(self) -> str:
        tried = f"after {self.attempts} attempt{'s' * (self.attempts != 1)}"
        if self.passed:
            return f"✓ right {tried}"
        return f"not yet, {tried}" if self.attempts else "not begun"


def kernel() -> Any:
    """Return IPython's shell if this process is a notebook's kernel, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def task(exercise: str) -> Task:
    """Return what is known of an exercise, by its id, before or after a restart of the kernel."""
    slug, _, name = exercise.partition(".")
    known = {one.name: one for one in _tasks(slug)} if find_spec(_topic(slug)) else {}
    words = _words(name)
    return known.get(words) or _results.get(slug, {}).get(words) or Task(name=words)


def note(exercise: str, **changes: Any) -> Task:
    """Keep the changes of a task and renew what this notebook shows. Return the changed task.

    exercise: its id. Those that are not in a lab's list, such as a graded cell's own, are known
    until the process ends.
    """
    slug = exercise.partition(".")[0]
    changed = replace(task(exercise), **changes)
    _results.setdefault(slug, {})[changed.name] = changed
    listed = find_spec(_topic(slug)) and changed in _tasks(slug)
    if listed and (path := _path(slug)):
        with contextlib.suppress(OSError):  # a full disk costs the record, not the check
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps([asdict(row) for row in _tasks(slug)]), encoding="utf-8")
            fresh.replace(path)
    for display in _displays.get(slug, ()):
        _publish(slug, display, update=True)
    return changed


def kept(root: Path) -> dict[str, list[Task]]:
    """Return lab -> tasks for the labs that were begun in the copies of the course at `root`."""
    paths = sorted((root / MINE / FOLDER).glob("*.json"))
    return {path.stem: rows for path in paths if (rows := _read(path))}


def summary(rows: Sequence[Task]) -> str:
    """Return how many tasks and points are done, as far as checks test them."""
    done = [row for row in rows if row.passed]
    points = sum(row.points - row.beyond for row in done), sum(row.points for row in rows)
    text = f"{len(done)} of {len(rows)} tasks, {points[0]} of {points[1]} points"
    beyond = sum(row.beyond for row in rows)
    return f"{text} ({beyond} of the {points[1]} are tested only in grading)" if beyond else text


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
        _results[slug] = {row.name: row for row in rows}
    tasks = []
    for one in importlib.import_module(_topic(slug)).EXERCISES:
        name = _words(one.id.partition(".")[2])
        known = _results[slug].get(name, Task(name=name))
        tasks.append(replace(known, points=one.points, beyond=getattr(one, "beyond", 0)))
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
    text = f"By this notebook's checks: {summary(rows)}. Grading uses other numbers."
    return f"{text} Left: {', '.join(left)}." if left else text
