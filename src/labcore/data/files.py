"""Files of text: a folder's, an installed package's, or those of Python's library.

Which files are read, in what order, and which are held out depends on their names alone.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from labcore.checks import positive_int

__all__ = ["hold_out", "read_files"]

SUFFIXES = (".md", ".py", ".rst", ".tex", ".txt")
NO_TEXT = {"__pycache__", "build", "dist", "node_modules", "site-packages", "test", "tests", "venv"}
# Some versions and systems leave these out of Python's library; all are to read the same files.
NO_TEXT |= {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
SMALLEST = 200_000  # bytes; less is known by heart within a minute
HELD_OUT = 10  # one file in so many
DECODER = codecs.getincrementaldecoder("utf-8-sig")


def read_files(source: str, *, max_bytes: int) -> tuple[str, dict[str, str]]:
    """Return what to call a source, and its files' names and texts in a fixed random order.

    source: "python", for the library of the running Python; the name of an installed package, for
    its files; or a folder, for its files. They count if they are UTF-8, their names end in one of
    SUFFIXES, and no folder above them is hidden or in NO_TEXT. max_bytes: about how much to read.
    Raises ValueError if there is no such folder or package, or if it has too little text.
    """
    root, name = _root(source)
    found = dict(_read(root, positive_int("max_bytes", max_bytes)))
    size = sum(len(text.encode()) for text in found.values())
    if size < SMALLEST:
        raise ValueError(
            f"text must have at least {SMALLEST:,} bytes, got {size:,} in {len(found)} files of "
            f"{root} that end in {', '.join(SUFFIXES)}; add text, or choose another source"
        )
    return name, found


def hold_out(found: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Divide the files into those to learn from and those held out.

    Where the names would hold out hardly anything or too much, cut the end of the longest file.
    """
    held = {name for name in found if _number(name) % HELD_OUT == 0}
    size = sum(map(len, found.values()))
    if 0.02 * size < sum(len(found[name]) for name in held) < 0.5 * size:
        train = {name: text for name, text in found.items() if name not in held}
        return train, {name: text for name, text in found.items() if name in held}
    longest = max(found, key=lambda name: len(found[name]))
    share = min(len(found[longest]) // 2, size // HELD_OUT)
    return {**found, longest: found[longest][:-share]}, {longest: found[longest][-share:]}


def _root(source: str) -> tuple[Path, str]:
    """Return the folder of a source, and what to call it."""
    if source == "python":
        return Path(sysconfig.get_paths()["stdlib"]), f"Python {platform.python_version()}"
    if source and (folder := Path(os.path.expanduser(source))).is_dir():
        return folder.resolve(), folder.resolve().name
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f'text must be "python", a folder or an installed package, got {source!r}; check the '
            "spelling, or pass a folder's path"
        )
    try:
        version = f" {metadata.version(source)}"
    except metadata.PackageNotFoundError:
        version = ""
    return Path(next(iter(spec.submodule_search_locations))), source + version


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def _paths(root: Path) -> Iterator[Path]:
    for folder, inside, names in os.walk(root):
        inside[:] = [one for one in inside if one not in NO_TEXT and not one.startswith(".")]
        paths = (Path(folder) / one for one in names if one.lower().endswith(SUFFIXES))
        yield from (path for path in paths if path.is_file())


def _read(root: Path, most: int) -> Iterator[tuple[str, str]]:
    """Yield names and texts in a fixed random order, up to about `most` bytes."""
    names = [path.relative_to(root).as_posix() for path in _paths(root)]
    for count, name in enumerate(sorted(names, key=_number)):
        if most <= 0 and count > 1:
            return
        try:
            with open(root / name, "rb") as file:
                # It refuses what isn't UTF-8, but not a character that is cut at the end.
                text = DECODER().decode(file.read(max(most, SMALLEST)))
        except (OSError, UnicodeDecodeError):
            continue
        most -= len(text.encode())
        if text.strip():
            yield name, text
