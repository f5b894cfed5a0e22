"""Runs the quick gates and two chapters on one corner of what pyproject.toml admits.

    python scripts/matrix.py oldest|newest|gpu [--python PATH]

A corner is a Python and a release of torch. Its environment is made as a reader makes it, by
`make setup` in a clone of this commit under .cache/matrix, and stays there for the next time. How
it ended is written to scripts/corners.json, which `python -m labcore doctor` reads.
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
# gpu: what the machines with an H100 have.
CORNERS = {
    "oldest": {"python": "3.11", "torch": "2.11.0"},
    "newest": {"python": "3.14", "torch": "2.15.0"},
    "gpu": {"python": "3.12", "torch": "2.11.0"},
}
CHAPTERS = ("lion", "attention")


def run(corner: str, python: str) -> dict[str, str]:
    """Makes the corner's environment and runs its gates; returns what corners.json says of it."""
    clone = ROOT / ".cache" / "matrix" / corner
    if not clone.is_dir():
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    subprocess.run(["git", "fetch", "--quiet", "origin"], cwd=clone, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "checkout", "--quiet", "--force", commit], cwd=clone, check=True)
    environment = {**os.environ, "PYTHON": python, "TORCH": CORNERS[corner]["torch"]}
    gates = {
        "make check": ["make", "check"],
        "chapters": [".venv/bin/python", "-m", "pytest", "-q", "tests/test_chapters.py",
                     "-k", " or ".join(CHAPTERS)],
    }  # fmt: skip
    ended = {
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
    parser.add_argument("--python", help="its Python, where it is not on the PATH")
    options = parser.parse_args()
    name = "python" + CORNERS[options.corner]["python"]
    python = options.python or shutil.which(name)
    if python is None:
        sys.exit(f"{name} was not found: install it, or name it with --python=<its path>.")
    runs = json.loads(RUNS.read_text("utf-8")) if RUNS.exists() else {}
    runs[options.corner] = result = run(options.corner, python)
    RUNS.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n", "utf-8")
    print(options.corner, *(f"{key}: {value}" for key, value in result.items()), sep="\n  ")
    return int("FAILED" in result.values())


if __name__ == "__main__":
    sys.exit(main())
