"""Exports the built book as one PDF or as one zip of its pages."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, NameObject

from labcore.book import contents
from labcore.course import doctor

__all__ = ["Printed", "merged", "pdf", "strangers", "zipped"]

# Chromium has no sandbox as root. The other flags stop its own network traffic.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
PATIENCE = 60_000  # milliseconds for a page to load and to draw

# Hides what is useless on paper and keeps each figure on one sheet.
PRINT_CSS = """
.bd-header, .bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article, .prev-next-footer,
.bd-footer, .bd-footer-content, .labcore-links, #labcore-run, #jb-print-toc, .headerlink,
.copybtn, .toggle-button, .skip-link, #pst-skip-link, .header-article { display: none !important; }
.bd-container, .bd-container__inner, .bd-main, .bd-content, .bd-article-container, .bd-article,
article {
  display: block !important; max-width: none !important; width: auto !important;
  padding: 0 !important; margin: 0 !important; height: auto !important;
  overflow: visible !important;
}
.labcore-twin, img, figure, tr { break-inside: avoid; }
h1, h2, h3 { break-after: avoid; }
pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
"""
# Waits until mathematics is typeset and every figure is drawn.
SETTLED = """() => (!window.MathJax || !MathJax.startup || !MathJax.startup.promise
    || MathJax.startup.promise.then(() => true))
    && [...document.querySelectorAll('.twin-plot')].every(e => e.querySelector('.main-svg'))"""
SMALL = "width: 100%; padding: 0 16mm; font-size: 8px; color: #555"
TITLE = f'<div style="{SMALL}"><span class="title"></span></div>'
NUMBER = f'<div style="{SMALL}; text-align: right"><span class="pageNumber"></span></div>'
PAPER = {
    "format": "A4",
    "scale": 0.8,
    "print_background": True,
    "display_header_footer": True,
    "header_template": "<div></div>",
    "margin": {"top": "18mm", "bottom": "18mm", "left": "16mm", "right": "16mm"},
}
EARLIEST = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip
# Only useful to another build. Of the sources, the notebooks that pages link to are kept.
LEFT_OUT = (".buildinfo", "objects.inv", ".doctrees/")
SOURCES = "_sources/"
# Attributes that load a file, and kinds of <link> that load nothing.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
LINK_ONLY = {"canonical", "next", "prev", "search", "author", "license", "help"}
CSS_URL = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
LEAVES = re.compile(r"^(?:[a-z][a-z0-9+.-]*:)?//|^/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Printed:
    """A page as a PDF. depth: 0 for a chapter, 1 for a page below one. part: the part's caption.

    address: the file:// address that links to the page use.
    """

    address: str
    title: str
    part: str
    depth: int
    pdf: bytes


def pdf(root: Path, out: Path) -> list[str]:
    """Prints the book in `_build/html` of root into one PDF at out (relative to root).

    The outline has the parts and their pages. Raises ValueError if the book is not built, and
    RuntimeError without Chromium or if a page does not load; out is then unchanged.
    """
    html = _built(root)
    pages = []
    with _browser() as page:
        for part in contents.parts(root):
            for name, depth in part.pages:
                path = html / f"{name}.html"
                title, sheets = _print(page, path)
                pages.append(Printed(path.as_uri(), title, part.caption, depth, sheets))
        count = sum(len(PdfReader(io.BytesIO(one.pdf)).pages) for one in pages)
        page.set_content('<p style="break-after: page">&nbsp;</p>' * (count - 1) + "&nbsp;")
        whole = merged(pages, page.pdf(**PAPER, footer_template=NUMBER))
    target = root / out
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(whole)
    size = f"{len(whole) / 1e6:.1f} MB"
    return [f"{target}: {len(pages)} pages of the book on {count} sheets, {size}"]


def merged(pages: Sequence[Printed], numbers: bytes) -> bytes:
    """One PDF with an outline of parts, chapters and the pages below them.

    numbers: a PDF with the same number of sheets, laid over these. Links between pages stay within
    the PDF; links to other local files are dropped. Raises ValueError for a page without a sheet.
    """
    writer = PdfWriter()
    starts: dict[str, int] = {}
    part: Any = None
    chapter: Any = None
    caption = ""
    for page in pages:
        reader = PdfReader(io.BytesIO(page.pdf))
        if not reader.pages:
            raise ValueError(f"the page {page.title!r} has no sheets; build the book again")
        first = starts[page.address] = len(writer.pages)
        writer.append(reader, import_outline=False)
        if page.part != caption:
            caption, chapter = page.part, None
            part = writer.add_outline_item(title=caption, page_number=first) if caption else None
        above = chapter if page.depth else part
        item = writer.add_outline_item(title=page.title, page_number=first, parent=above)
        if not page.depth:
            chapter = item
    for sheet, number in zip(writer.pages, PdfReader(io.BytesIO(numbers)).pages, strict=True):
        sheet.merge_page(number)
        sheet.compress_content_streams()
    _keep_links_inside(writer, starts)
    whole = io.BytesIO()
    writer.write(whole)
    return whole.getvalue()


def _keep_links_inside(writer: PdfWriter, starts: dict[str, int]) -> None:
    """Points links to local files at their sheets in the PDF; drops those without a sheet."""
    for sheet in writer.pages:
        kept = ArrayObject()
        for reference in sheet.get("/Annots", ArrayObject()):
            link = reference.get_object()
            address = str(link.get("/A", {}).get("/URI", ""))
            if address.startswith("file:"):
                first = starts.get(address.partition("#")[0])
                if first is None:
                    continue
                del link["/A"]
                there = writer.pages[first].indirect_reference
                link[NameObject("/Dest")] = ArrayObject([there, NameObject("/Fit")])
            kept.append(reference)
        if "/Annots" in sheet:
            sheet[NameObject("/Annots")] = kept


def _built(root: Path) -> Path:
    html = root / "_build" / "html"
    if not (html / "index.html").is_file():
        raise ValueError(f"the book is not built ({html} has no index.html); run `make book` first")
    return html


@contextmanager
def _browser() -> Iterator[Any]:
    """A page in the system's Chromium, without access to the network."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "playwright is not installed; run pip install 'labcore[development]'"
        ) from error
    found, asked = doctor.browser(), os.environ.get("CHROMIUM")
    if not found:
        raise RuntimeError(
            f"no Chromium {f'at {asked}' if asked else 'here'}: install it, on Debian with "
            "`apt install chromium`, or set CHROMIUM to its path"
        )
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(FLAGS), headless=True)
        try:
            yield browser.new_context(color_scheme="light", offline=True).new_page()
        finally:
            browser.close()


def _print(page: Any, path: Path) -> tuple[str, bytes]:
    """The title and the PDF of one page of the book."""
    from playwright.sync_api import Error

    if not path.is_file():
        raise RuntimeError(f"{path} is missing but in _toc.yml; run `make book` again")
    wrong: list[str] = []

    def keep(error: object) -> None:
        wrong.append(str(error))

    page.on("pageerror", keep)
    try:
        page.goto(path.as_uri(), timeout=PATIENCE)
        page.add_style_tag(content=PRINT_CSS)
        # Lay the page out for the sheet, so that figures get its width.
        page.emulate_media(media="print", color_scheme="light")
        page.set_viewport_size({"width": 840, "height": 1180})
        page.evaluate("() => dispatchEvent(new Event('beforeprint'))")  # draws all figures
        page.wait_for_function(SETTLED, timeout=PATIENCE)
        title = page.evaluate("() => document.querySelector('h1')?.firstChild?.textContent || ''")
        sheets = page.pdf(**PAPER, footer_template=TITLE)
    except Error as error:
        raise RuntimeError(f"{path.name} cannot be printed: {error.message}") from error
    finally:
        page.remove_listener("pageerror", keep)
    if wrong:
        raise RuntimeError(f"{path.name} cannot be printed: {wrong[0]}")
    return title.strip() or path.stem, sheets


def zipped(root: Path, out: Path) -> list[str]:
    """Packs the books in `_build/html` of root into a zip at out (relative to root).

    Its `index.html` works offline. The same pages give the same bytes. Raises ValueError if the
    book is not built or if a page would load something from elsewhere.
    """
    html = _built(root)
    if outside := strangers(html):
        raise ValueError(
            f"the book would not work offline: {len(outside)} references leave the book, such as "
            f"{outside[0]}"
        )
    target = root / out
    target.parent.mkdir(parents=True, exist_ok=True)
    names = sorted(path.relative_to(html).as_posix() for path in html.rglob("*") if path.is_file())
    offered = _offered(html)
    kept = [
        name
        for name in names
        if not name.startswith(LEFT_OUT) and (not name.startswith(SOURCES) or name in offered)
    ]
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in kept:
            entry = zipfile.ZipInfo(f"{target.stem}/{name}", EARLIEST)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (html / name).read_bytes())
    target.write_bytes(whole.getvalue())
    return [f"{target}: {len(kept)} files, {target.stat().st_size / 1e6:.1f} MB"]


class _Reader(HTMLParser):
    """What a page loads without a click, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects the addresses in a tag."""
        values = dict(attrs)
        named = tag == "link" and set((values.get("rel") or "").split()) & LINK_ONLY
        address = values.get(LOADING.get(tag, "")) or ""
        (self.links if named else self.loads).append(address)
        if tag == "a":
            self.links.append(values.get("href") or "")


def _read(page: Path) -> _Reader:
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def _offered(html: Path) -> set[str]:
    """The files under _sources that a page links to for download."""
    found = set()
    for page in html.rglob("*.html"):
        for link in _read(page).links:
            if SOURCES in link:
                target = (page.parent / unquote(urlsplit(link).path)).resolve()
                if target.is_relative_to(html.resolve()):
                    found.add(target.relative_to(html.resolve()).as_posix())
    return found


def strangers(folder: Path) -> list[str]:
    """ "file: address" of each script, style and picture that a page would load from elsewhere."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            addresses = _read(path).loads
        elif path.suffix == ".css":
            text = path.read_text(encoding="utf-8")
            addresses = [a or b for a, b in CSS_URL.findall(text)]
        else:
            continue
        where = path.relative_to(folder).as_posix()
        found += [f"{where}: {address}" for address in addresses if LEAVES.match(address)]
    return found
