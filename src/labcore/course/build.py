"""Builds the books next to the local server, in one process whose log shows the progress."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

__all__ = ["BookBuild", "Progress"]

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
READING = re.compile(r"^reading sources\.\.\. \[ *\d+%\] (\S+)")
TOC_ENTRY = re.compile(r"^\s*(?:-\s+)?(?:file|root):", re.MULTILINE)
TAIL = 30
# Both books in one process; the second, the teaching guide, takes seconds and lies in the first.
BOOKS = """
import runpy
from jupyter_book.cli.main import main
main(["build", "."], standalone_mode=False)
runpy.run_module("labcore.book.teaching.guide", run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the build is.

    state: "building", "ready" or "failed". available: whether a book exists. page, pages: how many
    pages have been read, and of how many. lines: the end of the log.
    """

    state: str
    available: bool
    page: int
    pages: int
    lines: tuple[str, ...]


class BookBuild:
    """Builds the books of the checkout at root in `_build/html` if their sources have changed.

    command: what builds the book, for tests. The default is Jupyter Book without its strict mode:
    a chapter that fails shows the error on its page, and the others are still built.
    """

    def __init__(self, root: Path, command: Sequence[str] | None = None) -> None:
        self.root = root
        self.html = root / "_build" / "html"
        self.log = root / "_build" / "course.log"
        self._stamp = root / "_build" / "course-sources"
        self._command = list(command or (sys.executable, "-c", BOOKS))
        self._process: subprocess.Popen[bytes] | None = None
        self._had_book = (self.html / "index.html").is_file()
        self._building = ""
        self._failed = False

    def sources(self) -> str:
        """A digest of everything that the pages are made from."""
        files = [self.root / "_config.yml", self.root / "_toc.yml"]
        for folder in ("book", "labs/release", "src/labcore"):
            files += sorted((self.root / folder).rglob("*"))
        digest = hashlib.sha256()
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                digest.update(path.relative_to(self.root).as_posix().encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def start(self) -> bool:
        """Starts a build unless the book is up to date; returns whether it did."""
        self._building = self.sources()
        if self._had_book and self._stamp.is_file() and self._stamp.read_text() == self._building:
            return False
        self.log.parent.mkdir(exist_ok=True)
        # Run at low priority, because the reader works in JupyterLab meanwhile.
        polite = ["nice", "-n", "10"] if shutil.which("nice") else []
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*polite, *self._command],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return True

    def progress(self) -> Progress:
        """The current progress of the build."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._failed = code != 0 or not (self.html / "index.html").is_file()
            if not self._failed:
                self._had_book = True
                self._stamp.write_text(self._building)
        lines = self._lines()
        read = {match[1] for line in lines if (match := READING.match(line))}
        tocs = [self.root / name for name in ("_toc.yml", "book/teaching/_toc.yml")]
        text = "\n".join(toc.read_text(encoding="utf-8") for toc in tocs if toc.is_file())
        pages = len(TOC_ENTRY.findall(text))
        state = "building" if self._process else "failed" if self._failed else "ready"
        return Progress(
            state=state,
            available=self._had_book,
            page=min(len(read), pages),
            pages=pages,
            lines=tuple(lines[-TAIL:]),
        )

    def _lines(self) -> list[str]:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [
            line for line in ESCAPES.sub("", text.replace("\r", "\n")).split("\n") if line.strip()
        ]

    def stop(self) -> None:
        """Ends a running build and all its descendants; kernels run in sessions of their own."""
        if self._process is None or self._process.poll() is not None:
            return
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            _quietly(process.terminate)
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=3)
        for process in alive:
            _quietly(process.kill)
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _quietly(end: Callable[[], None]) -> None:
    try:
        end()
    except psutil.NoSuchProcess:
        return
