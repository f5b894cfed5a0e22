"""The real book, built strictly from a cold cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.book import html_checks, source_checks
from tests.book_fixtures import ROOT, Build

BOOK = ROOT / "book"
CHAPTERS = sorted(BOOK.glob("*.ipynb"))
SOURCES = [*sorted(BOOK.rglob("*.md")), *CHAPTERS]


def toc_files() -> list[str]:
    def walk(part: object) -> list[str]:
        if isinstance(part, dict):
            own = [part["file"]] if "file" in part else []
            return own + [name for value in part.values() for name in walk(value)]
        return [name for item in part for name in walk(item)] if isinstance(part, list) else []

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *walk(toc)]


def test_the_table_of_contents_holds_every_page() -> None:
    names = toc_files()
    assert sorted(names) == sorted(str(p.relative_to(ROOT).with_suffix("")) for p in SOURCES)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_the_form_of_one(chapter: Path) -> None:
    assert source_checks.chapter_problems(chapter) == []


def test_every_citation_resolves_and_every_entry_can_be_found() -> None:
    bibliography = (BOOK / "references.bib").read_text(encoding="utf-8")
    assert source_checks.citation_problems(SOURCES, bibliography) == []


@pytest.mark.book
class TestPages:
    def test_the_build_is_clean(self, strict_build: Build) -> None:
        assert strict_build.status == 0, strict_build.log[-6000:]
        assert "build succeeded" in strict_build.log

    def test_every_page_is_there(self, book_html: Path) -> None:
        names = {
            p.relative_to(book_html).with_suffix("").as_posix()
            for p in html_checks.pages(book_html)
        }
        assert names == {*toc_files(), "index", "search"}

    @pytest.mark.parametrize(
        "gate",
        [
            html_checks.dead_links,
            html_checks.malformed_links,
            html_checks.outside_resources,
            html_checks.heavy_pages,
            html_checks.plain_faults,
        ],
    )
    def test_gate(self, book_html: Path, gate: object) -> None:
        assert gate(book_html) == []

    def test_notebooks_can_be_downloaded_without_outputs(self, book_html: Path) -> None:
        assert html_checks.download_problems(book_html, CHAPTERS, ROOT) == []

    def test_each_page_says_what_it_was_made_from(self, book_html: Path) -> None:
        for name in [*toc_files(), "search"]:
            text = (book_html / f"{name}.html").read_text(encoding="utf-8")
            assert "jupyter-book 1." in text and "commit " in text, name
        for chapter in CHAPTERS:
            text = (book_html / "book" / f"{chapter.stem}.html").read_text(encoding="utf-8")
            assert "This page ran on" in text

    def test_every_claim_stands_in_the_ledger(self, book_html: Path) -> None:
        from docutils.nodes import make_id

        from labcore import claims

        ids = html_checks.read(book_html / "book" / "claims.html").ids
        missing = [name for name in claims.load() if f"claim-{make_id(name)}" not in ids]
        assert missing == []
