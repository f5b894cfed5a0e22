"""The built book in Chromium: from a folder and from a server, in both color modes, on a phone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.book import html_checks
from tests.book_fixtures import ROOT
from tests.browser.conftest import DRAWN, wait_for_another

pytestmark = pytest.mark.long
CHAPTERS = sorted(path.stem for path in (ROOT / "book").glob("*.ipynb"))
PHONE = {"width": 360, "height": 740}

# What is written, without code: a regular expression in it may look like a formula.
PROSE = """() => {
    const page = document.querySelector('article').cloneNode(true);
    page.querySelectorAll('pre, code, script').forEach(element => element.remove());
    return page.textContent; }"""
# The key that moves a control from where it stands.
KEY = """e => e.type === 'checkbox' ? ' '
    : e.type === 'range' ? (e.value === e.max ? 'ArrowLeft' : 'ArrowRight')
    : e.selectedIndex === e.options.length - 1 ? 'ArrowUp' : 'ArrowDown'"""
# Whether a keyboard user sees where they are: a mark on the focused element, around or in it.
MARKED = """() => {
    const lined = s => s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0;
    const shows = e => { const s = getComputedStyle(e);
        return e.getClientRects().length > 0 && (lined(s) || s.boxShadow !== 'none'); };
    const e = document.activeElement;
    return [e, e.parentElement, ...e.children].some(near => near && shows(near));
}"""


class Silent(SimpleHTTPRequestHandler):
    """A file server that logs nothing."""

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def serve(folder: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def bases(book_html: Path) -> Iterator[dict[str, str]]:
    """Where the book stands: in a folder, and behind a server."""
    for address in serve(book_html):
        yield {"file": book_html.as_uri(), "http": address}


@pytest.fixture(params=["file", "http"])
def base(request: pytest.FixtureRequest, bases: dict[str, str]) -> str:
    return bases[request.param]


def names(folder: Path) -> list[str]:
    """Every page but the top one, which only leads on."""
    found = [page.relative_to(folder).as_posix() for page in html_checks.pages(folder)]
    return [name for name in found if name != "index.html"]


def settle(page: Any) -> None:
    """Wait until mathematics and figures stand."""
    page.wait_for_load_state("load")
    page.wait_for_function(
        "() => !window.MathJax || !MathJax.startup || !MathJax.startup.promise"
        " || MathJax.startup.promise.then(() => true)"
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('mjx-container[display]')]"
        ".every(e => e.scrollWidth <= e.clientWidth || e.tabIndex === 0)"
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.twin-plot')]"
        ".every(e => e.querySelector('.main-svg'))"
    )


def too_wide(page: Any) -> int:
    """Pixels by which the page can be scrolled sideways."""
    return int(
        page.evaluate(
            "() => document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
        )
    )


def violations(page: Any, **options: Any) -> list[str]:
    """What axe finds serious or critical. options: axe's own."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        f"{item['id']}: {node['html'][:160]}"
        for item in found
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"]
    ]


def dead_stops(page: Any, most: int) -> tuple[list[str], list[str]]:
    """Walk the page by Tab: what was reached, and which of it does not show that it has focus."""
    reached, unmarked = [], []
    for _ in range(most):
        page.keyboard.press("Tab")
        what = page.evaluate(
            "() => { const e = document.activeElement;"
            " return e === document.body ? '' : e.outerHTML.slice(0, 120); }"
        )
        if not what:
            break
        reached.append(what)
        if not page.evaluate(MARKED):
            unmarked.append(what)
    return reached, unmarked


def test_no_page_asks_the_network_for_anything_or_logs_an_error(
    watch: Any, base: str, book_html: Path
) -> None:
    watched = watch()
    for name in names(book_html):
        watched.page.goto(f"{base}/{name}")
        settle(watched.page)
        assert watched.page.locator("h1").count() >= 1, name
        assert (watched.strangers, watched.errors) == ([], []), name


def test_the_top_page_leads_to_the_book(watch: Any, base: str) -> None:
    page = watch().page
    page.goto(f"{base}/index.html")
    page.wait_for_url("**/book/index.html")
    assert page.locator("article h1").count() == 1


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_formulas_are_typeset_and_no_source_of_them_is_left(
    watch: Any, base: str, chapter: str
) -> None:
    watched = watch()
    watched.page.goto(f"{base}/book/{chapter}.html")
    settle(watched.page)
    assert watched.page.locator("mjx-container").count() > 0
    assert watched.page.locator("mjx-merror").count() == 0
    assert "\\(" not in watched.page.evaluate(PROSE)
    watched.calm()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_slider_moves_its_figure_by_keyboard(watch: Any, base: str, chapter: str) -> None:
    watched = watch()
    watched.page.goto(f"{base}/book/{chapter}.html")
    settle(watched.page)
    twins = watched.page.locator(".labcore-twin:has(.twin-control)")
    assert twins.count() > 0
    for number in range(twins.count()):
        twin = twins.nth(number)
        for control in twin.locator(".twin-control :is(input, select)").all():
            print(number, control.get_attribute("id"))
            before = twin.evaluate(DRAWN)
            control.press(control.evaluate(KEY))
            wait_for_another(watched.page, twin, before)
    watched.calm()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_dark_mode_reaches_the_page_and_its_figures(watch: Any, bases: Any, chapter: str) -> None:
    watched = watch(color_scheme="light")
    page = watched.page
    page.goto(f"{bases['file']}/book/{chapter}.html")
    settle(page)
    look = """() => [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.twin-plot .xtick text')).fill]"""
    light = page.evaluate(look)
    button = page.locator(".theme-switch-button:visible").first
    for _ in range(3):
        if page.evaluate("() => document.documentElement.dataset.theme") == "dark":
            break
        button.focus()
        button.press("Enter")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.wait_for_function(
        f"light => ({look})().every((color, at) => color !== light[at])", arg=light
    )
    for _ in range(120):  # a busy browser stores the choice much later
        page.reload()
        if page.evaluate("() => document.documentElement.dataset.theme") == "dark":
            break
        page.wait_for_timeout(250)
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    watched.calm()


def test_no_page_is_wider_than_a_phone(watch: Any, bases: Any, book_html: Path) -> None:
    watched = watch(**PHONE)
    for name in names(book_html):
        watched.page.goto(f"{bases['file']}/{name}")
        settle(watched.page)
        assert too_wide(watched.page) == 0, name


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_keyboard_alone_reaches_everything(watch: Any, bases: Any, chapter: str) -> None:
    watched = watch()
    page = watched.page
    page.goto(f"{bases['file']}/book/{chapter}.html")
    settle(page)
    page.keyboard.press("Tab")
    assert "skip" in page.evaluate("() => document.activeElement.closest('[class]').outerHTML")
    assert page.evaluate(MARKED)
    page.keyboard.press("Enter")
    assert page.evaluate("() => location.hash") == "#main-content"
    page.goto(f"{bases['file']}/book/{chapter}.html")
    settle(page)
    reached, unmarked = dead_stops(page, most=400)
    assert unmarked == []
    controls = [what for what in reached if 'type="range"' in what or "<select" in what]
    there = page.locator(".twin-control input[type=range], .twin-control select")
    assert len(controls) == there.count() > 0
    assert any("Download the notebook" in what for what in reached)


def test_search_finds_a_word(watch: Any, base: str) -> None:
    watched = watch()
    page = watched.page
    page.goto(f"{base}/book/notation.html")
    settle(page)
    page.keyboard.press("Control+k")
    page.keyboard.type("momentum")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=momentum*")
    # While results still come in, the list moves below the pointer and a click may miss.
    page.get_by_text("Search finished").wait_for()
    with page.expect_navigation():
        page.locator("#search-results ul.search li a").first.click()
    page.wait_for_selector("article h1")
    assert "momentum" in page.locator("article").inner_text().lower()
    watched.calm()


@pytest.mark.parametrize(
    ("scheme", "options"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})]
)
def test_axe_finds_nothing_serious(
    watch: Any, bases: Any, book_html: Path, scheme: str, options: dict[str, Any]
) -> None:
    """In dark mode only colors differ."""
    watched = watch(color_scheme=scheme)
    for name in names(book_html):
        watched.page.goto(f"{bases['file']}/{name}")
        settle(watched.page)
        assert watched.page.evaluate("() => document.documentElement.dataset.theme") == scheme
        assert violations(watched.page, **options) == [], name


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_axe_finds_nothing_serious_on_a_phone(watch: Any, bases: Any, chapter: str) -> None:
    watched = watch(**PHONE)
    watched.page.goto(f"{bases['file']}/book/{chapter}.html")
    settle(watched.page)
    assert violations(watched.page) == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_offers_its_notebook_but_no_local_server_button(
    watch: Any, bases: Any, chapter: str
) -> None:
    page = watch().page
    page.goto(f"{bases['http']}/book/{chapter}.html")
    assert page.locator("#labcore-run").is_hidden()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the notebook").click()
    assert download.value.suggested_filename == f"{chapter}.ipynb"


BAD = """<!DOCTYPE html><html lang="en" data-theme="light"><head><title>bad</title>
<style>a:focus {{ outline: none }}</style></head><body><main><h1>Bad</h1>
<a href="#x">one</a> <p style="color:#ccc">pale</p> {more}</main></body></html>"""


def test_these_gates_can_fail(watch: Any, tmp_path: Path) -> None:
    """A page with each fault: a stranger, an error, too wide, no focus mark, pale text."""
    picture = '<img src="https://example.invalid/x.png" alt="">'
    script = "<script>console.error('broken')</script>"
    wide = '<div style="width: 900px">wide</div>'
    (tmp_path / "bad.html").write_text(BAD.format(more=picture + script + wide))
    watched = watch(**PHONE)
    watched.page.goto((tmp_path / "bad.html").as_uri())
    settle(watched.page)
    assert watched.strangers == ["https://example.invalid/x.png"]
    assert "broken" in watched.errors
    assert too_wide(watched.page) > 500
    for options in ({}, {"runOnly": ["color-contrast"]}):
        found = violations(watched.page, **options)
        assert any(line.startswith("color-contrast") for line in found)
    reached, unmarked = dead_stops(watched.page, most=10)
    assert len(reached) == len(unmarked) == 1
