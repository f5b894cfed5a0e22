"""Chapters and lab sources run under nbval, each from an empty folder.

The strict build runs every chapter too, and its tests compare the marked outputs; grading runs
every lab. So beside them nbval runs one chapter. Where grading has no sandbox, and with
LABCORE_SOAK=1, it runs all. How long one takes is among the durations that pytest prints at its
end: what else a machine does meanwhile is not the notebook's fault, so no test fails over it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from labcore.grading import sandbox

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "book").glob("*.ipynb"))
LABS = sorted((ROOT / "labs" / "source").glob("*/*.ipynb"))
ALL = sandbox.missing() != "" or os.environ.get("LABCORE_SOAK") == "1"
NOTEBOOKS = [path for path in CHAPTERS + LABS if ALL or path == ROOT / "book" / "lion.ipynb"]
CELL_SECONDS = 300  # only for a cell that never ends


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What nbval said of one notebook."""

    code: int
    ran: int
    skipped: int
    output: str


def code_cells(notebook: Path) -> int:
    """How many code cells a notebook has; an empty one is no cell for nbval."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return sum(cell["cell_type"] == "code" and bool("".join(cell["source"])) for cell in cells)


def run_notebook(notebook: Path, folder: Path) -> Outcome:
    """Runs a copy of the notebook under nbval in `folder`, which must be empty."""
    copy = folder / "run" / notebook.name
    copy.parent.mkdir()
    shutil.copy(notebook, copy)
    profile = folder / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_config.py").write_text("c.InteractiveShell.colors = 'nocolor'\n")
    report = folder / "report.xml"
    environment = os.environ | {
        "IPYTHONDIR": str(profile.parent),
        "LABCORE_STRICT_CLAIMS": "1",
        "NO_COLOR": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env"),
            *("--nbval-cell-timeout", str(CELL_SECONDS), "-p", "no:cacheprovider"),
            *(f"--rootdir={copy.parent}", f"--junitxml={report}", copy.name),
        ],
        cwd=copy.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    suite = ElementTree.parse(report).getroot().find("testsuite") if report.is_file() else None
    counts = {
        key: int(suite.get(key, 0)) if suite is not None else 0 for key in ("tests", "skipped")
    }
    return Outcome(
        code=done.returncode,
        ran=counts["tests"] - counts["skipped"],
        skipped=counts["skipped"],
        output=done.stdout[-6000:] + done.stderr[-2000:],
    )


def test_there_are_chapters() -> None:
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:file|root):\s*(book/\w+)", toc))
    names = {f"book/{path.stem}" for path in CHAPTERS}
    assert names, "there is no chapter in book/"
    assert names <= listed, f"not in _toc.yml: {sorted(names - listed)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_notebook_runs_from_an_empty_folder(path: Path, tmp_path: Path) -> None:
    outcome = run_notebook(path, tmp_path)
    assert outcome.code == 0, outcome.output
    assert outcome.ran == code_cells(path) > 0, outcome.output
    assert outcome.skipped == 0, outcome.output


def write_notebook(path: Path, *cells: str) -> Path:
    """A small notebook with these code cells."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for number, source in enumerate(cells)
    ]
    text = {"cells": code, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(text), encoding="utf-8")
    return path


def test_the_gate_sees_a_cell_that_raises(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "wrong.ipynb", "x = 1", "raise ValueError('planted')", "x")
    outcome = run_notebook(notebook, tmp_path)
    assert outcome.code != 0
    assert "planted" in outcome.output


def test_the_gate_sees_an_output_that_changed(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "says.ipynb", "# NBVAL_CHECK_OUTPUT\nprint('new')")
    text = json.loads(notebook.read_text(encoding="utf-8"))
    stored = {"output_type": "stream", "name": "stdout", "text": ["old\n"]}
    text["cells"][0] |= {"outputs": [stored], "execution_count": 1}
    notebook.write_text(json.dumps(text), encoding="utf-8")
    outcome = run_notebook(notebook, tmp_path)
    assert outcome.code != 0
    assert "old" in outcome.output and "new" in outcome.output


def test_gate_counts_cells_and_gives_each_run_an_empty_folder(tmp_path: Path) -> None:
    look = "import os; assert os.listdir('.') == ['seen.ipynb'], os.listdir('.')"
    notebook = write_notebook(tmp_path / "seen.ipynb", look, "import os", "x = os.getpid()")
    outcome = run_notebook(notebook, tmp_path)
    assert outcome.code == 0, outcome.output
    assert outcome.ran == code_cells(notebook) == 3
