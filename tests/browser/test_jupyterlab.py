"""A chapter's parts in a real JupyterLab: run all, move, guess, answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import LOCAL
from tests.browser.jupyterlab import EXPLORER, jupyterlab, run_all, slider_of_figure, write_notebook

pytestmark = pytest.mark.long

TROUBLE = """\
def trouble(slow, wrong):
    if slow:
        time.sleep(2.5)
    if wrong:
        raise ValueError("no such wave <here>")
    return go.Figure(go.Scatter(y=[0, 1 + slow])).update_layout(title="slow" if slow else "quick")

ui.explore(trouble, alt="A line.", slow=ui.Toggle(), wrong=ui.Toggle())
"""
LEVEL = """\
import plotly.graph_objects as go
from labcore import ui

def level(high):
    return go.Figure(go.Scatter(y=[0, 1])).update_layout(title="high" if high else "low")

ui.explore(level, alt="A line.", high=ui.Toggle())
"""
# A page so busy that any module takes longer than the two seconds that anywidget allows, and
# plotly's code as long as the test likes.
BUSY = """\
globalThis.asked = 0;
globalThis.arrives = new Promise((done) => { globalThis.arrive = done; });
globalThis.Blob = class extends Blob {
  constructor(parts, options) {
    const module = options?.type === "text/javascript";
    const large = module && parts[0].length > 1e6;
    globalThis.asked += large;
    const first = large ? "await arrives;" : "await new Promise((done) => setTimeout(done, 3000));";
    super(module ? [first, ...parts] : parts, options);
  }
};
"""
CELLS = [
    EXPLORER % 0,
    TROUBLE,
    'guess = ui.predict("How many bytes?", unit="bytes")\nguess',
    "guess.reveal(8)",
    'ui.quiz([ui.Question("Which?", ("this", "that"), 1, "Because.")])',
    "from labcore import checks\nui.show_source(checks.one_of)",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab with two notebooks."""
    root = tmp_path_factory.mktemp("lab")
    write_notebook(root / "mini.ipynb", CELLS)
    write_notebook(root / "late.ipynb", [LEVEL, LEVEL])
    with jupyterlab(root) as address:
        yield address


@pytest.fixture(scope="module")
def lab(browser: Any, server: str) -> Iterator[Any]:
    """The notebook's page after Run All, with the requests that left and the errors shown."""
    page = browser.new_page(viewport={"width": 1400, "height": 2600})
    page.strangers = []
    page.on(
        "request",
        lambda r: None if r.url.startswith(LOCAL) else page.strangers.append(r.url),
    )
    run_all(page, server, "mini.ipynb")
    slider_of_figure(page)
    yield page
    page.close()


def _plot(page: Any, number: int) -> Any:
    return page.evaluate(
        "n => { const p = document.querySelectorAll('.jp-OutputArea-output .js-plotly-plot')[n];"
        " return [p.layout.title.text, Array.from(p._fullData[0].y).join()]; }",
        number,
    )


def test_run_all_runs_every_cell(lab: Any) -> None:
    assert lab.locator(".jp-OutputArea-output[data-mime-type*=error]").count() == 0
    assert lab.locator(".jp-OutputArea-output").count() >= len(CELLS)
    assert lab.strangers == []


def test_a_key_press_moves_the_figure(lab: Any) -> None:
    title, heights = _plot(lab, 0)
    handle = slider_of_figure(lab)
    handle.press("ArrowRight")
    lab.wait_for_function(
        "t => document.querySelector('.js-plotly-plot').layout.title.text !== t", arg=title
    )
    after, moved = _plot(lab, 0)
    assert moved != heights
    number = "frequency ([0-9.]+)"
    assert _found(number, after) > _found(number, title)


def _found(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found.group(1))


def test_a_slow_call_shows_a_bar_and_an_error_is_shown_and_goes(lab: Any) -> None:
    bar, alert = lab.locator("progress").nth(1), lab.locator("[role=alert]")
    slow, wrong = lab.get_by_label("slow"), lab.get_by_label("wrong")
    assert not bar.is_visible()
    slow.check()
    bar.wait_for(state="visible")
    lab.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot')[1].layout.title.text === 'slow'"
    )
    bar.wait_for(state="hidden")
    slow.uncheck()
    lab.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot')[1].layout.title.text === 'quick'"
    )
    wrong.check()
    alert.wait_for()
    assert "ValueError: no such wave <here>" in alert.inner_text()
    assert "wrong=True" in alert.inner_text()
    assert _plot(lab, 1)[0] == "quick"
    wrong.uncheck()
    alert.wait_for(state="detached")


def test_figures_move_however_late_their_code_comes(browser: Any, server: str) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1600})
    page.add_init_script(BUSY)
    run_all(page, server, "late.ipynb")
    page.wait_for_function("() => globalThis.asked")
    page.get_by_label("high").first.check()  # its message waits for the figure
    page.wait_for_timeout(2500)  # what anywidget allows is over
    page.evaluate("() => arrive()")
    titles = """expected => [...document.querySelectorAll('.js-plotly-plot')]
        .map(plot => plot.layout?.title?.text).join() === expected"""
    page.wait_for_function(titles, arg="high,low")
    page.get_by_label("high").last.check()
    page.wait_for_function(titles, arg="high,high")
    page.close()


def test_a_guess_stands_beside_the_measurement(lab: Any) -> None:
    measured = lab.get_by_text("Measured: 8 bytes.")
    assert not measured.is_visible()
    lab.get_by_label("Your guess").fill("2")
    lab.get_by_role("button", name="Keep this guess").click()
    told = lab.get_by_text("You said 2 bytes.")
    told.wait_for()
    assert "below by a factor of 4" in told.inner_text()


def test_the_quiz_answers_in_jupyterlab(lab: Any) -> None:
    quiz = lab.locator(".labcore-quiz").last
    quiz.get_by_label("that").check()
    assert quiz.locator("fieldset [role=status]").inner_text() == "Right."
    assert quiz.locator(".score").inner_text() == "1 of 1 right."
    assert quiz.get_by_text("Because.").is_visible()


def test_the_source_is_colored(lab: Any) -> None:
    source = lab.locator(".labcore-source").last
    assert "labcore.checks.one_of" in source.inner_text()
    colors = source.evaluate(
        "e => [...new Set([...e.querySelectorAll('pre, pre span')]"
        ".map(s => getComputedStyle(s).color))].length"
    )
    assert colors >= 3
