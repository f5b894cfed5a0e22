"""Finds submissions in a folder, reads them safely, and restores the lab's form.

Nothing here runs a student's code. Only the notebook of a submission is used, and only the text of
its cells: other files could impersonate labcore, and metadata can make nbgrader skip a cell and
count it as correct.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from labcore.grading.intake.forms import STAMP, STAMP_BYTES, lab_of, several, stamped
from labcore.labs.source import cell_text, import_cells, nbgrader_of, statements
from labcore.labs.students import NUMBER, assigned_numbers, name_problem

__all__ = [
    "Mended",
    "Submission",
    "find",
    "mend",
    "read_notebook",
]

MAX_BYTES = 20_000_000
# Limits on a notebook's cells: a lab has about fifty, and parsing takes 1000 times the text's size.
MAX_CELLS, MAX_TEXT = 1000, 1_000_000
CELL_TYPES = ("code", "markdown", "raw")
# nbgrader's folders next to "submitted" in a course's folder.
NBGRADER_FOLDERS = {"source", "release", "autograded", "feedback"}
PUT_BACK = "# Put back for grading, as the lab has it.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One notebook of one student. problem: why it cannot be graded, "" if grading can be tried.

    handed_in: the time in UTC, if known from something other than the file's date. notes: phrases
    for a person to review; they do not prevent grading.
    """

    student: str
    lab: str
    path: Path
    problem: str = ""
    handed_in: datetime | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mended:
    """A submission in the lab's form. changes: a phrase for each thing that was restored."""

    notebook: dict[str, Any]
    changes: Sequence[str]


def _start_of(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file; b"" for anything else."""
    if path.is_symlink() or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(limit)


def _notebooks(folder: Path) -> Iterator[Path]:
    """A student's notebooks: in the folder, or one level deeper as nbgrader has them."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from (
                inner
                for inner in sorted(path.iterdir())
                if inner.suffix.lower() == ".ipynb" and not inner.name.startswith(".")
            )
        elif path.suffix.lower() == ".ipynb":
            yield path


def _of_student(folder: Path, labs: Container[str]) -> Iterator[Submission]:
    student = folder.name
    if problem := name_problem(student):
        yield Submission(student=ascii(student), lab="", path=folder, problem=problem)
        return
    if folder.is_symlink():
        yield Submission(student=student, lab="", path=folder, problem="the folder is a link")
        return
    by_lab: dict[str, list[tuple[Path, tuple[str, ...]]]] = {}
    for path in _notebooks(folder):
        lab, notes = lab_of(path.stem, labs, partial(_start_of, path, MAX_BYTES))
        by_lab.setdefault(lab, []).append((path, notes))
    if not by_lab:
        yield Submission(student=student, lab="", path=folder, problem="the folder has no notebook")
    for lab, found in sorted(by_lab.items()):
        problem, (path, notes) = "", found[0]
        if lab not in labs:
            # An unknown name could be anything, even a spreadsheet formula.
            lab, problem = ascii(lab), "there is no lab with this name"
        elif len(found) > 1:
            problem = several([one.relative_to(folder).as_posix() for one, _ in found])
        handed_in = None
        if stamp := _start_of(path.parent / STAMP, STAMP_BYTES):
            handed_in, more = stamped(stamp)
            notes += more
        yield Submission(
            student=student, lab=lab, path=path, problem=problem, handed_in=handed_in, notes=notes
        )


def _submitted(folder: Path, labs: Container[str]) -> Path:
    """The students' folder: "submitted" if `folder` is an nbgrader course."""
    inner = folder / "submitted"
    names = {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
    if names - NBGRADER_FOLDERS != {inner.name} or inner.is_symlink():
        return folder
    # A student may be called "submitted".
    own = any(path.parent == inner or path.parent.name in labs for path in _notebooks(inner))
    return folder if own else inner


def find(folder: Path, labs: Container[str]) -> list[Submission]:
    """The submissions in `<folder>/<student>/<slug>.ipynb` or `<folder>/<student>/<slug>/`.

    labs: the slugs that exist. In an nbgrader course, the folder "submitted" is used. handed_in
    comes from `timestamp.txt` next to a notebook and is None without it, because a file's date may
    only tell when it was copied. Raises ValueError if `folder` is not a folder or has no students.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one with a folder for each student")
    folder = _submitted(folder, labs)
    found: list[Submission] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") and not path.name.startswith(".."):
            continue
        if path.is_dir():
            found += _of_student(path, labs)
        elif path.suffix.lower() == ".ipynb":
            problem = "it is not in a student's folder"
            found.append(Submission(student="", lab=ascii(path.stem), path=path, problem=problem))
    if not found:
        raise ValueError(f"{folder} has no student's folder; put <student>/<slug>.ipynb there")
    return found


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook at path as JSON of format 4. Raises ValueError saying what is wrong with it."""
    if path.is_symlink() or not path.is_file():
        raise ValueError("it is a link or not a regular file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"the file is larger than {MAX_BYTES // 1_000_000} MB")
    content = path.read_bytes()
    if not content.strip():
        raise ValueError("the file is empty")
    try:
        notebook = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("the file is not valid JSON and so not a notebook") from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or notebook.get("nbformat") != 4:
        raise ValueError("the file is not a notebook of format 4")
    if len(cells) > MAX_CELLS:
        raise ValueError(f"the notebook has {len(cells)} cells, more than {MAX_CELLS}")
    length = 0
    for number, cell in enumerate(cells, 1):
        source = cell.get("source") if isinstance(cell, dict) else None
        lines = [source] if isinstance(source, str) else source
        if (
            not isinstance(lines, list)
            or not all(isinstance(line, str) for line in lines)
            or cell.get("cell_type") not in CELL_TYPES
        ):
            raise ValueError(f"cell {number} of the notebook is damaged")
        # JSON can contain lone surrogates, which UTF-8 cannot encode.
        cell["source"] = "".join(lines).encode("utf-8", errors="replace").decode()
        length += len(cell["source"])
        if not isinstance(cell.get("metadata"), dict):
            cell["metadata"] = {}
    if length > MAX_TEXT:
        raise ValueError(f"the text of its cells is longer than {MAX_TEXT // 1_000_000} MB")
    return notebook


def _plain(cell_type: str, text: str, nbgrader: Mapping[str, Any] | None = None) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": cell_type, "metadata": {}, "source": text}
    if nbgrader:
        cell["metadata"]["nbgrader"] = dict(nbgrader)
    if cell_type == "code":
        cell |= {"outputs": [], "execution_count": None}
    return cell


def _name(cell: Mapping[str, Any]) -> str:
    return str(nbgrader_of(cell).get("grade_id", ""))


def _restored(cell: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A student's cell with the release's metadata, and a phrase for what was restored, or ""."""
    meta, theirs, text = nbgrader_of(ours), nbgrader_of(cell), cell_text(cell)
    change = ""
    keys = ("grade", "locked", "solution", "points")
    if cell["cell_type"] != ours["cell_type"] or any(
        theirs.get(key) != meta.get(key) for key in keys
    ):
        change = f"grading data of {_name(ours)} changed, restored"
    if meta["locked"] and text != cell_text(ours):
        change, text = f"locked cell {_name(ours)} changed, restored", cell_text(ours)
    return _plain(ours["cell_type"], text, meta), change


def _put_back(cells: list[dict[str, Any]], known: Mapping[str, Any]) -> Iterator[str]:
    """Restores missing graded cells below the cell that they follow in the release, or at the end.

    Yields a phrase for each missing cell.
    """
    before = ""
    for name, ours in known.items():
        places = [place for place, cell in enumerate(cells) if _name(cell) == name]
        if not places and nbgrader_of(ours)["locked"]:
            at = [place + 1 for place, cell in enumerate(cells) if before and _name(cell) == before]
            cell = _plain(ours["cell_type"], cell_text(ours), nbgrader_of(ours))
            cells.insert(at[-1] if at else len(cells), cell)
            yield f"cell {name} missing, put back"
        elif not places:
            yield f"cell {name} missing"
            continue
        before = name


def _imported(cells: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str | None]]:
    return {
        (getattr(one, "module", None) or "", alias.name, alias.asname)
        for one in statements(cells)
        if isinstance(one, ast.Import | ast.ImportFrom)
        for alias in one.names
    }


def _put_back_plain(
    cells: list[dict[str, Any]], theirs: Sequence[Mapping[str, Any]], release: Mapping[str, Any]
) -> Iterator[str]:
    """Restores what answers rely on: imports that differ from the release, a missing STUDENT.

    They go below the student's own cell, which stays, or at the top. cells: the repaired cells, in
    the order of the student's cells `theirs`. Yields a phrase for STUDENT and for lost imports.
    """
    at = {str(cell.get("id")): mended for cell, mended in zip(theirs, cells, strict=True)}
    there = {cell_text(cell).strip() for cell in theirs if cell["cell_type"] == "code"}
    numbered = [cell for cell in release["cells"] if assigned_numbers([cell])]
    lost: list[Mapping[str, Any]] = [] if assigned_numbers(theirs) else numbered
    imports = [one for one in import_cells(release["cells"]) if cell_text(one).strip() not in there]
    for ours in reversed([*imports, *lost]):
        own = at.get(str(ours.get("id")))
        place = next((n for n, cell in enumerate(cells, 1) if cell is own), 0)
        cells.insert(place, _plain("code", PUT_BACK + cell_text(ours)))
        if ours in lost:
            yield f"{NUMBER} missing, put back as in the release"
        elif not _imported([ours]) <= _imported(theirs):
            yield "imports missing, put back"


def mend(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> Mended:
    """Repairs a submission: its cells' text, with the release's metadata and locked cells.

    Missing imports and a missing STUDENT are restored. If a cell occurs more than once, the last
    one counts. Raises ValueError if the notebook has none of the lab's cells.
    """
    known = {_name(cell): cell for cell in release["cells"] if _name(cell)}
    last = {_name(cell): place for place, cell in enumerate(notebook["cells"])}
    if not known.keys() & last.keys():
        raise ValueError("the notebook has none of this lab's graded cells")
    changes, cells = [], []
    for place, cell in enumerate(notebook["cells"]):
        name = _name(cell)
        if name in known and last[name] == place:
            mended, change = _restored(cell, known[name])
            cells.append(mended)
            changes += [change] if change else []
        else:
            cells.append(_plain(cell["cell_type"], cell_text(cell)))
    changes += _put_back_plain(cells, notebook["cells"], release)
    times = Counter(map(_name, notebook["cells"]))
    changes += [
        f"cell {name} occurs {times[name]} times; the last one counts"
        for name in known
        if times[name] > 1
    ]
    changes += _put_back(cells, known)
    kernel = {"kernelspec": release["metadata"]["kernelspec"]}
    # Minor 4 has no cell ids, which a student's notebook may contain twice.
    mended_notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    return Mended(notebook=mended_notebook, changes=tuple(changes))
