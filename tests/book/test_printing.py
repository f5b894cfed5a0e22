"""The book as one PDF and as one zip, made from sites of two pages."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from labcore.book import printing
from labcore.course import doctor
from tests.book import html_checks

pytestmark = pytest.mark.long

TOC = """format: jb-book
root: book/index
parts:
- caption: 第一 part
  chapters:
  - file: book/one
    sections:
    - file: labs/one
"""
PAGE = """<!DOCTYPE html><html lang="en"><head><title>{title}</title>
<link rel="canonical" href="https://example.org/{title}">{head}</head>
<body><nav class="bd-sidebar-primary">SIDEBAR</nav><article>
<h1>{title}<a class="headerlink">#</a></h1><p>Words of {title}.</p>{body}</article></body></html>"""
TITLES = {"book/index": "Start", "book/one": "One & only", "labs/one": "Lab of Łódź"}


def site(folder: Path, *, head: str = "", body: str = "") -> Path:
    """A built book of three pages, in a folder whose name has a space and a Chinese word."""
    root = folder / "a course 课"
    html = root / "_build" / "html"
    for name, title in TITLES.items():
        path = html / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE.format(title=title, head=head, body=body), encoding="utf-8")
    (root / "_toc.yml").write_text(TOC, encoding="utf-8")
    (html / "index.html").write_text('<a href="book/index.html">open</a>', encoding="utf-8")
    (html / "_static").mkdir()
    (html / "_static" / "a b.css").write_text("p { color: red }", encoding="utf-8")
    return root


def sheets(count: int, text: str = "") -> bytes:
    writer = PdfWriter()
    for _ in range(count):
        writer.add_blank_page(200, 300)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def titles(outline: list[object]) -> list[object]:
    """The outline as nested lists of titles."""
    return [titles(item) if isinstance(item, list) else item.title for item in outline]  # type: ignore[attr-defined]


def page(title: str, part: str, depth: int, count: int) -> printing.Printed:
    return printing.Printed(f"file:///x/{title}.html", title, part, depth, sheets(count))


def test_the_outline_has_parts_chapters_and_what_is_below() -> None:
    pages = [
        page("Start", "", 0, 1),
        page("A", "Part 1", 0, 2),
        page("A1", "Part 1", 1, 1),
        page("B", "第二", 0, 3),
    ]
    found = PdfReader(io.BytesIO(printing.merged(pages, sheets(7))))
    assert len(found.pages) == 7
    assert titles(found.outline) == ["Start", "Part 1", ["A", ["A1"]], "第二", ["B"]]
    flat = [found.outline[0], found.outline[2][0], found.outline[2][1][0], found.outline[4][0]]  # type: ignore[index]
    assert [found.get_destination_page_number(item) for item in flat] == [0, 1, 3, 4]  # type: ignore[arg-type]


def test_a_page_on_no_sheet_is_refused() -> None:
    with pytest.raises(ValueError, match="'B'.*no sheets"):
        printing.merged([page("A", "", 0, 1), page("B", "", 0, 0)], sheets(1))


needs_chromium = pytest.mark.skipif(not doctor.browser(), reason="no Chromium here")


@needs_chromium
def test_a_site_becomes_one_pdf(tmp_path: Path) -> None:
    links = (
        '<p><a href="../labs/one.html#there">lab</a> <a href="../_static/a%20b.css">other</a>'
        ' <a href="https://example.org/far">far</a></p><p style="break-before: page">second</p>'
    )
    root = site(tmp_path, body=links)
    (line,) = printing.pdf(root, Path("_build/course.pdf"))
    target = root / "_build" / "course.pdf"
    assert line.startswith(f"{target}: 3 pages of the book on 6 sheets")
    found = PdfReader(target)
    assert titles(found.outline) == ["Start", "第一 part", ["One & only", ["Lab of Łódź"]]]
    texts = [sheet.extract_text() for sheet in found.pages]
    assert "Words of Start." in texts[0] and "Words of Lab of Łódź." in texts[4]
    assert not any("SIDEBAR" in text for text in texts)
    for number, text in enumerate(texts, 1):  # at the foot of each sheet, through the whole book
        assert str(number) in text.split()
    assert b"file:" not in b"".join(
        str(note.get_object()).encode()
        for sheet in found.pages
        for note in sheet.get("/Annots", [])
    )
    kinds = [note.get_object() for note in found.pages[0]["/Annots"]]  # type: ignore[attr-defined]
    assert [str(kind.get("/A", {}).get("/URI", "")) for kind in kinds].count(
        "https://example.org/far"
    ) == 1
    there = [kind["/Dest"][0] for kind in kinds if "/Dest" in kind]
    assert there == [found.pages[4].indirect_reference]


@needs_chromium
@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("<script>throw new Error('broken figure')</script>", "broken figure"),
        (
            "<script>document.write('<div class=twin-plot>')</script>",
            "cannot be printed: .*Timeout 1500ms",
        ),
    ],
)
def test_a_page_that_fails_stops_the_pdf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, sentence: str
) -> None:
    if "Timeout" in sentence:
        monkeypatch.setattr(printing, "PATIENCE", 1500)
    root = site(tmp_path, head=head)
    (root / "course.pdf").write_text("the old one")
    with pytest.raises(RuntimeError, match=sentence):
        printing.pdf(root, Path("course.pdf"))
    assert (root / "course.pdf").read_text() == "the old one"


@needs_chromium
def test_a_page_of_the_toc_that_was_not_built_is_named(tmp_path: Path) -> None:
    root = site(tmp_path)
    (root / "_build" / "html" / "labs" / "one.html").unlink()
    with pytest.raises(RuntimeError, match=r"labs/one.html is missing but in _toc.yml"):
        printing.pdf(root, Path("course.pdf"))


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (printing.pdf, printing.zipped):
        with pytest.raises(ValueError, match="the book is not built.*run `make book` first"):
            make(tmp_path, Path("out"))
    root = site(tmp_path)
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="no Chromium at .*nowhere: install it"):
        printing.pdf(root, Path("out.pdf"))
    monkeypatch.delenv("CHROMIUM")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no Chromium here: install it.*set CHROMIUM"):
        printing.pdf(root, Path("out.pdf"))


def test_the_zip_holds_the_pages_and_has_the_same_bytes_twice(tmp_path: Path) -> None:
    body = '<a href="../_sources/book/one.ipynb">Download</a>'
    root = site(tmp_path, body=body, head='<link rel="stylesheet" href="../_static/a%20b.css">')
    html = root / "_build" / "html"
    for name in ("_sources/book/one.ipynb", "_sources/book/lost.md", "objects.inv", ".buildinfo"):
        (html / name).parent.mkdir(parents=True, exist_ok=True)
        (html / name).write_text("{}", encoding="utf-8")
    (line,) = printing.zipped(root, Path("_build/my course.zip"))
    target = root / "_build" / "my course.zip"
    before = target.read_bytes()
    assert line == f"{target}: 6 files, {len(before) / 1e6:.1f} MB"
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == sorted(archive.namelist())
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {name.removeprefix("my course/") for name in archive.namelist()} == {
            "index.html", "_static/a b.css", "_sources/book/one.ipynb",
            *(f"{name}.html" for name in TITLES),
        }  # fmt: skip
        archive.extractall(tmp_path / "out")
    assert html_checks.dead_links(tmp_path / "out" / "my course") == []
    for path in html.rglob("*"):  # built again, later
        if path.is_file():
            path.write_bytes(path.read_bytes())
    printing.zipped(root, Path("_build/my course.zip"))
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("head", "css", "what"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "", "https://cdn.example/x.js"),
        ('<script src="//cdn.example/x.js"></script>', "", "//cdn.example/x.js"),
        ('<img src="/logo.png">', "", "/logo.png"),
        ('<link rel="stylesheet" href="HTTP://a.example/b.css">', "", "HTTP://a.example/b.css"),
        ("", "@import 'https://fonts.example/a';", "https://fonts.example/a"),
        ("", "p { background: url( //b.example/c ) }", "//b.example/c"),
    ],
)
def test_a_book_that_fetches_is_not_packed(tmp_path: Path, head: str, css: str, what: str) -> None:
    root = site(tmp_path, head=head)
    (root / "_build" / "html" / "_static" / "a b.css").write_text(css, encoding="utf-8")
    with pytest.raises(ValueError, match="leave the book") as refused:
        printing.zipped(root, Path("course.zip"))
    assert what in str(refused.value)
    assert not (root / "course.zip").exists()


def test_the_real_book_is_packed(book_html: Path, tmp_path: Path) -> None:
    (tmp_path / "_build").mkdir()
    (tmp_path / "_build" / "html").symlink_to(book_html)
    (line,) = printing.zipped(tmp_path, Path("course.zip"))
    assert line.endswith("MB")
    with zipfile.ZipFile(tmp_path / "course.zip") as archive:
        archive.extractall(tmp_path / "out")
    assert html_checks.dead_links(tmp_path / "out" / "course") == []
    assert html_checks.outside_resources(tmp_path / "out" / "course") == []
