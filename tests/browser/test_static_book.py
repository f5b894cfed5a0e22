"""The built book in Chromium: from a folder and from a server, in both color modes, on a phone."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from labcore import claims
from labcore.ui import predict
from tests.book import html_checks
from tests.book_fixtures import ROOT
from tests.browser.conftest import DRAW_ALL, DRAWN, wait_for_another

pytestmark = pytest.mark.long
CHAPTERS = sorted(path.stem for path in (ROOT / "book").glob("*.ipynb"))
PHONE = {"width": 360, "height": 740}
WIDE = {"width": 1200, "height": 900}

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
# All elements get at once the colors that they change to.
FADE = """() => document.getAnimations().filter(a => a instanceof CSSTransition)
    .forEach(a => a.finish())"""


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


@pytest.fixture(params=range(3))
def sampled(request: pytest.FixtureRequest, seed: int) -> str:
    """One of three chapters, for what all of them have from the same files."""
    return random.Random(seed).sample(CHAPTERS, 3)[request.param]


def names(folder: Path) -> list[str]:
    """Every page of both books but the top one, which only leads on."""
    found = html_checks.pages(folder) + html_checks.pages(folder / "teaching")
    return [page.relative_to(folder).as_posix() for page in found if page != folder / "index.html"]


def kinds(folder: Path, seed: int) -> list[str]:
    """Every page of its own kind, and two of each kind that a template makes."""
    found = names(folder)
    made = [
        [n for n in found if n.startswith(kind)] for kind in ("book/api/", "labs/", "teaching/")
    ]
    spared = {name for same in made for name in random.Random(seed).sample(same, len(same) - 2)}
    return [name for name in found if name not in spared]


def settle(page: Any, *, drawn: bool = True) -> None:
    """Wait until mathematics and, drawn, all figures stand."""
    page.wait_for_load_state("load")
    page.wait_for_function(
        "() => !window.MathJax || !MathJax.startup || !MathJax.startup.promise"
        " || MathJax.startup.promise.then(() => true)"
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('mjx-container[display]')]"
        ".every(e => e.scrollWidth <= e.clientWidth || e.tabIndex === 0)"
    )
    if drawn:
        page.evaluate(DRAW_ALL)
        page.wait_for_function(
            "() => [...document.querySelectorAll('.twin-plot')]"
            ".every(e => e.querySelector('.main-svg'))"
        )


# The code on a page, shown or folded, that is wider than its box.
CUT = """() => {
    document.querySelectorAll('.cell details').forEach(e => { e.open = true; });
    return [...document.querySelectorAll('article pre')]
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80));
}"""


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


def test_the_top_page_leads_to_the_book(watch: Any, base: str) -> None:
    page = watch().page
    page.goto(f"{base}/index.html")
    page.wait_for_url("**/book/index.html")
    assert page.locator("article h1").count() == 1


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_typeset_whole_and_each_control_moves_its_figure_by_keyboard(
    watch: Any, bases: Any, chapter: str
) -> None:
    base = bases[("file", "http")[CHAPTERS.index(chapter) % 2]]
    watched = watch(width=1280)
    watched.page.goto(f"{base}/book/{chapter}.html")
    settle(watched.page)
    assert watched.page.locator("mjx-container").count() > 0
    assert watched.page.locator("mjx-merror").count() == 0
    assert "\\(" not in watched.page.evaluate(PROSE)
    twins = watched.page.locator(".labcore-twin:has(.twin-control)")
    assert twins.count() > 0
    for number in range(twins.count()):
        twin = twins.nth(number)
        for folded in twin.locator(".twin-nodes summary").all():
            folded.press("Enter")
        for control in twin.locator(".twin-control :is(input, select)").all():
            print(number, control.get_attribute("id"))
            before = twin.evaluate(DRAWN)
            control.press(control.evaluate(KEY))
            wait_for_another(watched.page, twin, before)
    assert watched.page.evaluate(CUT) == []
    watched.calm()


def test_dark_mode_reaches_the_page_and_its_figures(watch: Any, bases: Any, sampled: str) -> None:
    watched = watch(color_scheme="light")
    page = watched.page
    page.goto(f"{bases['file']}/book/{sampled}.html")
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


def test_the_keyboard_alone_reaches_everything(watch: Any, bases: Any, sampled: str) -> None:
    watched = watch()
    page = watched.page
    page.goto(f"{bases['file']}/book/{sampled}.html")
    settle(page, drawn=False)
    page.keyboard.press("Tab")
    assert "skip" in page.evaluate("() => document.activeElement.closest('[class]').outerHTML")
    assert page.evaluate(MARKED)
    page.keyboard.press("Enter")
    assert page.evaluate("() => location.hash") == "#main-content"
    page.goto(f"{bases['file']}/book/{sampled}.html")
    settle(page, drawn=False)
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
    hits = page.locator("#search-results ul.search li a")
    found = [Path(a.get_attribute("href").partition("?")[0]).stem for a in hits.all()]
    kinds = [name in CHAPTERS for name in found]
    assert kinds[0] and "index" not in found[:1] and False in kinds
    if base.startswith("http"):
        page.locator("#search-results .context").first.wait_for()
    with page.expect_navigation():
        page.locator("#search-results ul.search li a").first.click()
    page.wait_for_selector("article h1")
    assert "momentum" in page.locator("article").inner_text().lower()
    watched.calm()


@pytest.mark.parametrize("part", range(4))
def test_every_page_is_calm_fits_a_phone_and_shows_axe_nothing_serious(
    watch: Any, bases: Any, book_html: Path, part: int, seed: int
) -> None:
    """It asks the network for nothing and logs no error: half from a folder, half from a server.

    All of axe's rules on a wide screen, all but contrast on a phone; contrast in dark on half.
    """
    watched = watch(color_scheme="light", **PHONE)
    page = watched.page
    chosen = kinds(book_html, seed)
    for number, name in enumerate(names(book_html)[part::4]):
        print(name)
        page.set_viewport_size(PHONE)
        page.emulate_media(color_scheme="light")
        watched.errors.clear()  # axe asks for style sheets, which a folder refuses it
        page.goto(f"{bases[('file', 'http')[number % 2]]}/{name}")
        settle(page)
        assert page.locator("h1").count() >= 1
        assert (watched.strangers, watched.errors) == ([], [])
        assert too_wide(page) == 0
        if name not in chosen:
            continue
        assert violations(page, rules={"color-contrast": {"enabled": False}}) == []
        page.set_viewport_size(WIDE)
        assert violations(page) == []
        if (number + seed) % 2:  # it takes as long as all the rest
            continue
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
        page.evaluate(FADE)
        assert violations(page, runOnly=["color-contrast"]) == []


def test_chapter_offers_its_notebook_but_no_local_server_button(
    watch: Any, bases: Any, sampled: str
) -> None:
    page = watch().page
    page.goto(f"{bases['http']}/book/{sampled}.html")
    assert page.locator("#labcore-run").is_hidden()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the notebook").click()
    assert download.value.suggested_filename == f"{sampled}.ipynb"


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


def test_a_guess_is_kept_compared_and_cleared_on_this_machine(watch: Any, base: str) -> None:
    watched = watch()
    page = watched.page
    page.goto(f"{base}/book/lion.html")
    settle(page)
    form = page.locator("form.labcore-predict").first
    key = form.get_attribute("data-predict")
    reveal = page.locator(f'[data-reveal="{key}"]')
    head = page.locator(".labcore-chapter .labcore-progress")
    assert not head.is_visible() and not reveal.locator("p").is_visible()
    form.get_by_label("Your guess").focus()
    page.keyboard.press("Enter")
    assert "A guess is a number" in form.inner_text() and not head.is_visible()
    measured = float(reveal.get_attribute("data-measured"))
    page.keyboard.type(f"{2 * measured:.12g}")
    page.keyboard.press("Enter")
    assert "Kept" in form.inner_text() and "1 of " in head.inner_text()
    # A question that a later edition no longer asks does not count.
    page.evaluate(
        """() => { const all = JSON.parse(localStorage.getItem('labcore.progress'));
        all.lion.guesses.gone = 1; all.lion.right['gone-0'] = true;
        localStorage.setItem('labcore.progress', JSON.stringify(all)); }"""
    )
    page.reload()
    settle(page)
    assert head.inner_text().startswith("1 of ") and "0 of " in head.inner_text()
    assert float(form.get_by_label("Your guess").input_value()) == pytest.approx(2 * measured)
    reveal.locator("summary").press("Enter")
    assert "Your guess was above by a factor of 2." in reveal.inner_text()
    page.locator(".labcore-quiz fieldset").first.scroll_into_view_if_needed()
    question = page.locator(".labcore-quiz fieldset").first
    right = question.get_attribute("data-answer")
    for place in ("1" if right == "0" else "0", right):
        question.locator(f'input[value="{place}"]').check()
    assert "1 of " in page.locator(".labcore-quiz .score").first.inner_text()
    assert head.inner_text().count("1 of ") == 2
    page.goto(f"{base}/book/index.html")
    course = page.locator(".labcore-progress")
    assert course.inner_text().startswith("In 1 chapter: 1 of ")
    course.get_by_role("button").click()
    page.wait_for_load_state("load")
    assert not page.locator(".labcore-progress").is_visible()
    assert (watched.strangers, watched.errors) == ([], [])


@pytest.mark.parametrize(
    ("guess", "measured", "said"),
    [
        (4, 4, "You said 4 GB. The same."),
        (1, 28, "Your guess was below by a factor of 28."),
        (-3, 1.5, "Your guess was off by 4.5 GB."),
        (0, 2, "Your guess was off by 2 GB."),
    ],
)
def test_the_page_compares_as_the_notebook_does(
    watch: Any, book_html: Path, guess: float, measured: float, said: str
) -> None:
    asked = predict("How many?", unit="GB")
    asked.record(guess)
    assert said.removeprefix("You said 4 GB. ") in asked.reveal(measured).sentence()
    page = watch().page
    page.goto((book_html / "book" / "lion.html").as_uri())
    form = page.locator("form.labcore-predict").first
    reveal = page.locator(f'[data-reveal="{form.get_attribute("data-predict")}"]')
    reveal.evaluate(
        "(e, values) => { e.dataset.measured = values[0]; e.dataset.unit = 'GB'; e.open = true; }",
        [measured],
    )
    form.get_by_label("Your guess").fill(str(guess))
    form.get_by_role("button").click()
    assert said in reveal.inner_text()


def test_the_ledger_shows_what_was_chosen(watch: Any, base: str) -> None:
    page = watch().page
    page.goto(f"{base}/book/claims.html")
    every = claims.load().values()
    shown = page.locator(".labcore-ledger details:visible")
    assert shown.count() == len(every)
    page.get_by_label("does not hold").check()
    assert shown.count() == sum(item.verdict == "does not hold" for item in every)
    page.get_by_label("Chapter").select_option("lion")
    of_lion = [item for item in every if item.slug == "lion" and item.verdict == "does not hold"]
    assert shown.count() == len(of_lion) > 0
    shown.first.locator("summary").press("Enter")
    assert shown.first.locator("tr.ours").count() == len(of_lion[0].parts)
    page.locator(".labcore-ledger section:visible h2 a").click()
    page.wait_for_url("**/book/lion.html")
