"""The wheel, installed in a fresh environment outside the checkout, runs a chapter.

The environment has its own labcore; the libraries come from the tests' environment through one
line of a `.pth` file, which adds that folder without the editable labcore beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from labcore.labs import leaks

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "labcore"
CHAPTER = ROOT / "book" / "lion.ipynb"

RUN = """
import json, sys
from pathlib import Path
import labcore
from labcore import claims, records

assert Path(labcore.__file__).is_relative_to(sys.prefix), labcore.__file__
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
look = nbformat.v4.new_code_cell("import labcore, sys\\nprint(labcore.__file__)")
notebook.cells.insert(0, look)
NotebookClient(notebook, timeout=120).execute()
ran = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count]
print(json.dumps({
    "here": labcore.__file__,
    "kernel": notebook.cells[0].outputs[0].text.strip(),
    "ran": len(ran) - 1,
    "claims": len(claims.load()),
    "records": len(records.load("lion")),
    "version": labcore.__version__,
}))
"""


def in_folder(command: list[str], folder: Path) -> str:
    """Runs a command as a person does who has no checkout; returns what it prints."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("LABCORE_")
    }
    environment |= {"LABCORE_STRICT_CLAIMS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release publishes: the sources, and the wheel that is built from them."""
    folder = tmp_path_factory.mktemp("dist")
    in_folder([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """labcore's wheel."""
    (built,) = dist.glob("labcore-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    in_folder([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    fresh = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(fresh), "install", "--no-deps", "-q"]
    in_folder([*pip, str(wheel)], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    libraries = sysconfig.get_path("purelib")
    (site / "libraries.pth").write_text(libraries + "\n", encoding="utf-8")
    return fresh


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    files = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files, "labcore has no files"
    assert sorted(files - inside) == []
    assert {"labcore/claims.toml", "labcore/py.typed", "labcore/course/assets/run.js"} <= inside
    assert any(name.startswith("labcore/records/") and name.endswith(".jsonl") for name in inside)


def test_the_licences_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert {"LICENSE", "THIRD_PARTY.md"} <= names


def test_downloadable_sources_hold_only_the_package(dist: Path) -> None:
    """A checkout has hidden tests besides, and whatever git does not know."""
    (archive,) = dist.glob("labcore-*.tar.gz")
    with tarfile.open(archive) as opened:
        files = {
            member.name.partition("/")[2]: content.read()
            for member in opened
            if (content := opened.extractfile(member)) is not None
        }
    package = {name for name in files if name.startswith("src/labcore/")}
    assert files.keys() - package == {
        *("LICENSE", "README.md", "THIRD_PARTY.md", "pyproject.toml"),
        *(".gitignore", "PKG-INFO"),
    }
    secrets = leaks.read_secrets(ROOT)
    assert secrets.hidden
    leaked = [
        f"{name}: {line}"
        for name, text in files.items()
        for line in leaks.found(text, secrets, open_source=name in package)
    ]
    assert leaked == []


def test_without_the_wheel_the_fresh_environment_has_no_labcore(
    python: Path, tmp_path: Path
) -> None:
    """Proves that the libraries' folder does not bring the checkout's labcore along."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    hidden = shutil.move(site / "labcore", tmp_path / "labcore-hidden")
    try:
        code = "from importlib.util import find_spec as f; print(f('labcore'), not f('torch'))"
        assert in_folder([str(python), "-c", code], tmp_path).split() == ["None", "False"]
    finally:
        shutil.move(hidden, site / "labcore")


def test_a_chapter_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    shutil.copy(CHAPTER, tmp_path / CHAPTER.name)
    said = json.loads(in_folder([str(python), "-c", RUN, CHAPTER.name], tmp_path).splitlines()[-1])
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    code = sum(cell["cell_type"] == "code" and bool("".join(cell["source"])) for cell in cells)
    environment = python.parent.parent
    assert Path(said["here"]).is_relative_to(environment)
    assert Path(said["kernel"]).is_relative_to(environment)
    assert said["ran"] == code > 0
    assert said["claims"] > 0
    assert said["records"] > 0
