"""Makes the students' notebooks from the instructor's: `make labs`.

nbgrader makes `labs/release/<slug>/<slug>.ipynb` from `labs/source/<slug>/<slug>.ipynb`: it
replaces each solution with a stub and removes the hidden tests. The same source always gives the
same bytes. A release's metadata has a digest of its source and one of its own cells. If someone
edited the release, a copy is kept next to the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.labs.first_cell import is_first_cell
from labcore.labs.nbgrader_settings import course_settings, quiet_log
from labcore.labs.source import Lab, LabError, cell_text, code_tree, nbgrader_of, read_lab

__all__ = [
    "Release",
    "chosen",
    "generate",
    "place",
    "release_path",
    "sealed",
    "source_paths",
    "stale",
    "write",
]

KEPT_METADATA = ("kernelspec", "language_info", "labcore")
KEPT_CELL_METADATA = ("nbgrader", "editable", "deletable", "tags", "jupyter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What `write` did for one lab.

    written: whether the file changed. kept: the copy of an edited release. problem: why there is
    no new release; an old one is left unchanged.
    """

    slug: str
    path: Path
    written: bool = False
    kept: Path | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.slug}: not released\n  " + self.problem.replace("\n", "\n  ")
        line = f"{self.slug}: {'written' if self.written else 'unchanged'}"
        if self.kept is not None:
            line += f"; the old release had been edited and is kept next to it as {self.kept.name}"
        return line


def source_paths(root: Path) -> dict[str, Path]:
    """The labs' sources in the checkout at root, by slug. Raises ValueError if there are none."""
    found = {
        folder.name: folder / f"{folder.name}.ipynb"
        for folder in sorted((root / "labs" / "source").glob("*"))
        if folder.is_dir() and not folder.name.startswith(".")
    }
    if not found:
        raise ValueError(f"{root} has no labs/source/<slug>; run this in the course's folder")
    return found


def chosen(root: Path, slugs: Sequence[str]) -> dict[str, Path]:
    """The sources of these labs, of all if none is named. Raises ValueError for an unknown slug."""
    sources = source_paths(root)
    if unknown := sorted(set(slugs) - sources.keys()):
        raise ValueError(f"unknown lab: {', '.join(unknown)}; choose from {', '.join(sources)}")
    return {slug: path for slug, path in sources.items() if slug in (slugs or sources)}


def release_path(root: Path, slug: str) -> Path:
    """The path of a lab's release."""
    return root / "labs" / "release" / slug / f"{slug}.ipynb"


def _digest(cells: Iterable[Mapping[str, Any]]) -> str:
    """A digest of cells: kind, id, text, grading, tags and outputs.

    The address in the set-up cell does not count: `python -m labcore address` writes it, which is
    not an edit.
    """
    parts = []
    for cell in cells:
        text = cell_text(cell)
        parts.append(
            [
                cell["cell_type"],
                cell.get("id"),
                "set-up" if is_first_cell(text) else text,
                nbgrader_of(cell),
                cell.get("metadata", {}).get("tags"),
                cell.get("outputs") or None,
            ]
        )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _assign(lab: Lab, folder: Path) -> dict[str, Any]:
    """nbgrader's release of the lab as JSON, made in an empty folder."""
    from nbgrader.converters import GenerateAssignment  # type: ignore[import-untyped]
    from nbgrader.coursedir import CourseDirectory  # type: ignore[import-untyped]
    from nbgrader.preprocessors import SaveCells  # type: ignore[import-untyped]
    from traitlets.config import Config

    slug, log = lab.metadata.slug, quiet_log(None)
    copy = folder / "source" / slug / f"{slug}.ipynb"
    copy.parent.mkdir(parents=True)
    copy.write_text(json.dumps(lab.notebook), encoding="utf-8")
    config = Config(course_settings(folder, folder))
    course = CourseDirectory(config=config, assignment_id=slug, log=log)
    converter = GenerateAssignment(coursedir=course, config=config, no_database=True, log=log)
    converter.preprocessors = [step for step in converter.preprocessors if step is not SaveCells]
    converter.start()
    made = json.loads((folder / "release" / slug / f"{slug}.ipynb").read_text(encoding="utf-8"))
    return dict(made)


def _student_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {key: cell["metadata"][key] for key in KEPT_CELL_METADATA if key in cell["metadata"]}
    kept = {
        "cell_type": cell["cell_type"],
        "id": cell["id"],
        "metadata": metadata,
        "source": cell_text(cell).splitlines(keepends=True),
    }
    if cell["cell_type"] == "code":
        kept |= {"execution_count": None, "outputs": []}
    if "attachments" in cell:
        kept["attachments"] = cell["attachments"]
    return kept


def generate(source: Path) -> str:
    """The text of the release for the source at this path; the same source gives the same text.

    Raises LabError listing every fault in the source.
    """
    lab = read_lab(source)
    with tempfile.TemporaryDirectory() as folder:
        made = _assign(lab, Path(folder))
    cells = [_student_cell(cell) for cell in made["cells"]]
    for number, cell in enumerate(cells, 1):
        try:
            code_tree(cell_text(cell) if cell["cell_type"] == "code" else "")
        except SyntaxError as error:
            raise LabError(
                f"{source.name}, cell {number} ({cell['id']}): does not parse without its solution "
                f"({error.msg}, line {error.lineno}); move the BEGIN and END lines"
            ) from error
    metadata = {key: made["metadata"][key] for key in KEPT_METADATA if key in made["metadata"]}
    metadata["labcore"] |= {
        "points": sum(lab.points.values()),
        "release": {"source": _digest(lab.notebook["cells"])},
    }
    return sealed({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def sealed(release: dict[str, Any]) -> str:
    """The text of a release, after writing the digest of its cells into its metadata."""
    release["metadata"]["labcore"]["release"]["cells"] = _digest(release["cells"])
    return json.dumps(release, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _edited(text: str) -> bool:
    """Whether a release was changed since it was generated; an unreadable file counts as edited."""
    try:
        notebook = json.loads(text)
        recorded = notebook["metadata"]["labcore"]["release"]["cells"]
        return bool(recorded != _digest(notebook["cells"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True


def _keep(path: Path, content: bytes) -> Path:
    """Writes the content next to path, to the first free name `….edited-<n>.ipynb`."""
    number = 1
    while True:
        copy = path.with_name(f"{path.stem}.edited-{number}.ipynb")
        try:
            with copy.open("xb") as file:
                file.write(content)
        except FileExistsError:
            number += 1
        else:
            return copy


def _release(root: Path, slug: str, source: Path) -> Release:
    path = release_path(root, slug)
    try:
        text = generate(source)
    except LabError as problem:
        return Release(slug=slug, path=path, problem=str(problem))
    return place(slug, path, text)


def place(slug: str, path: Path, text: str) -> Release:
    """Writes the text of a release to path; an edited file there is kept next to it."""
    old = path.read_bytes() if path.is_file() else None
    if old == text.encode():
        return Release(slug=slug, path=path)
    edited = old is not None and _edited(old.decode("utf-8", errors="replace"))
    kept = _keep(path, old) if old is not None and edited else None
    path.parent.mkdir(parents=True, exist_ok=True)
    # Atomic: an interrupt leaves either the old release or the new one.
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    return Release(slug=slug, path=path, written=True, kept=kept)


def write(root: Path, slugs: Sequence[str] = ()) -> list[Release]:
    """Writes the releases of these labs, or of all if none is named, in the checkout at root.

    A faulty source leaves its old release unchanged. Raises ValueError for an unknown slug.
    """
    return [_release(root, slug, path) for slug, path in chosen(root, slugs).items()]


def stale(root: Path) -> list[str]:
    """A sentence for each release in the checkout at root that `write` would change."""
    problems, sources = [], source_paths(root)
    for slug, source in sources.items():
        path = release_path(root, slug)
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            problems.append(f"{name} is missing; run make labs")
        elif path.read_text(encoding="utf-8") != generate(source):
            problems.append(f"{name} does not match its source; run make labs")
    for folder in sorted((root / "labs" / "release").glob("*/")):
        if folder.name not in sources:
            problems.append(f"labs/release/{folder.name} has no source; remove it")
    return problems
