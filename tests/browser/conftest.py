"""Chromium for the tests of this folder: skipped without one on a user's machine, not in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from labcore.course import doctor

# As root Chromium has no sandbox; the rest keeps it from talking to the network on its own.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOCAL = ("file://", "data:", "blob:", "about:", "http://127.0.0.1", "ws://127.0.0.1")
PATIENCE_MS = 180_000  # what a machine that does much else may need for one step
# What is drawn, whole: a moved slider changes it.
DRAWN = """element => JSON.stringify(element.querySelector('.twin-plot').data
    .map(trace => [trace.name, trace.x, trace.y, trace.z]))
    + JSON.stringify(element.querySelector('.twin-plot').layout.title)"""
# A figure is drawn when it comes near the window, and all of them for paper.
DRAW_ALL = "() => dispatchEvent(new Event('beforeprint'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium a module: Playwright's event loop must not outlive it."""
    path = doctor.browser()
    if not path:
        if os.environ.get("CI") == "true":
            pytest.fail("CI has no Chromium: install it or set CHROMIUM to its path")
        pytest.skip("no Chromium here: install it or set CHROMIUM to its path")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=FLAGS, timeout=PATIENCE_MS)
        yield started
        started.close()


@dataclass
class Watched:
    """A page, and what it said and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def calm(self) -> None:
        """Assert that nothing left the machine and no error was logged."""
        assert self.strangers == []
        assert self.errors == []


def wait_for_another(page: Any, figure: Any, before: str) -> None:
    """Until something else than `before` is drawn: a busy browser's next frame comes late."""
    changed = f"([element, before]) => ({DRAWN})(element) !== before"
    page.wait_for_function(changed, arg=[figure.element_handle(), before])


@pytest.fixture
def watch(browser: Any) -> Iterator[Any]:
    """A function that makes a watched page: width, height, javascript, theme."""
    contexts = []

    def make(width: int = 1200, height: int = 900, **options: Any) -> Watched:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        watched = Watched(context.new_page())
        watched.page.on(
            "console", lambda m: watched.errors.append(m.text) if m.type == "error" else None
        )
        watched.page.on("pageerror", lambda e: watched.errors.append(str(e)))
        watched.page.on(
            "request",
            lambda r: None if r.url.startswith(LOCAL) else watched.strangers.append(r.url),
        )
        return watched

    yield make
    for context in contexts:
        context.close()
