"""Decks in Chromium, opened from a folder: nothing is fetched, all fits, figures move."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
import pytest

from labcore.book import slides
from labcore.ui import Choice, Slider, explore
from tests.book_fixtures import ROOT, executed
from tests.browser.conftest import DRAWN, wait_for_another

pytestmark = pytest.mark.long
CHAPTERS = sorted(path.stem for path in (ROOT / "book").glob("*.ipynb"))
STAGE = {"width": 1280, "height": 720}
READY = "() => document.documentElement.dataset.deck === 'ready'"
# Pixels by which the present slide stands over its edges, right and below, and its zoom.
OVER = """() => {
    const slide = deck.getCurrentSlide(), box = slide.querySelector('.fit');
    const seen = [box, ...box.querySelectorAll('*')].filter(e =>
        e.getClientRects().length && !e.closest('mjx-assistive-mml, svg, .twin-plot *'));
    const edges = seen.map(e => e.getBoundingClientRect());
    const right = Math.max(...edges.map(e => e.right)) - 1280;
    return [right, Math.max(...edges.map(e => e.bottom)) - 720, Number(slide.dataset.zoom)];
}"""


def save(notebook: Any, path: Path, out: Path) -> str:
    """Writes one deck; returns its address."""
    made = slides.deck(notebook, path)
    slides.copy_assets(out / "assets")
    (out / f"{path.stem}.html").write_text(made.page, encoding="utf-8")
    (out / "assets" / f"{path.stem}.js").write_text(made.frames, encoding="utf-8")
    return (out / f"{path.stem}.html").as_uri()


def walk(page: Any) -> list[tuple[float, float, float]]:
    """What stands over the edges of each slide."""
    found = []
    for number in range(page.evaluate("() => deck.getTotalSlides()")):
        if number:
            page.evaluate("() => deck.next()")
        page.wait_for_timeout(60)
        found.append(tuple(page.evaluate(OVER)))
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A chapter with mathematics, a moving figure, a wide table, long code and long output."""
    monkeypatch.setenv("LABCORE_BOOK", "1")

    def line(height: float = 1.0, sign: str = "up") -> go.Figure:
        figure = go.Figure(go.Scatter(x=[0, 1, 2], y=[0, height, height**2]))
        figure.update_xaxes(title=sign)
        return figure.update_layout(title=f"Height {height} </script>", yaxis_range=[0, 30])

    slider = Slider(low=1.0, high=5.0, default=2.0, step=1.0, label="高 height")
    choice = Choice(options=("up", "down"), default="up", label="sign")
    bundle = explore(line, alt="A line", height=slider, sign=choice)._repr_mimebundle_()
    wide = "| " + " | ".join(["a rather long entry"] * 9) + " |"
    text = "\n".join(f"{n} " + "x" * 150 for n in range(60))
    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# A deck\n\n" + "Some text with $x^2$. " * 60),
            nbformat.v4.new_markdown_cell(f"## Table\n\nt\n\n{wide}\n|{'---|' * 9}\n{wide}\n"),
            nbformat.v4.new_markdown_cell("## Figure\n\n$$\n" + r"\frac{1}{2} \\ " * 8 + "\n$$"),
            nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", bundle)]),
            nbformat.v4.new_code_cell(
                outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)]
            ),
        ]
    )


def test_a_small_deck(watch: Any, small: Any, tmp_path: Path) -> None:
    address = save(small, tmp_path / "small.ipynb", tmp_path / "deck 课")
    watched = watch(**STAGE, color_scheme="light")
    page = watched.page
    page.goto(address)
    page.wait_for_function(READY)
    assert page.locator("mjx-container").count() > 0 and page.locator("mjx-merror").count() == 0
    over = walk(page)
    assert len(over) > 6
    assert [edges for edges in over if edges[0] > 0 or edges[1] > 0 or edges[2] < 0.6] == []
    figure = page.locator(".labcore-twin")
    slide = page.evaluate(
        "() => { const s = document.querySelector('.labcore-twin').closest('section');"
        " const i = deck.getIndices(s); deck.slide(i.h, i.v); return deck.getSlidePastCount(); }"
    )
    figure.locator(".main-svg").first.wait_for()
    assert figure.bounding_box()["width"] > 1000
    before = figure.evaluate(DRAWN)
    figure.locator("select").press("ArrowDown")  # a list too keeps the keys of the deck
    assert figure.locator("select").input_value() == "1"
    figure.locator("input").press("ArrowRight")
    wait_for_another(page, figure, before)
    assert page.evaluate("() => deck.getSlidePastCount()") == slide  # the slider kept its key
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => deck.getSlidePastCount()") == slide + 1
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, text = page.evaluate(ground), "document.querySelector('.twin-plot .xtick text')"
    fill = page.evaluate(f"() => getComputedStyle({text}).fill")
    page.keyboard.press("d")
    page.wait_for_function(
        f"([light, fill]) => ({ground})() !== light && getComputedStyle({text}).fill !== fill",
        arg=[light, fill],
    )
    watched.calm()


def test_the_speaker_sees_what_the_slide_leaves_out(watch: Any, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_markdown_cell("# A deck\n\nshown\n\nand only said")]
    address = save(nbformat.v4.new_notebook(cells=cells), tmp_path / "s.ipynb", tmp_path)
    watched = watch(**STAGE)
    watched.page.goto(address)
    watched.page.wait_for_function(READY)
    assert "only said" not in watched.page.inner_text("body")
    with watched.page.expect_popup() as popup:
        watched.page.keyboard.press("s")
    popup.value.locator(".speaker-controls-notes .value").get_by_text("and only said").wait_for()
    watched.calm()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapters_deck(watch: Any, book_html: Path, tmp_path: Path, chapter: str) -> None:
    source = ROOT / "book" / f"{chapter}.ipynb"
    address = save(executed(book_html, source), source, tmp_path)
    watched = watch(**STAGE)
    page = watched.page
    page.goto(address)
    page.wait_for_function(READY)
    assert page.locator("mjx-merror").count() == 0
    assert not re.search(r"\{[a-z:]+\}(<code>|`)", page.content())
    over = walk(page)
    bad = [(n, *e) for n, e in enumerate(over, 1) if e[0] > 0 or e[1] > 0 or e[2] < 0.6]
    assert bad == []
    for figure in page.locator(".labcore-twin:has(input[type=range])").all():
        figure.evaluate(
            "e => { const i = deck.getIndices(e.closest('section')); deck.slide(i.h, i.v); }"
        )
        figure.locator(".main-svg").first.wait_for()
        slider = figure.locator("input[type=range]").first
        before = figure.evaluate(DRAWN)
        atop = slider.evaluate("e => e.value === e.max")
        slider.press("ArrowLeft" if atop else "ArrowRight")
        wait_for_another(page, figure, before)
        page.keyboard.press("Escape")
    watched.calm()
