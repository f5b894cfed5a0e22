"""Every lab as grading runs it: its own solution gets every point, its release none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labcore.grading.intake.submissions import mend
from labcore.grading.judged import Judged, run_and_judge
from labcore.grading.sandbox import Limits
from labcore.labs import releases
from labcore.labs.source import Lab, cell_text, nbgrader_of, read_lab
from tests.labs import mini

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("bubblewrap")]
ROOT = Path(__file__).resolve().parents[2]
SOURCES = releases.source_paths(ROOT)


def tried(lab: Lab, notebook: dict[str, Any], seed: int) -> Judged:
    release = mini.read(releases.release_path(ROOT, lab.metadata.slug))
    mended = mend(notebook, release)
    assert mended.changes == ()
    return run_and_judge(lab, mended.notebook, number=seed, limits=Limits(wall_s=900))


@pytest.mark.parametrize("slug", SOURCES)
def test_a_solution_gets_every_point_and_a_stub_none(slug: str, seed: int) -> None:
    lab = read_lab(SOURCES[slug])
    release = mini.read(releases.release_path(ROOT, slug))
    solution = mini.read(releases.release_path(ROOT, slug))
    for cell in lab.notebook["cells"]:
        if nbgrader_of(cell).get("solution"):
            mini.cell(solution, cell["id"])["source"] = cell_text(cell)
        if cell["id"] == "student":
            for one in (release, solution):
                mini.cell(one, "student")["source"] = f"STUDENT = {seed}"
    right, nothing = tried(lab, solution, seed), tried(lab, release, seed)
    assert right.errors == {} and right.problem == "" and not right.stopped and not right.died
    assert nothing.errors.keys() == lab.points.keys() and not nothing.unchecked
    assert not nothing.concerns
    # A clinic's diagnoses are asked for in the course's own solution of it.
    assert all("STUDENT" not in concern for concern in right.concerns)
