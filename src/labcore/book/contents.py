"""The order of the book's pages, read from `_toc.yml`, and their titles."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Part", "chapters", "parts", "title"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the book. pages: (docname, depth) in reading order; depth 0 is a chapter."""

    caption: str
    pages: tuple[tuple[str, int], ...]


def parts(root: Path) -> list[Part]:
    """The first page, as a part without a caption, followed by the parts of the book at root.

    Raises ValueError if `_toc.yml` is missing or names no first page.
    """
    path = root / "_toc.yml"
    if not path.is_file():
        raise ValueError(f"{path} is missing; run this in the course's folder")
    toc = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(toc, dict) or "root" not in toc:
        raise ValueError(f"{path} names no first page; add a line `root: book/index`")
    found = [Part("", ((str(toc["root"]), 0),))]
    for part in toc.get("parts") or [toc]:
        pages = tuple(_pages(part.get("chapters") or [], 0))
        found.append(Part(str(part.get("caption") or ""), pages))
    return found


def _pages(entries: list[dict[str, Any]], depth: int) -> list[tuple[str, int]]:
    pages = []
    for entry in entries:
        pages.append((str(entry["file"]), depth))
        pages += _pages(entry.get("sections") or [], depth + 1)
    return pages


def chapters(root: Path) -> dict[str, Path]:
    """slug -> notebook of each chapter, in the book's order."""
    files = [
        root / f"{name}.ipynb" for part in parts(root) for name, depth in part.pages if not depth
    ]
    return {path.stem: path for path in files if path.is_file()}


def title(page_path: Path) -> str:
    """The title of a page of the book, else its name."""
    for suffix in (".md", ".ipynb"):
        file = page_path.with_suffix(suffix)
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            if suffix == ".ipynb":
                text = "".join(json.loads(text)["cells"][0]["source"])
            if heading := re.search(r"^#\s+(.+)$", text, re.MULTILINE):
                return heading[1].strip()
    return page_path.name
