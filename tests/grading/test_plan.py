"""What a class's points depend on, derived from imports."""

import shutil
from pathlib import Path

import pytest

from labcore.grading import plan
from labcore.labs.releases import source_paths
from labcore.labs.source import read_lab
from labcore.records import hashes

ROOT = Path(__file__).resolve().parents[2]
LABS = list(source_paths(ROOT).values())


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_the_judge_and_the_exercises_decide(path: Path) -> None:
    names = plan.deciding_modules(path)
    judge = ("judged", "judging", "sandbox", "session", "references")
    decides = {f"labcore.grading.{name}" for name in judge}
    assert decides | {f"labcore.exercises.topics.{path.stem}"} <= set(names)
    assert [name for name in names if name.split(".")[1:2] in (["ui"], ["book"], ["course"])] == []


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, whose files the digest reads."""
    copy = tmp_path / "labcore"
    shutil.copytree(hashes.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(hashes, "PACKAGE", copy)
    monkeypatch.setattr(plan, "JUDGE", copy / "grading" / "judged.py")
    plan.deciding_modules.cache_clear()
    yield copy
    plan.deciding_modules.cache_clear()


@pytest.mark.parametrize(
    ("edited", "counts"),
    [
        ("ui/theme.py", False),
        ("ui/figures/lion.py", False),
        ("book/assets/twin.css", False),
        ("course/doctor.py", False),
        ("grading/report.py", False),
        ("exercises/topics/lion/step.py", True),
        ("exercises/core.py", True),
        ("grading/session.py", True),
        ("labs/source.py", True),
    ],
)
def test_an_edit_counts_where_it_can_change_points(copied: Path, edited: str, counts: bool) -> None:
    lab = read_lab(next(path for path in LABS if path.stem == "lion"))
    before = plan.code_of(lab)
    path = copied / edited
    path.write_text(path.read_text("utf-8") + "\nEDITED = 1\n", "utf-8")
    assert (plan.code_of(lab) != before) is counts
