"""The page of a served model: several tabs at once, marks, Stop, a stranger, colors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from labcore.models import pretrained, shipped_tokenizer
from labcore.serving import Engine
from labcore.serving.engine.outputs import Output
from labcore.serving.http import Server, running

pytestmark = pytest.mark.long

RHYME = "a, b, c, a, b, c, a, b, c, a,"
SPOKEN = "() => document.getElementById('answer').textContent.length"
DONE = "() => document.getElementById('told').textContent.includes('per second')"


class Slow(Engine):
    """So slow that an answer is still coming when somebody looks."""

    def step(self) -> list[Output]:
        time.sleep(0.1)
        return super().step()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = Slow(pretrained("draft"), shipped_tokenizer(), proposer="ngram")
    with running(Server(engine=engine, name="mine")) as made:
        yield made


def opened(watch: Any, server: Server, **options: Any) -> Any:
    watched = watch(**options)
    watched.page.goto(server.address)
    watched.page.get_by_role("heading", name="mine").wait_for()
    assert watched.page.get_by_label("Text to continue").input_value() == server.prompt
    return watched


def ask(page: Any, tokens: int) -> None:
    page.get_by_label("Text to continue").fill(RHYME)
    page.get_by_label("Tokens").fill(str(tokens))
    page.get_by_role("button", name="Continue").click()


def test_three_tabs_answer_at_once_until_they_are_stopped(watch: Any, server: Server) -> None:
    tabs = [opened(watch, server) for _ in range(3)]
    for tab in tabs:
        ask(tab.page, 900)
    for tab in tabs:
        tab.page.locator("#answer mark").first.wait_for()
        tab.page.get_by_text("was guessed by the draft").wait_for()
    assert max(len(record.decodes) for record in server.engine.trace) == 3
    for tab in tabs:
        before = len(tab.page.locator("#answer").inner_text())
        tab.page.wait_for_function(f"() => ({SPOKEN})() > {before}")  # whoever else has stopped
        tab.page.get_by_role("button", name="Stop").click()
        tab.page.get_by_text("Stopped.").wait_for()
        assert tab.page.get_by_role("button", name="Continue").is_enabled()
        tab.calm()
    until = time.monotonic() + 60
    while server.engine.counters.finished.get("cancelled", 0) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_stranger_sees_why(watch: Any, server: Server) -> None:
    page = watch().page
    page.goto(server.address.replace(server.token, "wrong"))
    page.get_by_text("the request must carry the server's token").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_it(watch: Any, server: Server, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(watch, server, color_scheme=scheme).page
    ask(page, 40)
    page.wait_for_function(DONE)
    assert page.locator("#answer mark").count() > 0
    assert axe.Axe().run(page).response["violations"] == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
