"""Writes constraints.txt, the versions that the set-up installs.

    python scripts/lock.py [--upgrade | --check]

One file serves every Python and system that pyproject.toml admits; a package whose version depends
on either has one line per case, with a condition. Without an option, only lines that pyproject.toml
no longer admits change. --upgrade takes today's versions. --check writes nothing and fails if this
command would change the file or if a supported Python cannot install it. torch and triton are left
out: scripts/setup.py chooses them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.txt"
HEAD = "# Written by `make lock`. torch and triton are not here: scripts/setup.py chooses them.\n"


def resolve(path: Path, *options: str) -> None:
    """Writes the versions that pyproject.toml needs into path; those already there stay."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--extra", "all", *options, "pyproject.toml", "-o", str(path)]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("The versions cannot be resolved, the lines above say why: change pyproject.toml.")


def write(path: Path, *options: str) -> None:
    """Resolves for all Pythons and systems at once."""
    resolve(path, "--universal", "--override", "scripts/apart.txt", *options)
    path.write_text(HEAD + path.read_text("utf-8"), "utf-8")


def pythons() -> list[str]:
    """The versions of Python that pyproject.toml admits."""
    admitted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    first, end = map(int, re.findall(r"3\.(\d+)", admitted["requires-python"]))
    return [f"3.{minor}" for minor in range(first, end)]


def check() -> None:
    """Exits with a sentence if the lock is stale or a supported Python cannot install it."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "constraints.txt"
        fresh.write_text(LOCK.read_text("utf-8"), "utf-8")
        write(fresh)
        if fresh.read_text("utf-8") != LOCK.read_text("utf-8"):
            sys.exit("constraints.txt is not what pyproject.toml asks for: run `make lock`.")
        for python in pythons():
            resolve(fresh, "--python-version", python, "-c", str(LOCK))
            print(f"Python {python}: every version in constraints.txt can be installed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--upgrade", action="store_true", help="take today's versions")
    choice.add_argument("--check", action="store_true", help="write nothing, fail if it is stale")
    options = parser.parse_args()
    if options.check:
        check()
    else:
        write(LOCK, *(["--upgrade"] if options.upgrade else []))
