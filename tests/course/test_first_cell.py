"""A notebook's first cell: it installs labcore where that is missing, or says why it could not.

pip is played by a module of that name, except in the last test.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from labcore import device
from labcore.labs.first_cell import first_cell

ADDRESS = "https://code.example.org/someone/course"
# labcore is found by an import, and not by the cell that looks for it.
HIDDEN = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "labcore" else real(name)
"""
PIP = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
(here / "asked.json").write_text(json.dumps(sys.argv[1:]))
print((here / "says.txt").read_text(), file=sys.stderr)
sys.exit(int((here / "code.txt").read_text()))
"""
# What pip 24.1 (Colab's) and 26.3 say, shortened.
NO_NETWORK = """\
  error: subprocess-exited-with-error

  × git clone --filter=blob:none --quiet https://code.example.org/someone/course did not run
  │ exit code: 128
  ╰─> [1 lines of output]
      fatal: unable to access 'https://code.example.org/': Could not resolve host: code.example.org
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
error: subprocess-exited-with-error"""
FAILURES = {
    "python": (
        "ERROR: Package 'labcore' requires a different Python: 3.15.0 not in '<3.15,>=3.11'",
        "requires a different Python: 3.15.0 not in '<3.15,>=3.11'",
    ),
    "network": (NO_NETWORK, "Could not resolve host: code.example.org"),
    "disk": (
        "WARNING: a cache\nERROR: Could not install packages due to an OSError: [Errno 28] No "
        "space left on device\n",
        "No space left on device",
    ),
    "torch": (
        "ERROR: Cannot install labcore and torch==2.10.0 because these package versions have "
        "conflicting dependencies.\nERROR: ResolutionImpossible: for help visit https://pip",
        "Cannot install labcore and torch==2.10.0 because",
    ),
    "pip": ("/usr/bin/python: No module named pip", "No module named pip"),
}


@pytest.fixture
def pip(tmp_path: Path) -> Path:
    """The folder of the pip that is played; says.txt and code.txt in it are the answer."""
    folder = tmp_path / "played" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(PIP)
    answer(folder, "", 0)
    return folder


def answer(pip: Path, says: str, code: int) -> None:
    (pip / "says.txt").write_text(says)
    (pip / "code.txt").write_text(str(code))


def run(code: str, pip: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [str(pip.parent)] if pip else []
    path += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def test_it_is_short_and_leaves_pip_alone_when_labcore_is_found(pip: Path) -> None:
    code = first_cell("")
    assert len(code.splitlines()) <= 20
    done = run(code, pip)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == device.badge()
    assert not (pip / "asked.json").exists()


def test_it_asks_for_the_labs_extra_and_keeps_torch_and_triton(pip: Path) -> None:
    done = run(HIDDEN + first_cell(ADDRESS), pip)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == device.badge()
    kept = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in ("torch", "triton")
        if importlib.util.find_spec(name)
    ]
    asked = json.loads((pip / "asked.json").read_text())
    assert asked == ["install", "-q", *kept, f"labcore[labs] @ git+{ADDRESS}"]


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_installation_ends_in_one_sentence_with_its_cause(pip: Path, failure: str) -> None:
    says, cause = FAILURES[failure]
    answer(pip, says, 1)
    last = sentence(run(HIDDEN + first_cell(ADDRESS), pip))
    assert last.startswith("Stop: labcore is missing (")
    assert cause in last
    assert last.endswith("): mend that and run the cell again, or use `make course`")


def test_without_an_address_the_sentence_says_what_to_write(pip: Path) -> None:
    answer(pip, "ERROR: Invalid URL 'git+'", 1)
    last = sentence(run(HIDDEN + first_cell(""), pip))
    assert "REPOSITORY needs the course's URL" in last
    assert "git+" not in last


def test_a_notebook_shows_the_sentence_alone_and_goes_no_further(
    pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(pip, *("ERROR: no room", 1))
    monkeypatch.setenv("PYTHONPATH", str(pip.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    cells = [HIDDEN, first_cell(ADDRESS), "print('went on')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (shown,) = notebook.cells[1].outputs
    assert shown["output_type"] == "error"
    assert shown["traceback"] == [shown["evalue"]]
    assert "(ERROR: no room)" in shown["evalue"]
    assert notebook.cells[2].outputs == []


BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    name = "labcore-0.1.dist-info"
    (Path(folder) / name).mkdir()
    lines = ["Metadata-Version: 2.1", "Name: labcore", "Version: 0.1", "Requires-Python: <3"]
    (Path(folder) / name / "METADATA").write_text("\\n".join([*lines, "Provides-Extra: labs", ""]))
    return name

def build_wheel(folder, settings=None, metadata=None):
    raise RuntimeError("nothing is built for a Python that does not fit")
"""


# setuptools listens to importlib.util for "pip", and changes which distutils is imported later.
@pytest.mark.skipif(not PathFinder.find_spec("pip"), reason="this environment has no pip")
def test_what_pip_itself_says_of_another_python_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "backend.py").write_text(BACKEND)
    table = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (tmp_path / "pyproject.toml").write_text(table)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    last = sentence(run(HIDDEN + first_cell(f"file://{tmp_path}")))
    assert "ERROR: Package 'labcore' requires a different Python" in last
    assert "not in '<3'" in last
