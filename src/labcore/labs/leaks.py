"""Searches what students are about to get for lines that they must not see.

The package's sources are open, including the exercises' references, so lines of a lab's solution
may appear in `src/labcore`. Lines of a hidden test may not appear anywhere, except those that
`shared_lines.txt` lists: lines that a test has in common with the package.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.labs import variants
from labcore.labs.releases import source_paths
from labcore.labs.source import HIDDEN, SOLUTION, cell_text, read_lab, regions

__all__ = ["Secrets", "found", "read_secrets"]

SHARED = Path(__file__).with_name("shared_lines.txt")
SHORTEST = 20  # characters; a shorter line, such as "return x", may appear anywhere
WORD = re.compile(rb"\w+")


@dataclass(frozen=True, slots=True)
class Secrets:
    """Lines as bytes -> what they are.

    hidden: may not appear anywhere. solutions: may appear only in the package.
    """

    hidden: Mapping[bytes, str]
    solutions: Mapping[bytes, str]


def _long_lines(text: str) -> Iterator[bytes]:
    return (line.strip().encode() for line in text.split("\n") if len(line.strip()) >= SHORTEST)


def read_secrets(root: Path) -> Secrets:
    """The long lines of the labs' hidden tests and solutions, and of the class's secret and key.

    root: the checkout. The secret and key are looked for where `variants` puts them by default.
    Raises LabError for an invalid source.
    """
    hidden: dict[bytes, str] = {}
    solutions: dict[bytes, str] = {}
    for slug, path in source_paths(root).items():
        for cell in read_lab(path).notebook["cells"]:
            text = cell_text(cell)
            for region in regions(text, HIDDEN):
                hidden |= dict.fromkeys(_long_lines(region), f"hidden test of {slug}")
            for region in regions(text, SOLUTION):
                solutions |= dict.fromkeys(_long_lines(region), f"solution of {slug}")
    for line in _long_lines(SHARED.read_text(encoding="utf-8")):
        hidden.pop(line, None)
    for path in (variants.SECRET, variants.KEY):
        if (root / path).is_file():
            text = (root / path).read_text(encoding="utf-8")
            hidden |= dict.fromkeys(_long_lines(text), f"line of {path}")
    return Secrets(hidden, solutions)


def _strings(value: Any) -> Iterator[str]:
    """The texts in a JSON value; a list of lines, such as a notebook's cell, counts as one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        yield "".join(value)
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _readable(content: bytes) -> bytes:
    """The content, followed by its unescaped texts if it is JSON."""
    if content.lstrip()[:1] not in (b"{", b"["):
        return content
    try:
        return content + b"\n" + "\n".join(_strings(json.loads(content))).encode()
    except (ValueError, RecursionError):
        return content


@functools.cache
def _inner_words(line: bytes) -> frozenset[bytes]:
    """A line's words without the first and the last, which may be part of longer words."""
    return frozenset(WORD.findall(line)[1:-1])


def found(content: bytes, secrets: Secrets, *, open_source: bool) -> list[str]:
    """The forbidden lines in the content, each as "hidden test of <lab>: <line>" or similar.

    Also finds them within longer lines and escaped in JSON. open_source: whether solutions are
    allowed here.
    """
    wanted = dict(secrets.hidden) if open_source else {**secrets.solutions, **secrets.hidden}
    text = _readable(content)
    words = set(WORD.findall(text))  # much faster: most lines have a word that is not in the text
    return sorted(
        f"{what}: {line.decode()}"
        for line, what in wanted.items()
        if _inner_words(line) <= words and line in text
    )
