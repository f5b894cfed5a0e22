"""Reads and checks an instructor's lab notebook (`labs/source/<slug>/<slug>.ipynb`).

The format is nbgrader's, with cell metadata of schema 3. In solution cells, the student writes the
regions from `### BEGIN SOLUTION` to `### END SOLUTION`. In graded cells, the student does not get
the regions from `### BEGIN HIDDEN TESTS` to `### END HIDDEN TESTS`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "HIDDEN",
    "SOLUTION",
    "TIERS",
    "Lab",
    "LabError",
    "LabMetadata",
    "cell_text",
    "code_tree",
    "import_cells",
    "nbgrader_of",
    "parse_lab_metadata",
    "read_lab",
    "regions",
    "sections",
    "statements",
]

SOLUTION, HIDDEN = "SOLUTION", "HIDDEN TESTS"
TIERS = {"cpu": "runs on a CPU", "1gpu": "needs one GPU", "multi": "needs several GPUs"}
NAME = re.compile(r"[A-Za-z0-9_-]+")
HEADING = re.compile(r"^#{1,6} +(.*\S)", re.MULTILINE)
FORM = {"kind": str, "slug": str, "minutes": int, "tier": str}
# What `make labs` adds to a release.
ADDED = {"points", "release"}
BOOLEANS = ("grade", "locked", "solution")


class LabError(ValueError):
    """A lab's source cannot be released. Each line names a file, a cell and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabMetadata:
    """`metadata.labcore` of a lab's notebook.

    slug: the lab's name everywhere. minutes: working time. tier: a key of TIERS.
    points: of all graded cells; 0 in a source, where only the cells have points.
    """

    slug: str
    minutes: int
    tier: str
    points: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """A valid source: its notebook as JSON, and points by grade_id in reading order."""

    path: Path
    notebook: Mapping[str, Any]
    metadata: LabMetadata
    points: Mapping[str, float]


def cell_text(cell: Mapping[str, Any]) -> str:
    """The text of a cell; a notebook stores it as one string or as a list of lines."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def nbgrader_of(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell's nbgrader metadata, {} for a plain cell."""
    found = cell.get("metadata", {}).get("nbgrader")
    return found if isinstance(found, dict) else {}


def code_tree(code: str) -> ast.Module:
    """The syntax tree of a code cell without its magics. Raises SyntaxError."""
    lines = ("" if line.lstrip().startswith(("%", "!")) else line for line in code.split("\n"))
    return ast.parse("\n".join(lines))


def statements(cells: Iterable[Mapping[str, Any]]) -> Iterator[ast.stmt]:
    """The top-level statements of the code cells that can be parsed."""
    for cell in cells:
        if cell["cell_type"] == "code":
            try:
                yield from code_tree(cell_text(cell)).body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue


def import_cells(cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The plain code cells that only import; hidden tests rely on their names."""
    found = []
    for cell in cells:
        body = [] if nbgrader_of(cell) else list(statements([cell]))
        if body and all(isinstance(one, ast.Import | ast.ImportFrom) for one in body):
            found.append(cell)
    return found


def sections(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """The heading above each cell, "" if there is none."""
    found, title = [], ""
    for cell in cells:
        if cell["cell_type"] == "markdown":
            title = (HEADING.findall(cell_text(cell)) or [title])[-1].strip()
        found.append(title)
    return found


def parse_lab_metadata(notebook: Mapping[str, Any]) -> LabMetadata:
    """The lab's metadata from a notebook's JSON. Raises ValueError if it is invalid."""
    metadata = notebook.get("metadata")
    found = metadata.get("labcore") if isinstance(metadata, dict) else None
    if not isinstance(found, dict) or found.get("kind") != "lab":
        raise ValueError('metadata.labcore.kind must be "lab"; a lab needs ' + ", ".join(FORM))
    if missing := FORM.keys() - found.keys():
        raise ValueError(f"metadata.labcore is incomplete; add {', '.join(sorted(missing))}")
    if unknown := found.keys() - FORM.keys() - ADDED:
        raise ValueError(
            f"metadata.labcore must not have {', '.join(sorted(unknown))}; "
            f"a lab has the keys {', '.join(FORM)}"
        )
    for key, kind in FORM.items():
        if not isinstance(found[key], kind) or isinstance(found[key], bool):
            raise ValueError(
                f"metadata.labcore.{key} must be of type {kind.__name__}, got {found[key]!r}"
            )
    if found["minutes"] < 1:
        raise ValueError(f"metadata.labcore.minutes must be at least 1, got {found['minutes']}")
    if found["tier"] not in TIERS:
        raise ValueError(
            f"metadata.labcore.tier must be one of {', '.join(TIERS)}, got {found['tier']!r}"
        )
    return LabMetadata(
        slug=found["slug"],
        minutes=found["minutes"],
        tier=found["tier"],
        points=float(found.get("points", 0)),
    )


def regions(text: str, kind: str) -> list[str]:
    """The text between each pair of BEGIN and END lines of a kind, SOLUTION or HIDDEN.

    Raises ValueError if the lines do not pair up.
    """
    found: list[str] = []
    inside: list[str] | None = None
    for line in text.split("\n"):
        if f"BEGIN {kind}" in line:
            if inside is not None:
                raise ValueError(f"a second BEGIN {kind} comes before END {kind}")
            inside = []
        elif f"END {kind}" in line:
            if inside is None:
                raise ValueError(f"END {kind} has no BEGIN {kind} above it")
            found.append("\n".join(inside))
            inside = None
        elif inside is not None:
            inside.append(line)
    if inside is not None:
        raise ValueError(f"BEGIN {kind} has no END {kind} below it")
    return found


def _outside(text: str, kind: str) -> str:
    inside, kept = False, []
    for line in text.split("\n"):
        begins = f"BEGIN {kind}" in line
        if not inside and not begins:
            kept.append(line)
        inside = begins or (inside and f"END {kind}" not in line)
    return "\n".join(kept).strip()


def _own_metadata_problems(meta: Mapping[str, Any], cell_type: str) -> Iterator[str]:
    if meta.get("schema_version") != 3:
        yield f"nbgrader.schema_version must be 3, got {meta.get('schema_version')!r}"
    for key in BOOLEANS:
        if not isinstance(meta.get(key), bool):
            yield f"nbgrader.{key} must be true or false, got {meta.get(key)!r}"
    if not NAME.fullmatch(str(meta.get("grade_id", ""))):
        yield f"grade_id must be letters, digits, '-' and '_', got {meta.get('grade_id')!r}"
    if meta.get("task") or cell_type != "code":
        yield "a graded or solution cell must be a code cell; other cells need grading by hand"
    if not meta.get("grade"):
        return
    points = meta.get("points")
    if isinstance(points, bool) or not isinstance(points, int | float) or not points > 0:
        yield f"points must be a number above 0, got {points!r}; set nbgrader.points"
    if meta.get("solution") or not meta.get("locked"):
        yield "a graded cell must have nbgrader.solution false and nbgrader.locked true"


def _cell_problems(cell: Mapping[str, Any]) -> Iterator[str]:
    text, meta = cell_text(cell), nbgrader_of(cell)
    if meta:
        yield from _own_metadata_problems(meta, cell["cell_type"])
    found: dict[str, list[str]] = {}
    for kind in (SOLUTION, HIDDEN):
        try:
            found[kind] = regions(text, kind)
        except ValueError as problem:
            yield str(problem)
            return
    if bool(meta.get("solution")) != bool(found[SOLUTION]):
        yield (
            "BEGIN SOLUTION … END SOLUTION and nbgrader.solution true go together; "
            "give this cell both or neither"
        )
    if bool(meta.get("grade")) != bool(found[HIDDEN]):
        yield (
            "BEGIN HIDDEN TESTS … END HIDDEN TESTS and nbgrader.grade true go together; "
            "give this cell both or neither"
        )
    if meta.get("grade") and not _outside(text, HIDDEN):
        yield "a graded cell must have a line outside its hidden tests; add a comment for students"
    if any(not region.strip() for kind in found for region in found[kind]):
        yield "a region is empty; write the solution or the tests in it"
    if cell["cell_type"] == "code":
        try:
            code_tree(text)
        except SyntaxError as error:
            yield f"does not parse: {error.msg}, line {error.lineno} of the cell"


def _shared(names: Sequence[Any], what: str) -> Iterator[str]:
    for name in sorted({name for name in names if name is not None and names.count(name) > 1}):
        where = ", ".join(str(number) for number, other in enumerate(names, 1) if other == name)
        yield f"cells {where} have the same {what}, {name!r}; give each its own"


def _notebook_problems(notebook: Mapping[str, Any], slug: str) -> Iterator[str]:
    try:
        metadata = parse_lab_metadata(notebook)
        if metadata.slug != slug:
            yield f"metadata.labcore.slug must be the file's name, {slug!r}, got {metadata.slug!r}"
    except ValueError as problem:
        yield str(problem)
    if notebook["metadata"].get("kernelspec", {}).get("language") != "python":
        yield 'metadata.kernelspec.language must be "python"'
    cells = notebook["cells"]
    for number, cell in enumerate(cells, 1):
        where = f"cell {number} ({nbgrader_of(cell).get('grade_id') or cell.get('id', 'no id')})"
        if not NAME.fullmatch(str(cell.get("id", ""))):
            yield f"{where}: the cell's id must be letters, digits, '-' and '_'"
        yield from (f"{where}: {problem}" for problem in _cell_problems(cell))
    if not any(nbgrader_of(cell).get("grade") for cell in cells):
        yield "no graded cell; mark at least one cell with nbgrader.grade true and its points"
    yield from _shared([nbgrader_of(cell).get("grade_id") for cell in cells], "grade_id")
    yield from _shared([cell.get("id") for cell in cells], "id")


def read_lab(path: Path) -> Lab:
    """The source at path. Raises LabError with one line per fault: file, cell and what to do."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        problems = list(_notebook_problems(notebook, path.stem))
    except OSError as error:
        raise LabError(f"{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise LabError(f"{path.name}: is not valid JSON ({error}); restore it with git") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LabError(
            f"{path.name}: is not a notebook of format 4 ({error!r}); save it again in JupyterLab"
        ) from error
    if problems:
        raise LabError("\n".join(f"{path.name}, {problem}" for problem in problems))
    points = {
        str(nbgrader_of(cell)["grade_id"]): float(nbgrader_of(cell)["points"])
        for cell in notebook["cells"]
        if nbgrader_of(cell).get("grade")
    }
    return Lab(path=path, notebook=notebook, metadata=parse_lab_metadata(notebook), points=points)
