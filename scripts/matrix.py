"""Tests the course on one corner of the versions that pyproject.toml admits.

    python scripts/matrix.py oldest|newest|gpu|colab [--python PATH]

A corner is a Python and a release of torch. `make setup` makes its environment, as a reader would,
in a clone of this commit under .cache/matrix, where the next run finds it again. The corner then
runs `make check` and two chapters with their labs. The `colab` corner instead installs the packages
of Colab's machines and labcore from the clone (not by a notebook's first cell, and with pip's
default build of torch), and runs every chapter and lab: Colab lacks the tools that the gates need.
scripts/corners.json gets the result, and `python -m labcore doctor` reads it.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "scripts" / "corners.json"
# gpu: the versions on the machines with an H100.
CORNERS = {
    "oldest": {"python": "3.11", "torch": "2.11.0"},
    "newest": {"python": "3.14", "torch": "2.15.0"},
    "gpu": {"python": "3.12", "torch": "2.11.0"},
    "colab": {"python": "3.13", "torch": "2.11.0"},
}
IMAGE = "tests/images/colab.txt"
CHAPTERS = "lion or attention"


def make_image(clone: Path, python: str, torch: str) -> None:
    """Installs Colab's packages, then labcore with the extra that a first cell asks for."""
    lines = (clone / IMAGE).read_text("utf-8").splitlines()
    apart = ("#", "python==", "torch==", "triton==")
    shipped = [line for line in lines if line and not line.startswith(apart)]
    pip = [".venv/bin/python", "-m", "pip", "install", "--quiet"]
    for command in (
        [python, "-m", "venv", ".venv"],
        [*pip, f"torch=={torch}"],
        [*pip, *shipped],
        [*pip, "-e", ".[labs]", "nbval", "pytest"],
    ):
        subprocess.run(command, cwd=clone, check=True)


def run(corner: str, python: str) -> dict[str, str]:
    """Makes the corner's environment and runs its gates; returns its entry for corners.json."""
    clone = ROOT / ".cache" / "matrix" / corner
    if not clone.is_dir():
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    subprocess.run(["git", "fetch", "--quiet", "origin"], cwd=clone, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "checkout", "--quiet", "--force", commit], cwd=clone, check=True)
    environment = {**os.environ, "PYTHON": python, "TORCH": CORNERS[corner]["torch"]}
    # No corner builds the book or grades, so nbval runs all notebooks.
    chapters = ["env", "LABCORE_SOAK=1", ".venv/bin/python", "-m", "pytest", "-q"]
    chapters += ["tests/test_chapters.py"]
    if corner == "colab":
        make_image(clone, python, CORNERS[corner]["torch"])
        # Some of its packages are older than its Python, which warns about them. The tests' own
        # fixtures need more than Colab has.
        gates = {"chapters": [*chapters, "--noconftest", "-o", "filterwarnings=default"]}
    else:
        gates = {"make check": ["make", "check"], "chapters": [*chapters, "-k", CHAPTERS]}
    ended = {"make check": "not run"} | {
        name: "passed"
        if subprocess.run(gate, cwd=clone, env=environment).returncode == 0
        else "FAILED"
        for name, gate in gates.items()
    }
    return {**CORNERS[corner], "date": datetime.date.today().isoformat(), **ended}


def main() -> int:
    """Runs one corner, records how it ended, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corner", choices=CORNERS)
    parser.add_argument("--python", help="its Python, if it is not on the PATH")
    options = parser.parse_args()
    name = "python" + CORNERS[options.corner]["python"]
    python = options.python or shutil.which(name)
    if python is None:
        sys.exit(f"{name} was not found: install it, or name it with --python=<its path>.")
    result = run(options.corner, python)
    # Read only now, because another corner may have ended since this one began.
    runs = json.loads(RUNS.read_text("utf-8")) if RUNS.exists() else {}
    runs[options.corner] = result
    RUNS.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n", "utf-8")
    print(options.corner, *(f"{key}: {value}" for key, value in result.items()), sep="\n  ")
    return int("FAILED" in result.values())


if __name__ == "__main__":
    sys.exit(main())
