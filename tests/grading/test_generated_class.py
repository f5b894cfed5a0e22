"""A class of the lab on Lion: each student gets, exercise by exercise, what was written for.

6 students; LABCORE_SOAK=1: 200, which may take 25 minutes on two cores.
"""

from __future__ import annotations

import csv
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from labcore.device import seed_from_environment
from labcore.grading import steps
from labcore.labs import releases
from labcore.labs.source import read_lab
from tests.grading.generated_class import EXERCISES, SLUG, WORTH, Made, generated, mistakes, runs
from tests.labs import mini

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SOAK = os.environ.get("LABCORE_SOAK") == "1"
COUNT = 200 if SOAK else 6
MOST_MINUTES = 25.0  # on two cores


@dataclass(frozen=True, kw_only=True)
class Class:
    """What was handed in, what came of it, and the minutes that it took."""

    made: list[Made]
    rows: dict[str, dict[str, str]]
    minutes: float


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> Class:
    """One grading of them all."""
    asked = seed_from_environment()
    seed = secrets.randbelow(2**31) if asked is None else asked
    print(f"LABCORE_SEED={seed}")
    made = list(generated(mini.read(releases.release_path(ROOT, SLUG)), COUNT, seed))
    folder = tmp_path_factory.mktemp("class")
    for one in made:
        mini.save(one.notebook, folder / one.student / f"{SLUG}.ipynb")
    out = tmp_path_factory.mktemp("out") / "grades"
    begin = time.monotonic()
    steps.grade(ROOT, folder, out, say=print)
    minutes = (time.monotonic() - begin) / 60
    with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    return Class(made=made, rows=rows, minutes=minutes)


def test_each_student_gets_the_points_of_what_was_written(graded: Class) -> None:
    columns = read_lab(releases.source_paths(ROOT)[SLUG]).points
    different = {}
    for one in graded.made:
        row = graded.rows[one.student]
        got = {name: float(row[f"{SLUG}: {name} ({most:g})"]) for name, most in columns.items()}
        if got != one.points or row["status"] != "graded" or row["number"] != str(one.number):
            different[one.student] = (one.written, one.number, got, row["status"])
    assert not different
    assert len(graded.rows) == COUNT


def test_nobody_who_wrote_an_answer_is_suspected(graded: Class) -> None:
    assert {row["student"]: row["flags"] for row in graded.rows.values() if row["flags"]} == {}


@pytest.mark.skipif(not SOAK, reason="LABCORE_SOAK=1 grades a class of 200")
def test_a_class_of_200_is_graded_in_time(graded: Class) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"{COUNT} notebooks in {graded.minutes:.1f} minutes on {cores} cores")
    assert graded.minutes <= MOST_MINUTES * max(1.0, 2 / cores)


def test_a_class_of_200_makes_each_mistake_and_is_what_it_says(seed: int) -> None:
    """By the functions themselves, against what grading uses least: a plain comparison."""
    made = list(generated(mini.read(releases.release_path(ROOT, SLUG)), 200, seed))
    every = {(name, kind) for name, one in EXERCISES.items() for kind in one.wrong}
    assert mistakes(made) == every
    assert len({one.student for one in made}) == 200
    for name, exercise in EXERCISES.items():
        for one in made[:60]:
            points = one.points[f"{name}-test"]
            assert points in (0.0, WORTH[name])
            if one.written[name] in ("right", *exercise.wrong):
                outcome = exercise.judge(
                    [runs(one, name)(**case) for case in exercise.numbered_cases(3, one.number)],
                    seed=3,
                    student=one.number,
                )
                wanted = "" if one.written[name] == "right" else one.written[name]
                assert (outcome.passed, outcome.mistake) == (points > 0, wanted), one.written
    sums = {sum(one.points.values()) for one in made}
    assert min(sums) < 4 and max(sums) > 14 and len(sums) > 8
