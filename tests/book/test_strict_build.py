"""The real book, built strictly from a cold cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml

from labcore.labs import releases
from labcore.labs.source import read_lab
from tests.book import html_checks, outputs, source_checks
from tests.book_fixtures import ROOT, Build, executed
from tests.labs import lab_checks

pytestmark = pytest.mark.long

BOOK = ROOT / "book"
CHAPTERS = sorted(BOOK.glob("*.ipynb"))
LABS = {slug: releases.release_path(ROOT, slug) for slug in releases.source_paths(ROOT)}
SOURCES = [*sorted(BOOK.rglob("*.md")), *CHAPTERS, *LABS.values()]
GUIDE = BOOK / "teaching"


def toc_files(book: Path = ROOT) -> list[str]:
    def walk(part: object) -> list[str]:
        if isinstance(part, dict):
            own = [part["file"]] if "file" in part else []
            return own + [name for value in part.values() for name in walk(value)]
        return [name for item in part for name in walk(item)] if isinstance(part, list) else []

    toc = yaml.safe_load((book / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *walk(toc)]


def test_the_tables_of_contents_hold_every_page() -> None:
    names = [ROOT / name for name in toc_files()] + [GUIDE / name for name in toc_files(GUIDE)]
    assert sorted(names) == sorted(path.with_suffix("") for path in SOURCES)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_the_form_of_one(chapter: Path) -> None:
    assert source_checks.chapter_problems(chapter) == []


def test_every_citation_resolves_and_every_entry_can_be_found() -> None:
    bibliography = (BOOK / "references.bib").read_text(encoding="utf-8")
    assert source_checks.citation_problems(SOURCES, bibliography) == []


class TestPages:
    def test_the_build_is_clean(self, strict_build: Build) -> None:
        assert strict_build.status == 0, strict_build.log[-6000:]
        assert "build succeeded" in strict_build.log

    @pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
    def test_marked_cells_print_what_is_kept(
        self, strict_build: Build, chapter: Path, tmp_path: Path
    ) -> None:
        ran = tmp_path / chapter.name
        nbformat.write(executed(strict_build.html, chapter), ran)
        assert outputs.changed_outputs(chapter, ran) == []

    @pytest.mark.parametrize("book", [ROOT, GUIDE], ids=["book", "guide"])
    def test_every_page_is_there_and_is_searched(self, book_html: Path, book: Path) -> None:
        html = book_html if book == ROOT else book_html / "teaching"
        names = {p.relative_to(html).with_suffix("").as_posix() for p in html_checks.pages(html)}
        assert names == {*toc_files(book), "index", "search"}
        index = (html / "searchindex.js").read_text(encoding="utf-8")
        searched = json.loads(index.removeprefix("Search.setIndex(").rstrip(")"))["docnames"]
        assert sorted(searched) == sorted(toc_files(book))

    @pytest.mark.parametrize("book", ["", "teaching"])
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
    def test_gate(self, book_html: Path, gate: object, book: str) -> None:
        assert gate(book_html / book) == []

    def test_notebooks_can_be_downloaded_without_outputs(self, book_html: Path) -> None:
        notebooks = [*CHAPTERS, *LABS.values()]
        assert html_checks.download_problems(book_html, notebooks, ROOT) == []

    @pytest.mark.parametrize("slug", LABS)
    def test_a_labs_page_is_its_release_and_leads_to_its_chapter(
        self, book_html: Path, slug: str
    ) -> None:
        page = book_html / "labs" / "release" / slug / f"{slug}.html"
        text = page.read_text(encoding="utf-8")
        points = sum(read_lab(releases.source_paths(ROOT)[slug]).points.values())
        assert f"<span>{points:g} points</span>" in text
        assert "raise</span> <span" in text and "NotImplementedError" in text
        assert "This page ran on" not in text
        assert f'data-notebook="labs/release/{slug}/{slug}.ipynb"' in text
        assert f"../../../book/{slug}.html" in html_checks.read(page).links

    @pytest.mark.parametrize("slug", LABS)
    def test_no_solution_and_no_hidden_test_is_published(self, book_html: Path, slug: str) -> None:
        assert lab_checks.published(book_html, read_lab(releases.source_paths(ROOT)[slug])) == []
        assert not (book_html / "labs" / "source").exists()
        assert not (book_html / "_sources" / "labs" / "source").exists()

    def test_each_page_says_what_it_was_made_from(self, book_html: Path) -> None:
        for name in [*toc_files(), "search"]:
            text = (book_html / f"{name}.html").read_text(encoding="utf-8")
            assert "jupyter-book 1." in text and "commit " in text, name
        for chapter in CHAPTERS:
            text = (book_html / "book" / f"{chapter.stem}.html").read_text(encoding="utf-8")
            assert "This page ran on" in text

    def test_each_page_is_there_as_markdown_without_answers(self, book_html: Path) -> None:
        listed = (book_html / "llms.txt").read_text(encoding="utf-8")
        links = re.findall(r"^- \[[^]]+\]\((\S+)\)$", listed, re.MULTILINE)
        assert {f"{name}.md" for name in toc_files()} == set(links)
        for name in links:
            text = (book_html / name).read_text(encoding="utf-8")
            assert text.startswith(("# ", "(", "---")) and "answer=" not in text, name
        lion = (book_html / "book" / "lion.md").read_text(encoding="utf-8")
        assert "sign" in lion and "```python" in lion and "predict(" not in lion

    def test_every_claim_stands_in_the_ledger(self, book_html: Path) -> None:
        from docutils.nodes import make_id

        from labcore import claims

        ids = html_checks.read(book_html / "book" / "claims.html").ids
        missing = [name for name in claims.load() if f"claim-{make_id(name)}" not in ids]
        assert missing == []
