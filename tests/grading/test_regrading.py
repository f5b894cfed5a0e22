"""Grading in steps, after a kill, and again: what stays, what is run anew, what tables say."""

from __future__ import annotations

import copy
import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbgrader import api

from labcore.__main__ import run
from labcore.grading import plan, report, steps
from labcore.grading.gradebook import Gradebook
from labcore.grading.plan import ClassPlan
from labcore.grading.sandbox import Limits
from labcore.grading.steps import Settings
from tests.grading.slurm import until
from tests.labs import mini
from tests.processes.test_run import gone

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("bubblewrap")]
SETTINGS = Settings(limits=Limits(cell_s=20))
STAMP = "2026-03-01 22:30:00.000001 UTC"


class Folder:
    """A checkout with the mini lab, a class's folder, and the output's."""

    def __init__(self, place: Path) -> None:
        self.root = mini.checkout(place / "checkout")
        self.release = mini.released(self.root)
        self.submissions, self.out = place / "class", place / "out"

    def hand_in(self, student: str, **texts: str) -> None:
        notebook = mini.solved(copy.deepcopy(self.release), **texts)
        mini.save(notebook, self.submissions / student / "mini" / "mini.ipynb")

    def grade(self, settings: Settings = SETTINGS) -> dict[str, report.Row]:
        rows = steps.grade(self.root, self.submissions, self.out, say=print, settings=settings)
        return {row.student: row for row in rows}

    def command(self, *words: str | Path) -> list[str]:
        return [sys.executable, "-m", "labcore", "grade", *map(str, words)]

    def results(self) -> dict[str, int]:
        folder = self.out / "queue" / "results"
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}

    def by_hand(self, student: str, cell: str, points: float | None) -> float | None:
        """Gives points by hand, where there are any to give; those that were there before."""
        with api.Gradebook(f"sqlite:///{self.out / 'course' / 'gradebook.db'}") as book:
            (token,) = (one.id for one in book.students if one.last_name == student)
            notebook = book.find_submission_notebook("mini", "mini", token)
            (grade,) = (one for one in notebook.grades if one.name == cell)
            before: float | None = grade.manual_score
        if points is not None:
            page = (ROOT / "book" / "teaching" / "policies.md").read_text(encoding="utf-8")
            program = page.partition("```python\n")[2].partition("```")[0]
            words = [str(self.out), token, "mini", cell, str(points)]
            subprocess.run([sys.executable, "-c", program, *words], check=True)
        return before


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_points_by_hand_stay_until_their_own_answer_changes(folder: Folder) -> None:
    folder.hand_in("李雷", square="def square(x):\n    return x")
    folder.hand_in("bo", square="def square(x):\n    return -x")
    assert folder.grade()["李雷"].points == 2
    before = folder.results()
    for student in ("李雷", "bo"):
        folder.by_hand(student, mini.SQUARE, 1.5)
    folder.by_hand("bo", mini.DOUBLE, 0.5)
    # bo's answer to square changes, and with it what was given for it alone.
    folder.hand_in("bo", square="def square(x):\n    return x + 1")
    rows = folder.grade()
    assert rows["李雷"].exercises == {mini.DOUBLE: 2, mini.SQUARE: 1.5}
    assert rows["bo"].exercises == {mini.DOUBLE: 0.5, mini.SQUARE: 0}
    assert rows["李雷"].flags == ()
    assert rows["bo"].flags == (
        "square-test had 1.5 manual points for an earlier answer, now withdrawn",
    )
    assert "Score: 3.5 / 5.0" in (folder.out / rows["李雷"].feedback).read_text("utf-8")
    after = folder.results()
    assert len(before.items() & after.items()) == 1, "what did not change was run again"
    # A third time nothing changes, and nothing is taken back twice.
    assert folder.grade()["bo"].exercises == {mini.DOUBLE: 0.5, mini.SQUARE: 0}
    assert folder.by_hand("bo", mini.SQUARE, None) is None
    assert folder.results() == after


def test_a_machine_that_fails_ends_the_grading(folder: Folder) -> None:
    folder.hand_in("anna")
    steps.prepare(folder.root, folder.submissions, folder.out, settings=SETTINGS, say=print)
    (job,) = (folder.out / "queue" / "jobs").iterdir()
    (folder.out / "queue" / "claims" / job.name).mkdir()  # no file: every helper fails
    with (
        steps._helpers(folder.root, folder.out, SETTINGS, 1) as keep_up,
        pytest.raises(RuntimeError, match="failed 4 times; their output above says why"),
    ):
        until("the helpers to fail", lambda: keep_up())


def test_a_token_tells_nothing_without_the_secret(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path / "checkout")

    def token(out: str) -> str:
        (tmp_path / out / "course").mkdir(parents=True, exist_ok=True)
        with Gradebook(tmp_path / out / "course", tmp_path / out / "log") as course:
            return ClassPlan(root, tmp_path / out, course).token("anna")

    assert token("a") == token("a") != token("b")


def children(pid: int) -> Iterator[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return
    for line in listed:
        yield int(line)
        yield from children(int(line))


def test_a_killed_run_is_taken_up_where_it_was(folder: Folder) -> None:
    for number in range(4):
        folder.hand_in(f"student {number}", square=f"def square(x):\n    return x * x + {number}")
    command = folder.command(folder.submissions, "--out", folder.out, "--jobs", 2)
    with subprocess.Popen(command, cwd=folder.root, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        lines = iter(first.stdout)
        while not next(lines).startswith("[1/4]"):
            pass
        family = list(children(first.pid))
        os.kill(first.pid, signal.SIGKILL)
    assert family
    kept = folder.results()
    with (folder.out / "grades.csv").open(encoding="utf-8", newline="") as file:
        assert 1 <= len(list(csv.DictReader(file))) <= len(kept) < 4
    rows = folder.grade(Settings())  # those of the command: other limits are other jobs
    assert [row.points for row in rows.values()] == [5, 2, 2, 2]
    assert kept.items() <= folder.results().items()
    assert gone(family), "what the killed run began goes on"


def test_the_steps_of_a_cluster_give_what_one_command_gives(folder: Folder) -> None:
    for number in range(3):
        folder.hand_in(f"s{number}", square=f"def square(x):\n    return x * x + {number % 2}")
    stamp = folder.submissions / "s1" / "mini" / "timestamp.txt"
    stamp.write_text(STAMP)
    roster = folder.root / "roster.csv"
    roster.write_text("student,ID\ns0,17\ns1,18\nnever came,19\n", encoding="utf-8")
    columns = folder.root / "columns.toml"
    columns.write_text(
        '[columns]\n"SIS ID" = "roster:ID"\nName = "student"\n"Mini (5)" = "points:mini"\n'
        'Percent = "percent:mini"\nAll = "total"\nLate = "late:mini"\n'
    )
    asked = ["--due", "2026-03-01T21:00+00:00", "--roster", roster, "--columns", columns]
    fill = folder.command(folder.submissions, "--only-queue", "--out", folder.out, *asked)
    subprocess.run(fill, cwd=folder.root, check=True)
    assert not folder.results()
    assert run(["grade", "--collect", str(folder.out)], folder.root) == 1
    work = folder.command("--work", folder.out)
    both = [
        subprocess.Popen(work, cwd=folder.root, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [one.communicate(timeout=300)[0] for one in both]
    assert sum(int(text.split()[0]) for text in said) == 3
    assert run(["grade", "--collect", str(folder.out)], folder.root) == 0
    with (folder.out / "export.csv").open(encoding="utf-8", newline="") as file:
        lines = [tuple(line.values()) for line in csv.DictReader(file)]
    assert lines == [
        ("17", "s0", "5", "100", "5", ""),
        ("18", "s1", "2", "40", "2", "1 h 30 min"),
        ("19", "never came", "", "", "", ""),
        ("", "s2", "5", "100", "5", ""),
    ]
    with (folder.out / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert rows["s1"]["handed_in"] == "2026-03-01 22:30:00Z" and rows["s0"]["late"] == ""


def test_a_queue_of_another_version_is_refused(folder: Folder) -> None:
    folder.hand_in("anna")
    steps.prepare(folder.root, folder.submissions, folder.out, say=print)
    mini.checkout(folder.root, lambda notebook: mini.cell(notebook, "more").update(source="x = 3"))
    with pytest.raises(ValueError, match="another version of .* the lab mini"):
        steps.work(folder.root, folder.out)
    assert not folder.results()


def test_a_change_while_it_grades_ends_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.hand_in("anna")
    real = plan.code_of
    # The helpers are processes of their own, and find the true digest.
    monkeypatch.setattr(plan, "code_of", lambda lab: real(lab)[::-1])
    with pytest.raises(ValueError, match="changed during grading; run the command again"):
        folder.grade()
    assert not folder.results()
