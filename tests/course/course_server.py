"""A small checkout and the course's real server on it, for the tests of the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKEN = "a-token-for-the-tests"
CONFIG = 'title: Mini\nrepository:\n  url: ""\nexecute:\n  execute_notebooks: "off"\n'
TOC = "format: jb-book\nroot: book/index\nchapters:\n- file: book/lion\n"


def notebook(*cells: str) -> str:
    """A notebook with a title and these code cells."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Lion"]}
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    listed = [title] + [code | {"id": f"c{i}", "source": [text]} for i, text in enumerate(cells)]
    whole = {
        "cells": listed,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole)


def make_checkout(folder: Path) -> Path:
    """A book of two pages, one of them a notebook."""
    (folder / "book").mkdir(parents=True)
    (folder / "src" / "labcore").mkdir(parents=True)
    (folder / "_config.yml").write_text(CONFIG, "utf-8")
    (folder / "_toc.yml").write_text(TOC, "utf-8")
    (folder / "book" / "index.md").write_text("# Index\n", "utf-8")
    (folder / "book" / "lion.ipynb").write_text(notebook("x = 1", "x + 1"), "utf-8")
    return folder


def add_guide(root: Path) -> None:
    """A teaching guide of one page, the second book of the checkout at root."""
    guide = root / "book" / "teaching"
    guide.mkdir()
    config = "sphinx:\n  config:\n    html_title: Mini guide\n"
    (guide / "_config.yml").write_text(config, "utf-8")
    (guide / "_toc.yml").write_text("format: jb-book\nroot: index\n", "utf-8")
    (guide / "index.md").write_text("# Teaching\n", "utf-8")


@dataclass
class Answer:
    """What the server answered; redirects are not followed."""

    status: int
    headers: dict[str, str]
    text: str
    cookies: dict[str, str] = field(default_factory=dict)


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object, **options: object) -> None:
        return None


@dataclass
class Course:
    """A running course."""

    root: Path
    port: int
    process: subprocess.Popen[str]
    cookies: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        path: str,
        *,
        body: object = None,
        token: bool = True,
        method: str | None = None,
        **headers: str,
    ) -> Answer:
        """One request; the cookies that the course set are sent back, unlike the token."""
        address = f"http://127.0.0.1:{self.port}{path}"
        if token:
            headers["Authorization"] = f"token {TOKEN}"
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, headers=headers, method=method)
        opener = urllib.request.build_opener(_Stay)
        try:
            with contextlib.closing(opener.open(request, timeout=120)) as answer:
                return _answer(answer)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                return _answer(error)

    def wait_for_book(self, seconds: float = 300) -> None:
        """Until the build is done."""
        end = time.monotonic() + seconds
        while json.loads(self.ask("/book/_labcore/progress").text)["state"] == "building":
            if time.monotonic() > end:
                raise RuntimeError(f"no book: {(self.root / '_build' / 'course.log').read_text()}")
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        """The server and all below it."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]


def _answer(answer: object) -> Answer:
    headers = answer.headers  # type: ignore[attr-defined]
    cookies = {}
    for line in headers.get_all("Set-Cookie") or ():
        name, _, rest = line.partition("=")
        cookies[name] = rest.partition(";")[0]
    text = answer.read().decode("utf-8", "replace")  # type: ignore[attr-defined]
    return Answer(answer.status, {k.lower(): v for k, v in headers.items()}, text, cookies)  # type: ignore[attr-defined]


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_course(root: Path, *options: str) -> Iterator[Course]:
    """The course's server on the checkout at root, until the block ends."""
    port = free_port()
    environment = os.environ | {"JUPYTER_TOKEN": TOKEN, "NO_BROWSER": "1", "NO_PROXY": "127.0.0.1"}
    environment["JUPYTER_CONFIG_DIR"] = str(root / ".jupyter-of-the-test")
    with subprocess.Popen(
        [sys.executable, "-m", "labcore", "course", "--port", str(port), *options],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        course = Course(root, port, process)
        try:
            said = ""
            while "JupyterLab:" not in said:
                line = process.stdout.readline() if process.stdout else ""
                said += line
                if not line and process.poll() is not None:
                    raise RuntimeError(f"the course did not start: {said}")
            yield course
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.communicate(timeout=120)
                except subprocess.TimeoutExpired:
                    process.kill()
