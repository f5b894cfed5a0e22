"""The labs through nbgrader: the solution gets every point, the untouched release none."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest

from labcore.grading import steps
from labcore.labs import releases
from labcore.labs.source import cell_text, nbgrader_of, read_lab
from tests.labs import mini

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SLUG = "lion"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> dict[str, dict[str, str]]:
    """What four students got for the lab on Lion."""
    source = read_lab(releases.source_paths(ROOT)[SLUG])
    release = mini.read(releases.release_path(ROOT, SLUG))
    solution = copy.deepcopy(release)
    for cell in source.notebook["cells"]:
        if nbgrader_of(cell).get("solution"):
            mini.cell(solution, cell["id"])["source"] = cell_text(cell)
    broken = copy.deepcopy(solution)
    first = next(cell for cell in broken["cells"] if nbgrader_of(cell).get("solution"))
    first["source"] = "import os\n\nos._exit(0)"
    folder = tmp_path_factory.mktemp("class")
    damaged = copy.deepcopy(solution)
    mini.cell(damaged, "imports")["source"] = (
        f"import labcore.exercises.topics.{SLUG} as lab\nimport no_such"
    )
    mini.cell(damaged, "student")["source"] = "STUDENT = 17"
    # The broken one is graded first: the others follow all the same.
    for student, notebook in {"a": broken, "b": solution, "c": release, "d": damaged}.items():
        mini.save(notebook, folder / student / f"{SLUG}.ipynb")
    out = tmp_path_factory.mktemp("out") / "grades"
    steps.grade(ROOT, folder, out, say=print)
    with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_the_solution_gets_every_point_of_every_exercise(rows: dict[str, dict[str, str]]) -> None:
    points = read_lab(releases.source_paths(ROOT)[SLUG]).points
    got = {name: float(rows["b"][f"{SLUG}: {name} ({most:g})"]) for name, most in points.items()}
    assert rows["b"]["status"] == "graded" and got == points
    assert float(rows["b"]["points"]) == float(rows["b"]["maximum"]) == sum(points.values())


def test_the_untouched_release_gets_none(rows: dict[str, dict[str, str]]) -> None:
    assert (rows["c"]["points"], rows["c"]["status"], rows["c"]["flags"]) == ("0", "graded", "")


def test_damaged_imports_cost_nothing_and_the_number_stays(rows: dict[str, dict[str, str]]) -> None:
    assert rows["d"]["points"] == rows["d"]["maximum"]
    assert (rows["b"]["number"], rows["d"]["number"]) == ("0", "17")
    assert "imports missing, put back" in rows["d"]["flags"]
    assert "import labcore" not in rows["d"]["flags"]


def test_a_broken_submission_loses_its_own_answer_alone(rows: dict[str, dict[str, str]]) -> None:
    lost = float(rows["a"]["maximum"]) - float(rows["a"]["points"])
    first = next(iter(read_lab(releases.source_paths(ROOT)[SLUG]).points.values()))
    assert lost == first and "killed the kernel" in rows["a"]["status"]
