"""Fixtures of the built book: one strict build from a cold cache, shared by its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

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
    done = subprocess.run(
        [str(JUPYTER_BOOK), "build", *STRICT, "--path-output", str(output), str(source)],
        env={**os.environ, "NO_COLOR": "1", "LABCORE_STRICT_CLAIMS": "1", **environment},
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    return Build(done.returncode, done.stdout, output / "_build" / "html")


@pytest.fixture(scope="session")
def strict_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The real book, built strictly from a cold cache: once, also for parallel workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    status, log = shared / "book.status", shared / "book.log"
    output = shared / "book"
    with FileLock(shared / "book.lock"):
        if not status.exists():
            build = build_book(ROOT, output)
            log.write_text(build.log, encoding="utf-8")
            status.write_text(str(build.status))
    return Build(
        int(status.read_text()), log.read_text(encoding="utf-8"), output / "_build" / "html"
    )


@pytest.fixture(scope="session")
def book_html(strict_build: Build) -> Path:
    """The folder of the built pages."""
    if strict_build.status != 0:
        pytest.fail(f"the strict build failed:\n{strict_build.log[-4000:]}")
    return strict_build.html
