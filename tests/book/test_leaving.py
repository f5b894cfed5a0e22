"""Jupyter Book 1 can be left: Sphinx alone, with _config.yml's settings, builds the same book."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.book.mini import mini_book, notebook, write_toc
from tests.book_fixtures import JUPYTER_BOOK, STRICT, build_book

pytestmark = pytest.mark.long
OWN = "'jupyter_book', "  # the extension, which only declares two settings for LaTeX


def pages(html: Path) -> dict[str, bytes]:
    """Every file of a built book; .buildinfo holds a digest of the settings alone."""
    found = (path for path in html.rglob("*") if path.is_file() and path.name != ".buildinfo")
    return {path.relative_to(html).as_posix(): path.read_bytes() for path in found}


def sphinx(folder: Path, output: Path, name: str) -> dict[str, bytes]:
    """What Sphinx builds, strictly, beside the book that Jupyter Book built into output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-b", "html", *STRICT),
            *("-d", str(output / name), str(folder), str(output / "_build" / name)),
        ],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return pages(output / "_build" / name)


def test_sphinx_alone_builds_the_same_book(tmp_path: Path) -> None:
    folder, output = mini_book(tmp_path / "source"), tmp_path / "out"
    entry = "@article{one, title={Title}, author={Author}, journal={Journal}, year={2020}}"
    (folder / "book" / "references.bib").write_text(entry, encoding="utf-8")
    text = "See [the start](index.md) and {cite}`one`: $x^2$.\n\n```{bibliography}\n```"
    code = "import ipywidgets\nprint('one')\nprint('two')\nipywidgets.IntSlider()"
    notebook(folder / "book" / "chapter.ipynb", code, text=text)
    write_toc(folder)
    build = build_book(folder, output)
    assert build.status == 0, build.log

    subprocess.run([str(JUPYTER_BOOK), "config", "sphinx", str(folder)], check=True)
    settings = (folder / "conf.py").read_text(encoding="utf-8")
    assert OWN in settings
    (folder / "conf.py").write_text(settings.replace(OWN, ""), encoding="utf-8")
    book = pages(build.html)
    assert "book/chapter.html" in book
    assert sphinx(folder, output, "same") == book

    # A setting that conf.py lacks is seen.
    less, count = re.subn(r"^html_css_files = .*\n", "", settings, flags=re.MULTILINE)
    assert count == 1
    (folder / "conf.py").write_text(less, encoding="utf-8")
    assert sphinx(folder, output, "less")["book/chapter.html"] != book["book/chapter.html"]
