"""Each gate over the book is shown a small failure, and finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labcore.labs.first_cell import first_cell
from tests.book import html_checks, outputs, source_checks
from tests.book.mini import METADATA

pytestmark = pytest.mark.long

HEAD = '<html lang="en"><head><title>t</title>{head}</head><body>{body}</body></html>'


def site(folder: Path, head: str = "", body: str = "") -> Path:
    (folder / "book").mkdir(parents=True)
    (folder / "book" / "a.html").write_text(HEAD.format(head=head, body=body))
    (folder / "book" / "b.html").write_text(HEAD.format(head="", body='<h1 id="here">b</h1>'))
    return folder


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        ("b.html#here", None),
        ("b.html#h%65re", None),
        ("b.html#gone", "no such anchor"),
        ("#gone", "no such anchor"),
        ("../book/c.html", "no such file"),
        ("https://example.org/x#y", None),
    ],
)
def test_dead_links(tmp_path: Path, link: str, sentence: str | None) -> None:
    found = html_checks.dead_links(site(tmp_path, body=f'<a href="{link}">x</a>'))
    assert len(found) == (sentence is not None)
    assert all(sentence in line for line in found)


def test_a_missing_picture_is_a_dead_link(tmp_path: Path) -> None:
    found = html_checks.dead_links(site(tmp_path, body='<img src="x.png" alt="">'))
    assert found == ["book/a.html: x.png: no such file"]


@pytest.mark.parametrize(
    ("link", "fine"),
    [
        ("https://doi.org/10.1/2", True),
        ("mailto:a@b.org", True),
        ("https://nohost", False),
        ("htps://example.org", False),
        ("https://example.org/a b", False),
        ("mailto:nobody", False),
    ],
)
def test_malformed_links(tmp_path: Path, link: str, fine: bool) -> None:
    found = html_checks.malformed_links(site(tmp_path, body=f'<a href="{link}">x</a>'))
    assert found == ([] if fine else [f"book/a.html: {link}"])


@pytest.mark.parametrize(
    "head",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        '<script src="//cdn.example.org/x.js"></script>',
        '<link rel="stylesheet" href="http://example.org/x.css">',
        '<img src="https://example.org/x.png">',
        '<style>@import "https://example.org/x.css";</style>',
        '<p style="background: url(https://example.org/x.png)">',
    ],
)
def test_outside_resources(tmp_path: Path, head: str) -> None:
    assert len(html_checks.outside_resources(site(tmp_path, head=head))) == 1


def test_style_sheets_have_outside_resources_and_links_are_none(tmp_path: Path) -> None:
    canonical = '<link rel="canonical" href="https://example.org/">'
    folder = site(tmp_path, head=canonical, body='<a href="https://example.org">x</a>')
    assert html_checks.outside_resources(folder) == []
    (folder / "font.css").write_text("@font-face { src: url('https://example.org/f.woff2') }")
    assert html_checks.outside_resources(folder) == ["font.css: https://example.org/f.woff2"]


def test_heavy_pages(tmp_path: Path) -> None:
    scripts = ["side.js", "../_static/vendor/plotly.min.js"]
    head = "".join(f'<script src="{name}"></script>' for name in scripts)
    folder = site(tmp_path, head=head)
    for name in scripts:
        path = folder / "book" / name
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        path.resolve().write_text("x" * 1_400_000)
    assert html_checks.heavy_pages(folder) == []
    (folder / "book" / "side.js").write_text("x" * 1_500_000)
    (folder / "book" / "b.html").write_text("x" * 300_001)
    first, second = html_checks.heavy_pages(folder)
    assert first.startswith("book/a.html: 1,500,") and "with sidecars" in first
    assert second == "book/b.html: 300,001 bytes of HTML, at most 300,000"


def test_what_every_page_loads_is_not_one_pages_weight(tmp_path: Path) -> None:
    folder = site(tmp_path)
    (folder / "all.js").write_text("x" * 2_000_000)
    text = HEAD.format(head='<script src="../all.js?v=1"></script>', body="")
    for name in ("a", "b"):
        (folder / "book" / f"{name}.html").write_text(text)
    assert html_checks.heavy_pages(folder) == []


def test_plain_faults(tmp_path: Path) -> None:
    folder = site(tmp_path, body='<p id="x"></p><p id="x"></p>')
    (folder / "bare.html").write_text("<html><body></body></html>")
    assert html_checks.plain_faults(folder) == [
        "bare.html: no language",
        "bare.html: no title",
        "book/a.html: id x twice",
    ]


HIDDEN = {"tags": ["hide-input"], "jupyter": {"source_hidden": True}}


def code_cell(source: str, **more: Any) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": "new",
        "source": source,
        "outputs": [],
        "execution_count": None,
        **more,
    }


def chapter(**changes: Any) -> dict[str, Any]:
    """A notebook that passes, with changes to it: cells appended, metadata replaced."""
    code = [
        first_cell(""),
        'p = predict("?")\np.reveal(1)\nq = predict("?", unit="B")',
        "ui.explore(f, alt='x')",
        "quiz([])",
    ]
    cells = [{"cell_type": "markdown", "id": "t", "source": "# Title\n\n" + "word " * 2000}]
    cells += [code_cell(text, id=f"c{n}", metadata=HIDDEN) for n, text in enumerate(code)]
    metadata = {
        "kernelspec": {"name": "python3", "language": "python"},
        "labcore": {"slug": "c", **METADATA},
    }
    without = changes.pop("without", ())
    cells = [cell for cell in cells if cell["source"] not in without]
    cells += changes.pop("cells", [])
    return {"cells": cells, "metadata": {**metadata, **changes}}


CHECKED = "# NBVAL_CHECK_OUTPUT\n1"
OUTPUT = [{"output_type": "stream", "name": "stdout", "text": "1"}]


@pytest.mark.parametrize(
    ("notebook", "sentence"),
    [
        (chapter(), None),
        (chapter(cells=[code_cell(CHECKED, outputs=OUTPUT, execution_count=1)]), None),
        (chapter(cells=[code_cell(CHECKED, outputs=OUTPUT)]), "no execution count"),
        (chapter(cells=[code_cell("1", outputs=OUTPUT)]), "has outputs"),
        (chapter(cells=[code_cell("1", execution_count=3)]), "execution count"),
        (chapter(cells=[code_cell(CHECKED)]), "no output to compare"),
        (chapter(cells=[code_cell("x\n" * 20)]), "21 lines, at most 20"),
        (
            chapter(cells=[code_cell("quiz([Question('?', ('a', 'b'), 0, 'why')])")]),
            "calls Question, quiz, which a page folds",
        ),
        (chapter(cells=[code_cell("Question()", metadata=HIDDEN)]), None),
        (chapter(cells=[code_cell("lion._chunk()")]), "private name _chunk"),
        (chapter(cells=[code_cell("from labcore.ui import _draw")]), "private name _draw"),
        (chapter(cells=[code_cell("import pandas.io")]), "imports pandas.io"),
        (chapter(cells=[code_cell("import os.path\nx.__name__")]), None),
        (
            chapter(cells=[code_cell("1", metadata={"tags": ["skip-execution"]})]),
            "hides its errors",
        ),
        (chapter(cells=[code_cell("1", id="")]), "has no id"),
        (chapter(cells=[code_cell("1", id="c1")]), "share an id"),
        (
            chapter(cells=[{"cell_type": "markdown", "id": "n", "source": "w " * 2001}]),
            "4002 words",
        ),
        (
            chapter(
                cells=[{"cell_type": "markdown", "id": "n", "source": "```yaml\na: b: c\n```"}]
            ),
            "YAML doesn't parse",
        ),
        (chapter(kernelspec={"name": "python3"}), "kernelspec.language"),
        (chapter(labcore={}), "metadata.labcore is incomplete"),
        (chapter(without=("quiz([])",)), "0 calls of quiz()"),
        (chapter(without=("ui.explore(f, alt='x')",)), "0 calls of explore()"),
        (chapter(without=(first_cell(""),)), "first code cell"),
    ],
)
def test_chapter_problems(tmp_path: Path, notebook: dict[str, Any], sentence: str | None) -> None:
    path = tmp_path / "c.ipynb"
    path.write_text(json.dumps(notebook))
    found = source_checks.chapter_problems(path)
    assert len(found) == (sentence is not None), found
    assert all(sentence in line for line in found)


def test_changed_outputs(tmp_path: Path) -> None:
    kept, ran = tmp_path / "kept.ipynb", tmp_path / "ran.ipynb"
    text = {"output_type": "stream", "name": "stdout", "text": ["old\n"]}
    marked = code_cell("# NBVAL_CHECK_OUTPUT\nprint('old')", outputs=[text])
    free = code_cell("print('any')", id="free")
    kept.write_text(json.dumps({"cells": [marked, free]}))
    other = {**free, "outputs": [{**text, "text": "any"}]}
    ran.write_text(
        json.dumps({"cells": [{**marked, "outputs": [{**text, "text": "old\n"}]}, other]})
    )
    assert outputs.changed_outputs(kept, ran) == []
    ran.write_text(
        json.dumps({"cells": [{**marked, "outputs": [{**text, "text": "new\n"}]}, other]})
    )
    (wrong,) = outputs.changed_outputs(kept, ran)
    assert "printed 'new\\n', kept is 'old\\n'" in wrong


def test_words_are_prose_only() -> None:
    text = "One $x + y$ two.\n\n```{note}\n:class: tip\nthree\n```\n\n$$\na b c\n$$\n<b>four</b>"
    assert source_checks.words(text) == 4


ENTRY = "@article{good, title={T}, author={A, B}, year={2020}, doi={10.1000/x}}"


@pytest.mark.parametrize(
    ("text", "bibliography", "sentence"),
    [
        ("{cite}`good`", ENTRY, None),
        ("{cite:t}`good, bad`", ENTRY, "cites bad, which references.bib lacks"),
        ("{cite}`good`", ENTRY.replace("10.1000/x", "see web"), "neither a DOI nor an arXiv id"),
        ("{cite}`good`", ENTRY.replace("doi={10.1000/x}", "eprint={2302.06675}"), None),
    ],
)
def test_citation_problems(
    tmp_path: Path, text: str, bibliography: str, sentence: str | None
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    found = source_checks.citation_problems([page], bibliography)
    assert len(found) == (sentence is not None), found
    assert all(sentence in line for line in found)


def test_download_problems(tmp_path: Path) -> None:
    root, html = (
        tmp_path / "root",
        site(tmp_path / "html", body='<a href="../_sources/book/a.ipynb">'),
    )
    (root / "book").mkdir(parents=True)
    source = root / "book" / "a.ipynb"
    source.write_text(json.dumps(chapter()))
    assert html_checks.download_problems(html, [source], root) == ["book/a.ipynb: no download"]
    copy = html / "_sources" / "book" / "a.ipynb"
    copy.parent.mkdir(parents=True)
    copy.write_text(json.dumps(chapter()))
    assert html_checks.download_problems(html, [source], root) == []
    copy.write_text(json.dumps(chapter(cells=[code_cell("1", outputs=OUTPUT)])))
    assert html_checks.download_problems(html, [source], root) == [
        "book/a.ipynb: its download has outputs"
    ]
