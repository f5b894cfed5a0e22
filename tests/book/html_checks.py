"""Gates over the built pages. Each returns a list of sentences, empty when all is well."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HTML_LIMIT = 300_000
PAGE_LIMIT = 1_500_000
# Libraries that all pages share and few load.
NOT_COUNTED = ("_static/mathjax/", "_static/vendor/plotly")
CSS_URL = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
# Loaded by the browser without a click.
RESOURCES = {
    ("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"),
    ("video", "src"), ("audio", "src"), ("embed", "src"), ("object", "data"), ("img", "srcset"),
}  # fmt: skip
# These name an address without loading it.
LINK_ONLY = {"canonical", "next", "prev", "search", "author", "license", "help"}


@dataclass
class Page:
    """What a page defines and points to."""

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    language: str = ""
    title: str = ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        page = self.page
        self._inside = tag
        page.ids += [values["id"]] if "id" in values else []
        page.language = values.get("lang", "") if tag == "html" else page.language
        if tag == "a":
            page.ids += [values["name"]] if "name" in values else []
            page.links += [values["href"]] if "href" in values else []
        for name, value in values.items():
            named = tag == "link" and set(values.get("rel", "").split()) & LINK_ONLY
            if (tag, name) in RESOURCES:
                (page.links if named else page.resources).append(value)
        page.resources += [a or b for a, b in CSS_URL.findall(values.get("style", ""))]

    def handle_data(self, data: str) -> None:
        if self._inside == "title" and not self.page.title:
            self.page.title = data.strip()
        if self._inside == "style":
            self.page.resources += [a or b for a, b in CSS_URL.findall(data)]


@cache
def read(path: Path) -> Page:
    """The page at path."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page


def pages(folder: Path) -> list[Path]:
    """All pages of a built book, in order: neither what Sphinx copies nor the guide inside it."""
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*.html"))]
    return [folder / path for path in inside if not {"_static", "teaching"} & {*path.parts}]


def _outside(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme not in ("", "data", "file")


def _target(page: Path, address: str) -> Path:
    return (page.parent / unquote(urlsplit(address).path)).resolve()


def dead_links(folder: Path) -> list[str]:
    """Links between pages whose file or whose anchor is not there."""
    problems = []
    for page in pages(folder):
        for link in read(page).links + read(page).resources:
            parts = urlsplit(link)
            if _outside(link) or parts.scheme or not link:
                continue
            target = page if not parts.path else _target(page, link)
            where = f"{page.relative_to(folder)}: {link}"
            if not target.is_file():
                problems.append(f"{where}: no such file")
                continue
            anchor = unquote(parts.fragment) if target.suffix == ".html" else ""
            if anchor and anchor not in read(target).ids:
                problems.append(f"{where}: no such anchor")
    return problems


def malformed_links(folder: Path) -> list[str]:
    """Links that leave the book and are not a plain web or mail address."""
    problems = []
    for page in pages(folder):
        for link in filter(_outside, read(page).links):
            parts = urlsplit(link)
            fine = parts.scheme in ("https", "http") and "." in parts.netloc
            if not (fine or (parts.scheme == "mailto" and "@" in parts.path)) or " " in link:
                problems.append(f"{page.relative_to(folder)}: {link}")
    return problems


def outside_resources(folder: Path) -> list[str]:
    """Scripts, styles, fonts and pictures that a page would fetch from the network."""
    found = []
    for page in pages(folder):
        bad = filter(_outside, read(page).resources)
        found += [f"{page.relative_to(folder)}: {address}" for address in bad]
    for sheet in sorted(folder.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        bad = filter(_outside, (a or b for a, b in CSS_URL.findall(text)))
        found += [f"{sheet.relative_to(folder)}: {address}" for address in bad]
    return found


def weights(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes of each page: its HTML, and HTML with sidecars (local files that not every page loads).

    MathJax and plotly.js are not counted: pages share them and load them where they use them.
    """
    all_pages = pages(folder)
    loads = {
        page: {_target(page, a) for a in read(page).resources if not _outside(a) and a}
        for page in all_pages
    }
    inner = [page for page in all_pages if page != folder / "index.html"]
    shared = Counter(file for page in inner for file in loads[page])
    out = {}
    for page, files in loads.items():
        own = [
            file.stat().st_size
            for file in files
            if file.is_file()
            and shared[file] < max(len(inner), 2)
            and not file.relative_to(folder.resolve()).as_posix().startswith(NOT_COUNTED)
        ]
        size = page.stat().st_size
        out[page.relative_to(folder).as_posix()] = (size, size + sum(own))
    return out


def heavy_pages(folder: Path) -> list[str]:
    """Pages above the limits of HTML alone or of HTML with sidecars."""
    problems = []
    for name, (alone, together) in weights(folder).items():
        if alone > HTML_LIMIT:
            problems.append(f"{name}: {alone:,} bytes of HTML, at most {HTML_LIMIT:,}")
        if together > PAGE_LIMIT:
            problems.append(f"{name}: {together:,} bytes with sidecars, at most {PAGE_LIMIT:,}")
    return problems


def plain_faults(folder: Path) -> list[str]:
    """Pages without a language or a title, or with one id twice."""
    problems = []
    for path in pages(folder):
        page, name = read(path), path.relative_to(folder)
        problems += [f"{name}: no language"] if not page.language else []
        problems += [f"{name}: no title"] if not page.title else []
        twice = [key for key, n in Counter(page.ids).items() if n > 1]
        problems += [f"{name}: id {key} twice" for key in twice]
    return problems


def download_problems(folder: Path, notebooks: list[Path], root: Path) -> list[str]:
    """Notebooks that a page does not offer, or offers with outputs in it."""
    problems = []
    for notebook in notebooks:
        name = notebook.relative_to(root)
        copy = folder / "_sources" / name
        page = folder / name.with_suffix(".html")
        if not copy.is_file():
            problems.append(f"{name}: no download")
            continue
        if copy not in {_target(page, link) for link in read(page).links}:
            problems.append(f"{name}: its page has no link to the download")
        cells = json.loads(copy.read_text(encoding="utf-8"))["cells"]
        if any(
            cell.get("outputs") and "# NBVAL_CHECK_OUTPUT" not in "".join(cell["source"])
            for cell in cells
        ):
            problems.append(f"{name}: its download has outputs")
    return problems
