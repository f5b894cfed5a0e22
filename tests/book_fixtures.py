"""Fixtures of the built books: each built strictly once, the first from a cold cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from filelock import FileLock

from labcore.book.runs import open_cache

ROOT = Path(__file__).resolve().parent.parent
STRICT = ("-W", "-n", "--keep-going")
JUPYTER_BOOK = Path(sys.executable).parent / "jupyter-book"


@dataclass(frozen=True)
class Build:
    """A build that ended: its exit status, its log, and where the pages are."""

    status: int
    log: str
    html: Path


def build_book(source: Path, output: Path, **environment: str) -> Build:
    """Build the book at source strictly into output/_build; what is there already is reused."""
    command = [str(JUPYTER_BOOK), "build", *STRICT, "--path-output", str(output), str(source)]
    return _run(command, source, output / "_build" / "html", environment)


def build_guide(source: Path, output: Path) -> Build:
    """Build the teaching guide of the checkout at source strictly into output/_build."""
    words = ["labcore.book.teaching.guide", "-W", "--out", str(output / "_build")]
    pages = output / "_build" / "html" / "teaching"
    return _run([sys.executable, "-m", *words], source, pages, {})


def _run(command: list[str], source: Path, html: Path, environment: dict[str, str]) -> Build:
    done = subprocess.run(
        command,
        env={**os.environ, "NO_COLOR": "1", "LABCORE_STRICT_CLAIMS": "1", **environment},
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    return Build(done.returncode, done.stdout, html)


def executed(html: Path, notebook: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs that a build of the pages in `html` has cached of it."""
    with open_cache(html.parent / ".jupyter_cache") as cache:
        ran = cache.merge_match_into_notebook(nbformat.read(notebook, as_version=4))[1]
    assert any(cell.get("outputs") for cell in ran.cells), f"{notebook} printed nothing"
    return ran


def _once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[Path, Path], Build]
) -> Build:
    """The result of a build of the checkout, made once, also for parallel workers."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    kept = shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not kept.exists():
            built = build(ROOT, shared / "book")
            kept.write_text(json.dumps([built.status, built.log, str(built.html)]))
    status, log, html = json.loads(kept.read_text())
    return Build(status, log, Path(html))


@pytest.fixture(scope="session")
def strict_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The real book, built strictly from a cold cache."""
    return _once(tmp_path_factory, "book", build_book)


@pytest.fixture(scope="session")
def guide_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The teaching guide, built strictly where its links to the book lead to `strict_build`."""
    return _once(tmp_path_factory, "guide", build_guide)


@pytest.fixture(scope="session")
def book_html(strict_build: Build, guide_build: Build) -> Path:
    """The folder of the built pages, with the guide's in its folder `teaching`."""
    for build in (strict_build, guide_build):
        if build.status != 0:
            pytest.fail(f"the strict build failed:\n{build.log[-4000:]}")
    return strict_build.html
