"""A new chapter passes what every chapter must, and nothing that exists is overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labcore.course import new_chapter

ROOT = Path(__file__).resolve().parents[2]
# Mypy's cache is taken along: it knows all that is not new.
MADE = ("__pycache__", ".git", ".venv*", "_build", "my", ".[ipr]*_cache", ".coverage*")
# What asks something of every chapter and lab, and the sample's own tests.
ASKED = [
    "tests/noise_scale",
    "tests/ui/figures/test_noise_scale.py",
    "tests/benchmarks/test_noise_scale.py",
    "tests/exercises/topics/test_noise_scale.py",
    "tests/exercises/test_every_exercise.py",
    "tests/benchmarks/test_every_slug.py",
    "tests/labs/test_form.py",
    "tests/labs/test_releases.py",
    "tests/book/test_teaching.py",
    "tests/test_house.py",
    "tests/test_claims.py",
]
# Not the other chapters' own exercises, labs and records again.
ASKED_BY = "noise_scale or test_house or test_teaching or test_releases"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT, tmp_path / "course", ignore=shutil.ignore_patterns(*MADE))


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_new_chapter_passes_what_every_chapter_must(checkout: Path) -> None:
    before = (checkout / "README.md").read_text("utf-8")
    (checkout / "README.md").write_text(before + "\nA SLUG and a TITLE.\n", "utf-8")
    new_chapter.write(checkout, "noise_scale", "Noise: how long to average")
    assert (checkout / "README.md").read_text("utf-8").endswith("A SLUG and a TITLE.\n")
    (checkout / "README.md").write_text(
        (checkout / "README.md").read_text("utf-8").removesuffix("\nA SLUG and a TITLE.\n"), "utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    for command in (
        ["git", "init", "-q"],  # for the tests that ask git for the files
        ["git", "add", "-A"],
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy", "--platform=linux"],
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not long",
            "-k",
            ASKED_BY,
            *ASKED,
        ],
    ):
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize(
    ("slug", "title", "sentence"),
    [
        ("clipping", "", "slug must be new, got 'clipping'"),
        ("processes", "", "slug must be new, .* has src/labcore/processes"),
        ("timing", "", "slug must be new, got 'timing', .*src/labcore/timing.py"),
        ("class", "", "slug must be words"),
        ("Noise", "", "slug must be words"),
        ("noise", 'a "quote"', "title must have no quote"),
    ],
)
def test_what_exists_is_never_overwritten(
    checkout: Path, slug: str, title: str, sentence: str
) -> None:
    before = contents(checkout)
    with pytest.raises(ValueError, match=sentence):
        new_chapter.write(checkout, slug, title)
    assert contents(checkout) == before
