"""Explorers on a static page, built from a small notebook and opened from a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import DRAW_ALL

pytestmark = pytest.mark.long

CELLS = [
    """\
import numpy as np
import plotly.graph_objects as go
from labcore import ui

def wave(frequency, phase, damped, amplitude):
    x = np.linspace(0, 6, 150)
    y = amplitude * np.sin(frequency * x + phase) * (np.exp(-x / 3) if damped == "yes" else 1)
    figure = go.Figure([go.Scatter(x=x, y=y, name="wave"), go.Scatter(x=x, y=x / 6, name="line")])
    title = f"A wave of frequency {frequency:.4g} and phase {phase:.4g} over six seconds of time"
    return figure.update_layout(title=title, xaxis_title="time (s)", yaxis_title="height")

ui.explore(
    wave,
    alt="A sine wave whose frequency a slider sets.",
    frequency=ui.LogSlider(low=0.1, high=10, default=1.0, unit="Hz"),
    phase=ui.Slider(low=0, high=3, default=0.75),
    damped=ui.Choice(options=("no", "yes")),
    amplitude=ui.IntSlider(low=1, high=5, default=2),
)
""",
    """\
def surface(kind, bumps):
    g = np.linspace(-2, 2, 30)
    z = g[:, None] ** 2 + (g[None] ** 4 if kind == "quartic" else g[None] ** 2)
    z = z + bumps * np.sin(5 * g[None])
    return go.Figure(go.Heatmap(x=g, y=g, z=z)).update_layout(title="A valley")

ui.explore(surface, alt="A valley from above.", kind=ui.Choice(options=("square", "quartic")),
           bumps=ui.Toggle())
""",
    'ui.describe(go.Figure(go.Bar(x=["a", "b"], y=[1, 2.5])), "Two bars, the second higher.")',
    'guess = ui.predict("How many bytes a parameter does Lion keep?", unit="bytes")\nguess',
    "guess.reveal(4)",
    """\
ui.quiz([ui.Question("Which keeps one buffer?", ("AdamW", "Lion"), 1, "Only the momentum."),
         ui.Question("What is a sign of 0?", ("1", "0", "-1"), 1, "As torch.sign has it.")])
""",
    "from labcore import checks\nui.show_source(checks.one_of, docstring=False)",
]
TREE = """\
from labcore.decoding.medusa import Tree
from labcore.ui import Choice, LogSlider, explore
from labcore.ui.figures import medusa as figures

data = figures.Guesses(
    tree=Tree(((0,), (1,), (0, 0), (0, 1))),
    accuracies={"0": [[0.5, 0.2], [0.4, 0.1]], "0.7": [[0.4, 0.1], [0.3, 0.1]]},
    ranks={warmth: [[[0, 1], [1, 0], [0, 0], [0, 0]]] for warmth in ("0", "0.7")},
    costs=[1, 1.1, 1.2, 1.3, 1.4],
    drafting=[0, 0.1, 0.2],
)
explore(
    figures.tree_picker,
    alt="A tree.",
    data=data,
    formula=data.formula(),
    nodes=data.nodes((0, 1, 3)),
    temperature=Choice(options=("0", "0.7")),
    ridge=LogSlider(low=8, high=512, default=300),
    batch=Choice(options=(1, 8)),
)
"""
CONF = """\
project = "mini"
extensions = ["myst_nb", "labcore.book.explorers"]
html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_ipywidgets_js = {}
exclude_patterns = ["_build"]
"""
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
READY = "() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 3"
HEIGHTS = "n => Array.from(document.querySelectorAll('.js-plotly-plot')[n]._fullData[0].y)"
BOXES = """() => [...document.querySelectorAll('.labcore-twin')].map(e => {
    const box = e.getBoundingClientRect(); return [box.top + scrollY, box.height]; })"""
FRAMES = """async n => { while (n--) await new Promise(requestAnimationFrame); }"""
TITLE = "() => document.querySelectorAll('.js-plotly-plot')[0].layout.title.text"


def notebook(cells: list[str]) -> Any:
    book = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
    book.cells.append(nbformat.v4.new_markdown_cell("# A mini chapter"))
    book.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    return book


def build(root: Path, cells: list[str]) -> subprocess.CompletedProcess[str]:
    """A book of one chapter in a folder of its own, as the book's strict build makes it."""
    (root / "part").mkdir(parents=True)
    nbformat.write(notebook(cells), root / "part" / "mini.ipynb")
    (root / "index.md").write_text("# Mini\n\n```{toctree}\npart/mini\n```\n")
    (root / "conf.py").write_text(CONF)
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ".", "_build"]
    environment = {**os.environ, "LABCORE_BOOK": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mini") / "book"
    done = build(root, CELLS)
    assert done.returncode == 0, done.stderr
    return root / "_build"


@pytest.fixture
def opened(browser: Any, site: Path, watch: Any) -> Any:
    def go(**options: Any) -> Any:
        watched = watch(**options)
        watched.page.goto((site / "part" / "mini.html").as_uri())
        if options.get("java_script_enabled", True):
            watched.page.evaluate(DRAW_ALL)
            watched.page.wait_for_function(READY)
        return watched

    return go


def test_the_keyboard_moves_the_slider_and_the_trace(opened: Any) -> None:
    watched = opened()
    page = watched.page
    slider = page.get_by_label("frequency", exact=True)
    before, title = page.evaluate(HEIGHTS, 0), page.evaluate(TITLE)
    assert slider.get_attribute("aria-valuetext") == "1 Hz"
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_function("t => document.querySelector('.js-plotly-plot').layout.title.text !== t",
                           arg=title)  # fmt: skip
    assert page.evaluate(HEIGHTS, 0) != before
    text = slider.get_attribute("aria-valuetext")
    assert float(text.removesuffix(" Hz")) > 1
    assert page.locator(".twin-control output").first.inner_text() == text
    slider.press("ArrowLeft")
    page.wait_for_function("t => document.querySelector('.js-plotly-plot').layout.title.text === t",
                           arg=title)  # fmt: skip
    assert page.evaluate(HEIGHTS, 0) == before
    watched.calm()


def test_every_control_moves_and_a_slice_comes_when_it_is_needed(opened: Any) -> None:
    watched = opened()
    page = watched.page
    slices = "() => Object.keys(window.labcoreSlices || {}).length"
    assert page.evaluate(slices) == 0 and page.locator(".twin-fixed").count() == 0
    title = page.evaluate(TITLE)
    page.get_by_label("phase", exact=True).press("End")
    page.wait_for_function("t => document.querySelector('.js-plotly-plot').layout.title.text !== t",
                           arg=title)  # fmt: skip
    assert "phase 3 " in page.evaluate(TITLE)
    # The neighbors of where the controls stand are fetched; the others only when asked for.
    page.wait_for_function(f"() => ({slices})() === 3")
    highest = "() => Math.max(...document.querySelector('.js-plotly-plot')._fullData[0].y)"
    page.get_by_label("amplitude", exact=True).press("End")
    page.wait_for_function(f"() => ({highest})() > 4.5")
    page.get_by_label("damped", exact=True).select_option("yes")
    page.wait_for_function(f"() => ({highest})() < 4.5")
    assert "phase 3 " in page.evaluate(TITLE)
    watched.calm()


def test_a_loaded_slice_is_drawn_within_a_tenth_of_a_second(opened: Any) -> None:
    """A count of frames and not a clock: the figure follows in the next two animation frames."""
    page = opened().page
    page.get_by_label("amplitude", exact=True).press("ArrowRight")
    page.wait_for_function("() => Object.keys(window.labcoreSlices || {}).length >= 3")
    page.evaluate(
        """() => { const input = [...document.querySelectorAll('.twin-control input')][0];
        input.value = 0; input.dispatchEvent(new Event('input')); window.waited = 0;
        const before = document.querySelector('.js-plotly-plot').layout.title.text;
        (function look() {
            const now = document.querySelector('.js-plotly-plot').layout.title.text;
            if (now !== before) { window.after = window.waited; return; }
            window.waited += 1; requestAnimationFrame(look); })(); }"""
    )
    page.wait_for_function("() => window.after !== undefined")
    assert page.evaluate("() => window.after") <= 3


def test_a_choice_and_a_toggle_drive_the_second_explorer_alone(opened: Any) -> None:
    watched = opened()
    page = watched.page
    z = "() => document.querySelectorAll('.js-plotly-plot')[1]._fullData[0].z.flat().join()"
    first, other = page.evaluate(z), page.evaluate(HEIGHTS, 0)
    page.get_by_label("kind", exact=True).select_option("quartic")
    page.wait_for_function(f"z => ({z})() !== z", arg=first)
    second = page.evaluate(z)
    page.get_by_label("bumps", exact=True).press("Space")
    page.wait_for_function(f"z => ({z})() !== z", arg=second)
    assert page.evaluate(HEIGHTS, 0) == other
    watched.calm()


def test_dark_mode_changes_ink_grid_and_ground(opened: Any) -> None:
    watched = opened(color_scheme="light")
    page = watched.page
    look = """() => { const l = document.querySelector('.js-plotly-plot')._fullLayout;
               return [l.paper_bgcolor, l.font.color, l.xaxis.gridcolor]; }"""
    page.evaluate("() => { document.documentElement.dataset.theme = 'light'; }")
    page.wait_for_function(f"() => ({look})()[0] !== 'rgba(0,0,0,0)'")
    light = page.evaluate(look)
    page.evaluate("() => { document.documentElement.dataset.theme = 'dark'; }")
    page.wait_for_function(f"old => ({look})()[1] !== old", arg=light[1])
    dark = page.evaluate(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    watched.calm()


def test_a_figure_is_drawn_when_it_comes_near_in_a_box_that_stays(watch: Any, site: Path) -> None:
    watched = watch(height=200)
    page = watched.page
    page.goto((site / "part" / "mini.html").as_uri())
    figures = page.locator(".labcore-twin")
    figures.nth(0).locator(".main-svg").first.wait_for()
    page.evaluate(FRAMES, 5)
    assert figures.nth(2).locator(".main-svg").count() == 0
    boxes = page.evaluate(BOXES)
    figures.nth(2).scroll_into_view_if_needed()
    figures.nth(2).locator(".main-svg").first.wait_for()
    assert page.evaluate(BOXES) == boxes
    watched.calm()


def test_paper_has_every_figure(watch: Any, site: Path) -> None:
    page = watch(height=200).page
    page.goto((site / "part" / "mini.html").as_uri())
    page.locator(".main-svg").first.wait_for()
    page.pdf()
    assert page.locator(".twin-plot:not(:has(.main-svg))").count() == 0


def test_a_click_on_a_node_puts_it_into_the_tree(watch: Any, tmp_path: Path) -> None:
    done = build(tmp_path / "book", [TREE])
    assert done.returncode == 0, done.stderr
    watched = watch()
    page = watched.page
    page.goto((tmp_path / "book" / "_build" / "part" / "mini.html").as_uri())
    page.locator(".main-svg").first.wait_for()
    told = page.locator(".twin-nodes output")
    title = "() => document.querySelector('.js-plotly-plot').layout.title.text"
    first = page.evaluate(title)
    assert told.inner_text() == "3 of 4"
    nodes = page.locator(".js-plotly-plot .scatterlayer .trace").last.locator("path.point")
    nodes.nth(1).click(force=True)  # the first row is the first node: all below it goes too
    page.wait_for_function(f"t => ({title})() !== t", arg=first)
    assert told.inner_text() == "1 of 4"
    page.locator(".twin-nodes summary").press("Enter")
    page.get_by_label("0·1").press("Space")  # its ancestor comes with it
    page.wait_for_function("() => document.querySelector('.twin-nodes output').textContent[0] > 2")
    assert told.inner_text() == "3 of 4" and page.get_by_label("0", exact=True).is_checked()
    watched.calm()


def test_two_figures_are_never_drawn_in_one_frame(opened: Any) -> None:
    page = opened().page
    page.evaluate(
        """() => { let frame = 0; window.drawn = []; const react = Plotly.react;
        (function tick() { frame += 1; requestAnimationFrame(tick); })();
        Plotly.react = (...all) => { drawn.push(frame); return react(...all); };
        const root = document.documentElement;
        root.dataset.theme = root.dataset.theme === 'dark' ? 'light' : 'dark'; }"""
    )
    page.wait_for_function("() => drawn.length === 3")
    assert len(set(page.evaluate("() => drawn"))) == 3


def test_a_phone_shows_all_of_it(opened: Any) -> None:
    watched = opened(width=360, height=740)
    page = watched.page
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 360
    boxes = page.evaluate(
        "() => Array.from(document.querySelectorAll('.labcore-twin, .labcore-twin input, "
        ".js-plotly-plot .main-svg, .js-plotly-plot .gtitle'))"
        ".map(e => e.getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    assert boxes
    assert all(left >= 0 and right <= 360 for left, right in boxes), boxes
    watched.calm()


def test_without_javascript_there_is_the_text_alternative(opened: Any) -> None:
    page = opened(java_script_enabled=False).page
    texts = page.locator(".labcore-twin noscript p")
    plots = page.locator(".twin-plot")
    assert texts.count() == plots.count() == 3
    for text, plot in zip(texts.all(), plots.all(), strict=True):
        assert text.is_visible()
        assert text.inner_text() == f"Drawn by JavaScript: {plot.get_attribute('aria-label')}"
    assert not page.get_by_label("frequency", exact=True).is_visible()
    assert not page.locator(".twin-plot").first.is_visible()


def test_a_quiz_is_answered_by_keyboard(opened: Any) -> None:
    watched = opened()
    page = watched.page
    first = page.locator(".labcore-quiz fieldset").first
    assert not first.get_by_text("Only the momentum.").is_visible()
    first.get_by_label("AdamW").focus()
    page.keyboard.press("Space")
    assert first.locator("[role=status]").inner_text() == "Not this one: think again."
    page.keyboard.press("ArrowDown")
    assert first.locator("[role=status]").inner_text() == "Right."
    assert first.get_by_text("Only the momentum.").is_visible()
    assert not page.locator(".labcore-quiz").get_by_text("As torch.sign has it.").is_visible()
    watched.calm()


def test_a_measurement_is_folded_until_asked_for(opened: Any) -> None:
    page = opened().page
    measured = page.get_by_text("Measured: 4 bytes.")
    assert not measured.is_visible()
    page.locator(".labcore-reveal summary").press("Enter")
    assert measured.is_visible()


def test_scripts_are_loaded_only_where_used(site: Path) -> None:
    page, index = ((site / name).read_text() for name in ("part/mini.html", "index.html"))
    assert "plotly.min.js" not in page and (site / "_static/vendor/plotly.min.js").is_file()
    assert "twin.js" in page
    assert "plotly" not in index
    assert "twin.js" not in index
    loaded = re.findall(r"explorers/([0-9a-f]{16}\.js)", page)
    assert len(loaded) == 3
    every = {file.name: file.stat().st_size for file in (site / "_static/explorers").iterdir()}
    assert max(size for name, size in every.items() if name not in loaded) <= 300_000
    sidecars = sum(every[name] for name in loaded)
    assert len(page) < 300_000
    assert len(page) + sidecars < 1_500_000
    assert "widget-state" not in page


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("go.Figure(go.Scatter(y=[1, 2]))", "without a text alternative"),
        (
            "ui.explore(lambda a: go.Figure(go.Bar(y=[1 / a])), alt='x', "
            "a=ui.IntSlider(low=-1, high=1, default=1))",
            "a=0",
        ),
    ],
)
def test_the_strict_build_refuses(tmp_path: Path, cell: str, said: str) -> None:
    setup = "import plotly.graph_objects as go\nfrom labcore import ui\n"
    done = build(tmp_path / "book", [setup + cell])
    assert done.returncode != 0
    assert said in done.stderr
