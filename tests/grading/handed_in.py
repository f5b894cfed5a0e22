"""What the tests of the intake hand in: notebooks, archives, folders; and what came of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from labcore.grading.intake import collection
from labcore.grading.intake.submissions import Submission

LABS = {"mini", "lion", "in_flight_batching"}
Names = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]


def notebook(text: str = "", **meta: Any) -> bytes:
    """A notebook with one text, and labcore's metadata."""
    cells = [{"cell_type": "markdown", "metadata": {}, "source": text}]
    whole = {"cells": cells, "metadata": {"labcore": meta}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole).encode()


def zipped(path: Path, entries: Names) -> Path:
    """An archive at path."""
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two entries of one name are meant
        for name, content in pairs:
            archive.writestr(name, content)
    return path


def zip_bytes(entries: Names) -> bytes:
    """An archive's content."""
    held = io.BytesIO()
    zipped(held, entries)  # type: ignore[arg-type]
    return held.getvalue()


def taken(source: Path, tmp_path: Path) -> list[Submission]:
    """What is taken in from source, unpacked into work."""
    return collection.collect(source, tmp_path / "work", LABS)


def by_student(found: Iterable[Submission]) -> dict[tuple[str, str], Submission]:
    """The submissions by student and lab, of which there must be one each."""
    listed = list(found)
    rows = {(one.student, one.lab): one for one in listed}
    assert len(rows) == len(listed)
    return rows


def texts(found: Iterable[Submission]) -> dict[tuple[str, str], str]:
    """What the notebook that counts says, by student and lab; the problem where there is one."""
    return {
        key: one.problem or json.loads(one.path.read_bytes())["cells"][0]["source"]
        for key, one in by_student(found).items()
    }


def tree(folder: Path) -> str:
    """A hash of the names and contents below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(os.readlink(path).encode() if path.is_symlink() else b"")
        digest.update(path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
    return digest.hexdigest()


def put(folder: Path, entries: Mapping[str, str | bytes]) -> Path:
    """Writes files below a folder."""
    for name, content in entries.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
