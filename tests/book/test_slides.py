"""Decks made from small chapters: what stands on a slide, what goes into the notes."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labcore.book import runs, slides
from labcore.book.slide_outline import FEWEST, LINES, ROOM, SLACK, outline
from labcore.ui import Slider, explore, verdicts
from tests.book import html_checks

pytestmark = pytest.mark.long


def no_figure(_data: dict[str, Any]) -> tuple[str, int]:
    return "<div class='labcore-twin'></div>", 420


def chapter(*cells: Any) -> dict[str, Any]:
    """A notebook: a text is a Markdown cell, a list the outputs of a code cell."""
    made = [
        nbformat.v4.new_markdown_cell(cell)
        if isinstance(cell, str)
        else nbformat.v4.new_code_cell("secret = 1", outputs=cell)
        for cell in cells
    ]
    return nbformat.v4.new_notebook(cells=made)


def printed(text: str) -> list[Any]:
    return [nbformat.v4.new_output("stream", name="stdout", text=text)]


def shown(**data: Any) -> list[Any]:
    return [nbformat.v4.new_output("display_data", data)]


def html_of(markup: str) -> list[Any]:
    return [nbformat.v4.new_output("display_data", {"text/html": markup})]


FIGURE = [nbformat.v4.new_output("display_data", {"application/vnd.plotly.v1+json": {}})]


def made(*cells: Any) -> list[Any]:
    return outline(chapter(*cells), figure=no_figure, plain=lambda text: text)


def test_headings_begin_slides_and_sections_begin_columns() -> None:
    found = made("# A\n\none\n\n## B #1\n\ntwo\n\n### C\n\nthree", "## D\n\nfour")
    assert [(s.title, s.part, s.text) for s in found] == [
        ("A", True, "one"),
        ("B #1", True, "two"),
        ("C", False, "three"),
        ("D", True, "four"),
    ]


def test_a_number_sign_in_code_is_no_heading() -> None:
    found = made("# A\n\n```python\n# not one\n\nx = 1\n```")
    assert len(found) == 1 and "# not one" in found[0].text


def test_first_paragraph_is_shown_and_no_prose_is_lost() -> None:
    long = "A first sentence with $x. Y$ in it. " + "Another one follows here. " * 40
    found = made(f"# A\n\n{long}\n\nThe rest.", "## B\n\nshort", "later text")
    first, second = found
    assert first.text.startswith("A first sentence with $x. Y$ in it. Another")
    assert len(first.text) <= 480 and first.text.endswith(".")
    assert first.notes == [long.strip(), "The rest."]
    assert (second.text, second.notes) == ("short", ["later text"])


def test_a_sentence_without_end_is_kept_whole() -> None:
    endless = "word " * 200 + "end."
    assert made(f"# A\n\n{endless}")[0].text == endless


def test_a_formula_stands_with_the_paragraph_that_leads_to_it() -> None:
    found = made("# A\n\nfirst", FIGURE, "Then this:\n\n$$\na\n\nb\n$$\n\nand so on")
    assert found[0].text == "first"
    assert found[1].text == "Then this:\n\n$$\na\n\nb\n$$"
    assert found[1].title == "A" and not found[1].part
    assert "and so on" in found[1].notes


def test_long_output_is_cut_at_lines_that_are_not_indented() -> None:
    lines = [f"{'' if n % 7 == 0 else '    '}line {n} <b>" for n in range(70)]
    found = made("# A\n\nhead", printed("\n".join(lines) + "\n"))
    whole = [re.findall(r"line \d+", slide.markup) for slide in found]
    assert [line for part in whole for line in part] == [f"line {n}" for n in range(70)]
    assert max(map(len, whole)) <= LINES and all(slide.height <= ROOM + SLACK for slide in found)
    assert all(int(part[0].split()[1]) % 7 == 0 for part in whole if part)
    assert "<b>" not in "".join(slide.markup for slide in found)


def test_a_guess_and_its_measurement_are_never_on_one_slide() -> None:
    asks = html_of('<div class="labcore-html labcore-predict">How many?</div>')
    found = made("# A\n\nhead", asks, printed("it is 42\n"))
    assert "How many?" in found[0].markup and "42" not in found[0].markup
    assert "42" in found[1].markup


def test_long_code_and_tables_continue_on_another_slide() -> None:
    code = "\n".join(f'<span class="n">line{n}</span>' for n in range(50))
    source = '<figure class="labcore-source"><figcaption>f</figcaption><div><pre>'
    found = made("# A\n\nhead", html_of(f"{source}{code}</pre></div></figure>\n"))
    texts = [slide.markup for slide in found if slide.markup]
    assert len(texts) == 3
    assert all(t.count("<pre>") == t.count("</pre>") == t.count("<figcaption>") == 1 for t in texts)
    assert re.findall(r"line\d+", "".join(texts)) == [f"line{n}" for n in range(50)]
    rows = "".join(f"<tr><td>{n}</td></tr>" for n in range(40))
    table = f"<table><thead><tr><th>n</th></tr></thead><tbody>{rows}</tbody></table>"
    found = made("# A\n\nhead", html_of(f'<div class="labcore-table">{table}</div>'))
    texts = [slide.markup for slide in found if slide.markup]
    assert len(texts) >= 3 and all(t.count("<thead>") == 1 for t in texts)
    assert re.findall(r"<td>(\d+)", "".join(texts)) == [str(n) for n in range(40)]
    wide = "\n".join(f"| {n} | {'long text ' * 12} |" for n in range(20))
    found = made(f"# A\n\nhead\n\n| a | b |\n|---|---|\n{wide}")
    tables = [slide.text for slide in found if "|---|" in slide.text]
    assert len(tables) >= 2 and sum(t.count("long text long") // 6 for t in tables) == 20


def test_code_is_cut_between_statements_and_leaves_no_short_rest() -> None:
    arguments = ",\n".join(f"    argument_{n}: int = {n} > 0" for n in range(14))
    body = "\n".join(
        f"    if argument_{n}:\n        x = [\n            {n},\n        ]" for n in range(5)
    )
    last = "@decorated\ndef last():\n    x = 1\n    return x"
    code = f"def long(\n{arguments},\n) -> None:\n{body}\n\n\n{last}"
    source = '<figure class="labcore-source"><figcaption>f</figcaption><div><pre>'
    marked = "\n".join(f"<span>{html.escape(line)}</span>" for line in code.split("\n"))
    found = made("# A\n\nhead", html_of(f"{source}{marked}</pre></div></figure>\n"))
    parts = [re.sub(r"<[^>]+>", "", s.markup.split("<pre>")[1]) for s in found if s.markup]
    begins = [part.lstrip("\n").split("\n")[0].strip() for part in parts]
    assert len(parts) > 1 and begins[0] == "def long("
    assert all(line.startswith(("if argument", "@decorated")) for line in begins[1:])
    assert min(part.strip().count("\n") + 1 for part in parts) >= FEWEST


def test_rows_are_spread_and_a_short_rest_joins_the_slide_above() -> None:
    rows = "".join(f"<tr><td>{n}</td></tr>" for n in range(17))
    table = f"<table><thead><tr><th>n</th></tr></thead><tbody>{rows}</tbody></table>"
    found = made("# A\n\nhead", html_of(f'<div class="labcore-table">{table}</div>'))
    counts = [slide.markup.count("<td>") for slide in found if slide.markup]
    assert sum(counts) == 17 and min(counts) >= 6
    figure = made("# A\n\nhead", FIGURE, printed("\n".join("abc") + "\n"), "```\nlast\n```")
    assert len(figure) == 1 and "last" in figure[0].markup


def test_an_empty_section_lists_what_comes() -> None:
    found = made(
        "# A\n\nx\n\n## Where it breaks\n\n### Drift\n\ny\n\n### 停顿\n\nz\n\n## Next\n\nw"
    )
    assert found[1].text == "- Drift\n- 停顿"


def test_set_up_is_not_shown_and_a_fault_is_not_passed_over() -> None:
    notebook = chapter("# A\n\nx", printed("torch 2, 2 cores\n"))
    notebook["cells"][1]["metadata"]["tags"] = ["hide-input"]
    found = outline(notebook, figure=no_figure, plain=str)
    assert found[0].markup == ""
    wrong = [nbformat.v4.new_output("error", ename="KeyError", evalue="'x'", traceback=[])]
    with pytest.raises(ValueError, match="a cell ended with KeyError: 'x'"):
        made("# A\n\nx", wrong)
    with pytest.raises(ValueError, match="begin with a title"):
        made(printed("1\n"))


def test_roles_are_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "references.bib").write_text(
        "@article{one, author={Chen, X. and Liang, C.}, year={2023}, title={T}}\n"
        "@article{many, author={A, B and C, D and E, F}, year={2020}, title={T}}\n",
        encoding="utf-8",
    )
    (tmp_path / "notation.md").write_text("# Notation of 课程\n", encoding="utf-8")
    text = (
        "{cite:t}`one`, {cite}`one, many`, {doc}`notation`, {doc}`the lab <../x/y>`, {cite}`lost`, "
        "{doc}`gone`, {term}`z-loss`, {term}`ranks <rank>`"
    )
    assert slides._without_roles(text, tmp_path / "c.ipynb") == (
        "Chen and Liang (2023), (Chen and Liang, 2023; A et al., 2020), Notation of 课程, the lab, "
        "(lost, n.d.), gone, z-loss, ranks"
    )


def course(root: Path, code: str = "print(40 + 2)") -> Path:
    """A course with one chapter, in a folder whose name has a space and a Chinese word."""
    root.mkdir(parents=True)
    (root / "book").mkdir()
    cells = [
        nbformat.v4.new_markdown_cell("# Small & short\n\nText with $x^2$ and </script>."),
        nbformat.v4.new_code_cell(code),
    ]
    book = nbformat.v4.new_notebook(cells=cells)
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "P", "language": "python"}
    nbformat.write(book, root / "book" / "small.ipynb")
    toc = "format: jb-book\nroot: book/index\nparts:\n- caption: One\n  chapters:\n"
    (root / "_toc.yml").write_text(f"{toc}  - file: book/small\n", encoding="utf-8")
    return root


def test_a_deck_is_written_whole_and_the_same_twice(tmp_path: Path) -> None:
    root = course(tmp_path / "a course 课")
    (line,) = slides.write(root, [], Path("_build/slides"))
    folder = root / "_build" / "slides"
    page = folder / "small.html"
    assert str(page) in line and "1 slides" in line
    text = page.read_text(encoding="utf-8")
    assert "<pre" in text and "42" in text and "print(40" not in text
    assert "<title>Small &amp; short</title>" in text
    assert html_checks.outside_resources(folder) == [] and html_checks.dead_links(folder) == []
    assert "Hakim El Hattab" in (folder / "assets" / "LICENSE.reveal.txt").read_text()
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < slides.MOST_BYTES
    slides.write(root, ["small"], Path("_build/slides"))
    assert page.read_text(encoding="utf-8") == text


def test_what_cannot_be_made_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = course(tmp_path / "c", "{}['key']")
    with pytest.raises(ValueError, match="lyon.*small"):
        slides.write(root, ["lyon"], tmp_path)
    with pytest.raises(RuntimeError, match="small: a cell ended with KeyError: 'key'"):
        slides.write(root, ["small"], tmp_path / "out")
    assert not (tmp_path / "out" / "small.html").exists()
    with pytest.raises(ValueError, match="_toc.yml is missing"):
        slides.write(tmp_path / "nowhere", [], tmp_path)
    monkeypatch.setattr(slides, "MOST_BYTES", 1000)
    monkeypatch.setattr(slides, "executed", lambda *_: chapter("# A\n\nx"))
    with pytest.raises(RuntimeError, match="small: the deck takes [0-9,]+ bytes .* 1,000"):
        slides.write(root, ["small"], tmp_path / "out")


def test_the_books_cache_is_used_only_while_nothing_changed(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    root = course(tmp_path / "c", "import time\n\nprint(time.time_ns())")
    path = root / "book" / "small.ipynb"
    folder = root / "_build" / ".jupyter_cache"
    ran = NotebookClient(nbformat.read(path, as_version=4), record_timing=False).execute()
    nbformat.write(ran, tmp_path / "ran.ipynb")
    with runs.open_cache(folder) as cache:
        cache.cache_notebook_file(tmp_path / "ran.ipynb", path, check_validity=False)
    kept = ran.cells[1]["outputs"][0]["text"]

    def told() -> str:
        return str(slides.executed(root, path)["cells"][1]["outputs"][0]["text"])

    assert told() != kept  # no word of what it was made from
    memory = folder / "labcore.json"
    memory.write_text(json.dumps({"book/small": {"key": runs.run_key(path)}}), encoding="utf-8")
    assert told() == kept
    assert slides.executed(root, path)["cells"][0]["source"].startswith("# Small")
    memory.write_text(json.dumps({"book/small": {"key": "another"}}), encoding="utf-8")
    assert told() != kept
    memory.write_text("{", encoding="utf-8")
    assert told() != kept


def test_a_figure_lives_in_the_deck(monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.graph_objects as go

    monkeypatch.setenv("LABCORE_BOOK", "1")

    def line(height: float = 1.0) -> go.Figure:
        return go.Figure(go.Scatter(x=[0, 1], y=[0, height])).update_layout(title="A line")

    slider = Slider(low=1.0, high=5.0, default=2.0, step=1.0, label="高 height")
    bundle = explore(line, alt="A </script> line", height=slider)._repr_mimebundle_()
    made = slides.deck(chapter("# A\n\nx", shown(**bundle), shown(**bundle)), Path("a.ipynb"))
    assert made.page.count('class="labcore-twin"') == 2
    assert len(set(re.findall(r'id="(twin-\d+-\d+)"', made.page))) == 2
    assert "高 height" in made.page and "noscript" not in made.page
    (key,) = set(re.findall(r'data-twin="(\w+)"', made.page))
    assert made.frames.count(f'["{key}"]=') == 1


def test_each_claim_has_a_slide_of_its_own() -> None:
    found = verdicts("clipping")
    made = slides.deck(chapter("# A\n\nx", shown(**found._repr_mimebundle_())), Path("a.ipynb"))
    pages = made.page.split("<section>")
    assert [page.count('class="labcore-claim ') for page in pages if "labcore-claim " in page] == (
        [1] * len(found.claims)
    )
    assert (
        "<section" not in found._repr_mimebundle_()["text/html"]
    )  # reveal.js makes slides of them
