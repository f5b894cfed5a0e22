"""Links between chapters, glossary and references, and what they show, on a book of five pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.book import html_checks
from tests.book.mini import mini_book, notebook
from tests.book_fixtures import build_book
from tests.browser.test_static_book import settle, violations

pytestmark = pytest.mark.long
GLOSSARY = """# Words

```{{glossary}}
batch size
  The rows $B$ of a batch.

rank : {rank}
  One of the processes.
```
"""
SOURCE = """@article{one, author = {Ada Byron}, title = {Notes}, journal = {Memoirs}, year = 1843}
@article{two, author = {Émile Borel}, title = {Uncited}, journal = {Annales}, year = 1909}"""
TEXT = "Batch sizes, one batch size and a rank, by {cite}`one`, {cite}`one`. And $x^2$."


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, built again after the glossary named another chapter for the word "rank"."""
    root = tmp_path_factory.mktemp("linked")
    folder = mini_book(root / "source")
    pages = folder / "book"
    for slug in ("first", "other"):
        notebook(pages / f"{slug}.ipynb", "1", text=TEXT)
    (pages / "words.md").write_text(GLOSSARY.format(rank="first"), encoding="utf-8")
    (pages / "references.bib").write_text(SOURCE, encoding="utf-8")
    (pages / "sources.md").write_text("# Sources\n\n```{bibliography}\n:all:\n```\n")
    names = [f"book/{name}" for name in ("other", "first", "words", "sources")]
    toc = {"format": "jb-book", "root": "book/index", "chapters": [{"file": n} for n in names]}
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
    for slug in ("first", "other"):
        (pages / "words.md").write_text(GLOSSARY.format(rank=slug), encoding="utf-8")
        done = build_book(folder, root / "out")
        assert done.status == 0, done.log
        for name in ("first", "other"):
            text = (done.html / "book" / f"{name}.html").read_text(encoding="utf-8")
            assert ("#term-rank" in text) == (name == slug), (name, slug)
    return done.html


def test_pages_link_there_and_back(site: Path) -> None:
    chapter, words, sources = (
        (site / "book" / f"{name}.html").read_text(encoding="utf-8")
        for name in ("first", "words", "sources")
    )
    assert chapter.count("#term-batch-size") == 1
    assert '#term-batch-size" id="use-batch-size">Batch sizes</a>' in chapter
    back = "(?:first|other)[.]html#[^<]*"
    assert re.findall(back, words) == [
        'other.html#use-batch-size">Chapter other',
        'first.html#use-batch-size">Chapter first',
        'other.html#use-rank">Chapter other',
    ]
    entry = sources[sources.index("Ada Byron") : sources.index("Émile Borel")]
    assert re.findall(back, entry) == [
        'other.html#id1">Chapter other',
        'first.html#id1">Chapter first',
    ]
    assert "Cited in" not in sources[sources.index("Émile Borel") :]
    assert html_checks.dead_links(site) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_link_shows_what_it_leads_to(watch: Any, site: Path, scheme: str) -> None:
    watched = watch(color_scheme=scheme)
    page = watched.page
    page.goto((site / "book" / "other.html").as_uri())
    settle(page)
    term, tip = page.locator("a.labcore-term").first, page.get_by_role("tooltip")
    term.hover()
    assert tip.inner_text().replace("\n", "") in (
        "The rows B of a batch.",
        "The rows 𝐵 of a batch.",
    )
    assert tip.locator("mjx-container").count() == 1
    assert term.get_attribute("aria-describedby") == tip.get_attribute("id")
    tip.hover()
    page.wait_for_timeout(400)  # longer than the page waits for the pointer
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.count() == 0 and term.get_attribute("aria-describedby") is None
    page.locator("article h1").hover()
    cited = page.get_by_role("link", name="1", exact=True).first
    cited.focus()
    assert "Ada Byron. Notes. Memoirs" in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 1200
    page.emulate_media(media="print")
    assert not tip.is_visible()
    page.emulate_media(media="screen")
    cited.evaluate("link => link.blur()")
    assert tip.count() == 0
    watched.calm()
    term.hover()
    assert tip.is_visible() and violations(page) == []  # axe itself logs errors
