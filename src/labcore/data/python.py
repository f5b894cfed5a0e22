"""Text and source code of the running Python: a corpus on every machine, split by file.

The split hashes file names, so a file is never on both sides, and a new Python version moves no
old file. The documentation is the library's docstrings (module, class, function), because the
manual itself is not installed with Python.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labcore.checks import one_of, positive_int

__all__ = ["Text", "python_sources", "python_text"]

PARTS = ("train", "held_out")
# Tests are a third of the library and mostly data; the others are not part of Python.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A corpus. `text` is the files' contents in the order of `files`, with a newline between.

    version: the version of the Python it was read from.
    """

    text: str
    files: tuple[str, ...]
    version: str


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _files(root: Path) -> list[Path]:
    found = [
        path
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    ]
    if not found:
        raise FileNotFoundError(
            f"no Python sources under {root}: this Python ships without its standard library's "
            "sources; use a Python from python.org, a Linux distribution or conda"
        )
    return sorted(found)


def _part_of(name: str, held_out_percent: int) -> str:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
    return "held_out" if bucket < held_out_percent else "train"


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _read(part: str, max_bytes: int | None, only_docstrings: bool) -> Iterator[tuple[str, str]]:
    root, total = _library(), 0
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        if _part_of(name, 10) != part:
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        text = _docstrings(source) if only_docstrings else source
        if not text.strip():
            continue
        if max_bytes is not None and total + len(text.encode()) > max_bytes and total:
            return
        total += len(text.encode())
        yield name, text


def _corpus(part: str, max_bytes: int | None, only_docstrings: bool) -> Text:
    one_of("part", part, PARTS)
    if max_bytes is not None:
        positive_int("max_bytes", max_bytes)
    pairs = list(_read(part, max_bytes, only_docstrings))
    return Text(
        text="\n".join(text for _, text in pairs),
        files=tuple(name for name, _ in pairs),
        version=f"Python {platform.python_version()}",
    )


def python_sources(part: str = "train", *, max_bytes: int | None = None) -> Text:
    """Read the standard library's source files, without its tests, in the order of their names.

    part: "train" (about nine files in ten) or "held_out". max_bytes: read whole files up to this
    many bytes of UTF-8, but at least one file; None reads all (about 10 MB for "train").
    """
    return _corpus(part, max_bytes, only_docstrings=False)


def python_text(part: str = "train", *, max_bytes: int | None = None) -> Text:
    """Read the standard library's docstrings, file by file; see python_sources for arguments."""
    return _corpus(part, max_bytes, only_docstrings=True)
