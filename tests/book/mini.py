"""A book of a few lines under the real book's settings, for tests that build something broken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import yaml

from tests.book_fixtures import ROOT

METADATA = {
    "objectives": ["say what `f` does"],
    "prerequisites": ["index"],
    "minutes": 5,
    "tier": "cpu",
}


def notebook(
    path: Path, code: str, *, text: str = "Some $x^2$.", drop: tuple[str, ...] = (), **metadata: Any
) -> None:
    """Write a notebook with one code cell; `drop` leaves keys of its metadata out."""
    labcore = {"slug": path.stem, **METADATA, **metadata}
    cells = [
        nbformat.v4.new_markdown_cell(f"# Chapter {path.stem}\n\n{text}", id="title"),
        nbformat.v4.new_code_cell(code, id="code"),
    ]
    book = nbformat.v4.new_notebook(cells=cells)
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "labcore": {key: value for key, value in labcore.items() if key not in drop},
    }
    nbformat.write(book, path)


def mini_book(folder: Path, *, url: str = "") -> Path:
    """A book with one page, book/index, to which notebooks are added; returns its folder."""
    pages = folder / "book"
    pages.mkdir(parents=True)
    shutil.copytree(ROOT / "book" / "_assets", pages / "_assets")
    (pages / "index.md").write_text("# Start\n\nA word: haystack.\n", encoding="utf-8")
    (pages / "references.bib").write_text("", encoding="utf-8")
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    config["repository"]["url"] = url
    (folder / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def write_toc(folder: Path) -> None:
    """Put every notebook of the mini book into its table of contents."""
    chapters = [{"file": f"book/{path.stem}"} for path in sorted(folder.glob("book/*.ipynb"))]
    toc = {"format": "jb-book", "root": "book/index", "chapters": chapters}
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
