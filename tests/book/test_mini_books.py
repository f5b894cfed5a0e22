"""What the build itself must do, shown on tiny books under the real settings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import labcore
from tests.book import html_checks
from tests.book.mini import mini_book, notebook, write_toc
from tests.book_fixtures import build_book, executed

pytestmark = pytest.mark.long
ADDRESS = "https://github.com/someone/course"


def test_chapter_that_raises_warns_or_lacks_metadata_fails_build(tmp_path: Path) -> None:
    folder = mini_book(tmp_path / "source")
    notebook(folder / "book" / "raises.ipynb", "1 / 0")
    notebook(folder / "book" / "lacks.ipynb", "1", drop=("minutes",))
    notebook(folder / "book" / "named.ipynb", "1", slug="other")
    notebook(folder / "book" / "dead.ipynb", "1", text="[gone](missing.md) and {cite}`nobody`")
    notebook(folder / "book" / "noisy.ipynb", "import sys; print('careful', file=sys.stderr)")
    write_toc(folder)
    build = build_book(folder, tmp_path / "out")
    assert build.status != 0
    warnings = [line for line in build.log.splitlines() if "WARNING" in line]
    for page, words in {
        "raises": "Executing notebook failed",
        "lacks": "metadata.labcore is incomplete; add minutes",
        "named": "slug must be the file's name, 'named', got 'other'",
        "dead": "missing.md",
        "noisy": "stderr",
    }.items():
        assert any(page in line and words in line for line in warnings), (page, build.log)
    assert any("nobody" in line for line in warnings), build.log


@pytest.mark.parametrize("url", ["", ADDRESS])
def test_repository_links_appear_only_if_its_address_is_set(tmp_path: Path, url: str) -> None:
    folder = mini_book(tmp_path / "source", url=url)
    # A live widget, whose state would make the page heavy and load scripts from the network.
    code = """import ipywidgets
from labcore import device
print('ran', 40 + 2, device.building_book())
ipywidgets.IntSlider(description='live')"""
    notebook(folder / "book" / "one.ipynb", code)
    write_toc(folder)
    build = build_book(folder, tmp_path / "out")
    assert build.status == 0, build.log
    text = (build.html / "book" / "one.html").read_text(encoding="utf-8")
    links = html_checks.read(build.html / "book" / "one.html").links
    colab = "https://colab.research.google.com/github/someone/course/blob/main/book/one.ipynb"
    binder = "https://mybinder.org/v2/gh/someone/course/main?urlpath=lab/tree/book/one.ipynb"
    report = [link for link in links if link.startswith(f"{ADDRESS}/issues/new?title=")]
    assert (colab in links) == (binder in links) == (len(report) == 1) == bool(url)
    assert not url or "book%2Fone" in report[0]
    assert ("github.com" in text) == bool(url)
    # In both states: the download, the hidden place of the local server's button, the foot.
    assert "../_sources/book/one.ipynb" in links
    assert '<div id="labcore-run" hidden data-notebook="book/one.ipynb"></div>' in text
    assert "Executing notebook" not in build.log  # myst-nb found what `kernels` had run
    assert "commit unknown" in text and f"labcore {labcore.__version__}" in text
    assert "This page ran on" in text and "ran 42 True" in text
    assert "widget-state" not in text and "require" not in text
    index = (build.html / "book" / "index.html").read_text(encoding="utf-8")
    assert "labcore-run" not in index and "This page ran on" not in index
    # Mathematics is loaded where it is used, the figures' library nowhere here.
    assert "mathjax/tex-chtml.js" in text and "mathjax/tex-chtml.js" not in index
    assert "plotly.min.js" not in text
    assert html_checks.outside_resources(build.html) == []
    assert html_checks.dead_links(build.html) == []


def test_an_address_that_is_none_stops_the_build_with_a_sentence(tmp_path: Path) -> None:
    folder = mini_book(tmp_path / "source", url="somewhere/else")
    notebook(folder / "book" / "one.ipynb", "1")
    write_toc(folder)
    build = build_book(folder, tmp_path / "out")
    assert build.status != 0 and "https://<host>/<owner>/<name>" in build.log


def _run_times(html: Path, folder: Path) -> dict[str, float]:
    """When each notebook of the mini book ran, as it printed itself."""
    paths = (folder / "book").glob("*.ipynb")
    return {path.stem: float(executed(html, path).cells[1].outputs[0].text) for path in paths}


def test_notebook_reruns_only_when_its_imports_or_data_change(tmp_path: Path) -> None:
    copy = tmp_path / "packages" / "labcore"
    shutil.copytree(
        Path(labcore.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = {"PYTHONPATH": f"{copy.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    folder, out = mini_book(tmp_path / "source"), tmp_path / "out"
    clock = "\nimport time\n\nprint(time.time())"
    notebook(folder / "book" / "uses.ipynb", f"from labcore import timing{clock}")
    notebook(folder / "book" / "other.ipynb", f"from labcore import checks{clock}")
    write_toc(folder)

    def build() -> dict[str, float]:
        done = build_book(folder, out, **environment)
        assert done.status == 0, done.log
        return _run_times(done.html, folder)

    first = build()
    assert build() == first
    (copy / "timing.py").write_text((copy / "timing.py").read_text() + "\nCHANGED = True\n")
    second = build()
    assert second["uses"] > first["uses"] and second["other"] == first["other"]
    # Records and claims are data that any chapter may show: all run again.
    (copy / "records" / "tpu.jsonl").write_text("")
    third = build()
    assert third["uses"] > second["uses"] and third["other"] > first["other"]
