"""A reader's progress: kept beside the copies, renewed by every check, trusted by nobody."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from labcore.__main__ import run
from labcore.exercises import Progress, load, progress
from labcore.exercises.topics import clipping, lion


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder of copies, in a process that knows of no attempt."""
    folder = tmp_path / "my"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(progress, "_results", {})
    return folder


def right(lr: float, decay: float, *, factor: float, decay_times_lr: bool) -> tuple[float, float]:
    return lr / factor, decay * factor if decay_times_lr else lr * decay


def wrong(lr: float, decay: float, *, factor: float, decay_times_lr: bool) -> tuple[float, float]:
    del decay_times_lr
    return lr / factor, decay * factor


def test_the_last_check_counts_and_outlives_the_kernel(
    mine: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for answer, said in ((wrong, "not yet, after 1"), (right, "right after 2"), (wrong, "not yet")):
        lion.TRANSFER.check(answer, seed=seed)
        monkeypatch.setattr(progress, "_results", {})  # a restarted kernel
        line = next(line for line in repr(Progress("lion")).splitlines() if "transfer" in line)
        assert said in line
    assert lion.TRANSFER.check(right, seed=seed).task == "transfer, 2 points, attempt 3"
    assert "1 of 5 tasks, 2 of 18 points" in repr(Progress("lion"))
    assert {path.name for path in mine.rglob("*.json")} == {"lion.json"}


def test_hints_and_solutions_stay_open_after_a_restart(
    mine: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert "opens after your first attempt" in lion.TRANSFER.solution().text
    lion.TRANSFER.hint()
    lion.TRANSFER.check(wrong, seed=seed)
    before = lion.TRANSFER.hint(wrong, student=0).text
    assert "Hint 2" in before
    monkeypatch.setattr(progress, "_results", {})  # a restarted kernel
    assert lion.TRANSFER.hint().text == before
    assert lion.TRANSFER.solution().code
    for _ in range(2):
        assert lion.TRANSFER.check(right, seed=seed).task.endswith("attempt 2")
    assert "Hint 3" in lion.TRANSFER.hint().text


def test_what_cannot_be_judged_is_no_attempt(mine: Path) -> None:
    for refused in (lambda lr: lr, 3):
        assert lion.TRANSFER.check(refused).kind == "refused"
    assert lion.CLINIC.check({"A": ("betas swapped", "no gradient", 1)}).kind == "refused"
    assert "after" not in repr(Progress("lion"))


def test_points_that_no_check_tests_are_not_counted(mine: Path, seed: int) -> None:
    total = sum(one.points for one in load("clipping"))
    outcome = clipping.SHARDS.check(clipping.SHARDS.reference, seed=seed)
    assert "The last 2 points are for a part that this check doesn't test" in outcome.message
    assert (
        f"1 of 4 tasks, 4 of {total} points (2 of the {total} are tested only in grading)."
        in repr(Progress("clipping"))
    )


def test_stubs_graded_cells_and_single_patients_are_no_attempts(mine: Path) -> None:
    def stub(*_: object, **__: object) -> None:
        raise NotImplementedError

    lion.TRANSFER.check(stub)
    lion.CLINIC.check({"A": ("betas swapped", "no gradient", 1)}, patient="A")
    assert "after" not in repr(Progress("lion")) and "0 of 5 tasks" in repr(Progress("lion"))
    assert json.loads((mine / "progress" / "lion.json").read_text())[1]["attempts"] == 0


@pytest.mark.parametrize("broken", ["", "{}", "[1]", '[{"name": "transfer"}]', "\xff"])
def test_a_broken_file_is_begun_anew(mine: Path, broken: str, seed: int) -> None:
    path = mine / "progress" / "lion.json"
    path.parent.mkdir()
    path.write_text(broken, encoding="latin-1")
    assert "0 of 5 tasks" in repr(Progress("lion"))
    lion.TRANSFER.check(right, seed=seed)
    assert progress.kept(mine.parent)["lion"][1].passed


def test_elsewhere_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    lion.TRANSFER.check(right, seed=seed)
    assert not [*tmp_path.iterdir()]


def test_the_command_lists_the_labs_that_were_begun(
    mine: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    assert run(["progress"], mine.parent) == 0
    assert "No lab was begun" in capsys.readouterr().out
    lion.TRANSFER.check(right, seed=seed)
    assert run(["progress"], mine.parent) == 0
    said = capsys.readouterr().out
    assert "lion: 1 of 5 tasks, 2 of 18 points" in said and "transfer: ✓ right after 1" in said


def test_a_folder_that_cannot_be_written_costs_only_the_record(mine: Path, seed: int) -> None:
    (mine / "progress").write_text("a file in the way")
    assert lion.TRANSFER.check(right, seed=seed).passed
    assert "1 of 5 tasks" in repr(Progress("lion"))


@pytest.mark.parametrize("slug", ["lion", "inflight"])
def test_every_task_has_its_points(slug: str) -> None:
    for one in load(slug):
        assert one.points > 0 and one.id.partition(".")[2].replace("_", " ") in repr(Progress(slug))


def test_in_a_notebook_the_head_follows_and_missing_names_are_explained(mine: Path) -> None:
    cells = [
        "from labcore.exercises import Progress\n\nProgress('lion')",
        "from labcore.exercises.topics import lion\n\nlion.TRANSFER.check(transfer)",
        "def transfer(lr, decay, *, factor, decay_times_lr):\n    return torch.tensor(lr), decay",
        "lion.TRANSFER.check(transfer)",
        "lion.TRANSFER.check(lambda lr, decay, *, factor, decay_times_lr: (lr, decay))",
        "def deeper():\n    return lion.TRANSFER.check(nothing)\n\n\ndeeper()",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    NotebookClient(
        notebook, allow_errors=True, resources={"metadata": {"path": str(mine)}}
    ).execute()
    head, early, _, late, _, deep = (nbformat.from_dict(cell) for cell in notebook.cells)
    assert "not yet, after 1 attempt" in head.outputs[0].data["text/html"]
    assert early.outputs[0].ename == "NameError" and len(early.outputs[0].traceback) == 1
    assert "transfer is not defined yet: run the cell above" in early.outputs[0].traceback[0]
    assert (
        "The module `torch` is not imported: run the lab's import cell"
        in late.outputs[0].data["text/plain"]
    )
    assert (
        "Not judged, not counted as an attempt · transfer, 2 points<"
        in late.outputs[0].data["text/html"]
    )
    assert len(deep.outputs[0].traceback) > 1  # another fault keeps its traceback
