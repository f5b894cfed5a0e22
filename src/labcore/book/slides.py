"""Slide decks for teaching: a chapter as reveal.js slides that need neither kernel nor network.

`write` makes `<slug>.html` for each chapter and one folder `assets` next to them. The outputs come
from the book's execution cache if it is up to date; otherwise, the chapter is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError
from nbconvert import SlidesExporter

from labcore.book import contents, explorers, foot, kernels, runs, vendor
from labcore.book.slide_outline import PLOTLY_MIME, TWIN_MIME, Slide, outline
from labcore.ui import hosts, twin
from labcore.ui.compact import dumps

__all__ = ["MOST_BYTES", "Deck", "copy_assets", "deck", "executed", "write"]

MOST_BYTES = 15_000_000  # of a deck with everything that it loads
CONTROL = 44  # height of a row of controls, in pixels
OWN = ("slides.css", "slides.js", "twin.css", "twin.js")
REVEAL = {
    "reveal.js": "dist/reveal.js",
    "reveal.css": "dist/reveal.css",
    "notes.js": "plugin/notes/notes.js",
    "LICENSE.reveal.txt": "LICENSE",
}
ROLE = re.compile(r"\{(cite(?::t)?|doc|term)\}`([^`]+)`")
TARGET = re.compile(r"^(.*)<([^>]+)>$")


def write(root: Path, slugs: Sequence[str], out: Path) -> list[str]:
    """Writes decks of the chapters at root to out (relative to root); returns a line for each.

    slugs: the chapters, all if none is named. Raises ValueError for an unknown slug, and
    RuntimeError for a chapter that cannot be run or a deck larger than MOST_BYTES.
    """
    known = contents.chapters(root)
    if unknown := [slug for slug in slugs if slug not in known]:
        raise ValueError(f"unknown chapter: {', '.join(unknown)}; choose from {', '.join(known)}")
    out = root / out
    shared = copy_assets(out / "assets")
    lines = []
    for slug in slugs or known:
        try:
            made = deck(executed(root, known[slug]), known[slug])
        except ValueError as problem:
            raise RuntimeError(f"{slug}: {problem}") from problem
        own = len(made.page.encode()) + len(made.frames.encode())
        if own + shared > MOST_BYTES:
            raise RuntimeError(
                f"{slug}: the deck takes {own + shared:,} bytes with what it loads, but at most "
                f"{MOST_BYTES:,} are allowed; draw fewer points in its figures"
            )
        (out / f"{slug}.html").write_text(made.page, encoding="utf-8")
        (out / "assets" / f"{slug}.js").write_text(made.frames, encoding="utf-8")
        lines.append(
            f"{out / slug}.html: {made.slides} slides, {own / 1e6:.1f} MB in addition to the "
            f"{shared / 1e6:.1f} MB that all decks share"
        )
    return lines


def executed(root: Path, path: Path) -> dict[str, Any]:
    """A chapter with its outputs, from the book's cache if that is up to date, else from a run."""
    notebook = nbformat.read(path, as_version=4)
    cache = root / "_build" / ".jupyter_cache"
    try:
        memory = json.loads((cache / "labcore.json").read_text(encoding="utf-8"))
        name = path.relative_to(root).with_suffix("").as_posix()
        if memory.get(name, {}).get("key") == runs.run_key(path):
            with runs.open_cache(cache) as kept:
                return kept.merge_match_into_notebook(notebook)[1]
    except (OSError, KeyError, ValueError, AttributeError):
        pass  # no usable cache, so run
    try:
        return kernels.run(path, seconds=120)
    except CellExecutionError as problem:
        raise RuntimeError(
            f"{path.stem}: a cell ended with {problem.ename}: {problem.evalue}; fix the "
            "chapter, then make its slides again"
        ) from problem


@dataclass(frozen=True, slots=True)
class Deck:
    """page: HTML. frames: the script with the figures' data. slides: their number."""

    page: str
    frames: str
    slides: int


def deck(notebook: dict[str, Any], path: Path) -> Deck:
    """The deck of an executed chapter. path: the chapter's, to resolve references to other pages.

    Raises ValueError as `slide_outline.outline` does.
    """
    frames: dict[str, str] = {}
    figures: list[str] = []

    def figure(data: dict[str, Any]) -> tuple[str, int]:
        packed = _packed(data)
        body = dumps(packed)
        key = hashlib.sha256(body.encode()).hexdigest()[:16]
        frames[key] = body
        # A deck needs JavaScript anyway, so figures need no fallback.
        figures.append(key)
        markup = explorers.drawn_markup(f"twin-{len(figures)}", key, packed).split("<noscript>")[0]
        rows = -(-len(packed["controls"]) // 2) + len(packed["fixed"])
        return f"{markup}</div>", int(packed["height"]) + CONTROL * rows

    slides = outline(notebook, figure=figure, plain=lambda text: _without_roles(text, path))
    slides[0].notes[:0] = [_about(notebook)]
    exporter = SlidesExporter(
        extra_template_paths=[str(foot.TEMPLATES)],
        template_file="slides.html.j2",
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    cells = [cell for slide in slides for cell in _cells(slide)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same from run to run
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"deck": {"title": slides[0].title, "slug": path.stem}}
    found, _ = exporter.from_notebook_node(book, resources)
    script = "".join(
        f'(window.labcoreTwins=window.labcoreTwins||{{}})["{key}"]={body};\n'
        for key, body in frames.items()
    )
    return Deck(found, script, len(slides))


def _packed(data: dict[str, Any]) -> dict[str, Any]:
    if TWIN_MIME in data:
        return twin.first_slice(data[TWIN_MIME])
    figure = data[PLOTLY_MIME]
    return twin.still(figure, alt=explorers.alternative_text(figure) or "A figure")


def _about(notebook: dict[str, Any]) -> str:
    """The chapter's objectives, for the speaker's first notes."""
    facts = notebook.get("metadata", {}).get("labcore", {})
    goals = "".join(f"\n- {line}" for line in facts.get("objectives", []))
    return f"After this chapter you can\n{goals}" if goals else ""


def _cells(slide: Slide) -> list[Any]:
    """A slide as notebook cells for SlidesExporter."""
    level = "#" if slide.part else "##"
    kind = {"slideshow": {"slide_type": "slide" if slide.part else "subslide"}}
    text = f"{level} {slide.title}\n\n{slide.text}"
    cells = [nbformat.v4.new_markdown_cell(text, metadata=kind)]
    if slide.markup:
        shown = nbformat.v4.new_output("display_data", {"text/html": slide.markup})
        cells.append(
            nbformat.v4.new_code_cell(outputs=[shown], metadata={"slideshow": {"slide_type": "-"}})
        )
    if notes := "\n\n".join(filter(None, slide.notes)):
        aside = {"slideshow": {"slide_type": "notes"}}
        cells.append(nbformat.v4.new_markdown_cell(notes, metadata=aside))
    return cells


def _without_roles(text: str, path: Path) -> str:
    """Markdown with MyST's roles as text: authors and year, the title of a page, or a term."""

    def said(found: re.Match[str]) -> str:
        role, body = found[1], found[2]
        if named := TARGET.match(body):
            return named[1].strip()
        if role == "term":
            return body
        if role == "doc":
            return contents.title(path.parent / body)
        names = [_source(path.parent / "references.bib", key.strip()) for key in body.split(",")]
        if role == "cite:t":
            return "; ".join(f"{who} ({year})" for who, year in names)
        return "(" + "; ".join(f"{who}, {year}" for who, year in names) + ")"

    return ROLE.sub(said, text)


def _source(bibliography: Path, key: str) -> tuple[str, str]:
    """Authors and year of an entry in the bibliography; the key itself if it has no authors."""
    from pybtex.database import parse_file  # type: ignore[import-untyped]

    entries = parse_file(str(bibliography)).entries if bibliography.is_file() else {}
    if key not in entries:
        return key, "n.d."
    entry = entries[key]
    names = [" ".join(person.last_names) for person in entry.persons.get("author", [])]
    names = [name.strip("{}") for name in names]
    who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return who or key, entry.fields.get("year", "n.d.")


def copy_assets(folder: Path) -> int:
    """Copies what all decks load into folder; returns its size in bytes."""
    spec = importlib.util.find_spec("sphinx_revealjs")
    if spec is None or spec.origin is None:
        raise RuntimeError("sphinx-revealjs is not installed; run pip install 'labcore[book]'")
    reveal = Path(spec.origin).parent / "_static" / "revealjs"
    wanted = {name: reveal / place for name, place in REVEAL.items()}
    wanted |= {name: explorers.ASSETS / name for name in OWN}
    wanted[twin.FORMULAS.name] = twin.FORMULAS
    wanted |= {hosts.STYLE.name: hosts.STYLE, "plotly.min.js": explorers.plotly_script()}
    wanted |= {f"mathjax/{name}": path for name, path in vendor.mathjax_files().items()}
    for name, source in wanted.items():
        if not source.is_file():
            raise RuntimeError(f"{source.name} is missing; install the versions in constraints.txt")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return sum(path.stat().st_size for path in wanted.values())
