"""`make grade`: every submission gets its row, whatever it does, and none stops the others."""

from __future__ import annotations

import copy
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from nbgrader.converters import GenerateAssignment

from labcore.__main__ import run
from labcore.grading import sandbox, steps
from labcore.grading.gradebook import Gradebook
from labcore.grading.judged import GradingError
from labcore.grading.queue import locked
from labcore.grading.sandbox import Limits
from labcore.grading.steps import Settings
from tests.labs import mini

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(limits=Limits(cell_s=20))  # a busy machine needs some for a plain cell
EXERCISES = [f"mini: {mini.DOUBLE} (2)", f"mini: {mini.SQUARE} (3)"]
STUBBORN = """
import time
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
CHEATS = """
import sys
print("careful", file=sys.stderr)
def square(x):
    print("<script>alert(1)</script>")
    return x * x
display_html = None
from IPython.display import HTML, display
display(HTML("<script>alert(2)</script><b>shown</b>"))
"""
EVIL = """<script>alert(3)</script> <img src="https://evil.example/seen.png" onerror="alert(4)">
<meta http-equiv="refresh" content="0; url=https://evil.example"> and `<b` in code"""
FIGURE = """
from IPython.display import Markdown, display
display({"application/vnd.plotly.v1+json": {"data": []}, "text/html": "empty"}, raw=True)
display(Markdown("Prose " + "with `code`."))
display({"text/plain": "task 1", "text/html": "<table><tr><td>1</td></tr></table>"}, raw=True)
"""


# The answer is right where it is called; its default and its last line need what was imported.
SHADOWS = """
def double(x, two=math.floor(2.5)):
    return two * x
math = "mine"
"""


@dataclass(frozen=True, kw_only=True)
class Class:
    """A class that was graded: what came out, what was said, and the tree's hash."""

    rows: dict[str, dict[str, str]]
    out: Path
    said: list[str]
    before: str
    after: str


def page_of(graded: Class, student: str) -> str:
    return (graded.out / graded.rows[student]["feedback"]).read_text("utf-8")


def tree(folder: Path) -> str:
    """A hash of every name, content and time of change below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.lstat().st_mtime_ns}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def without(*names: str) -> Callable[[mini.Notebook], mini.Notebook]:
    def change(notebook: mini.Notebook) -> mini.Notebook:
        notebook["cells"] = [c for c in notebook["cells"] if c["id"] not in names]
        return notebook

    return change


def skipped(notebook: mini.Notebook) -> mini.Notebook:
    for one in notebook["cells"]:
        one["metadata"]["tags"] = ["skip-execution", "raises-exception"]
    return notebook


def eased(notebook: mini.Notebook) -> mini.Notebook:
    mini.cell(notebook, "square-test").update(source="3")
    mini.cell(notebook, "square-test")["metadata"]["nbgrader"]["points"] = 300
    return notebook


def hidden_math(notebook: mini.Notebook) -> None:
    """Hidden tests that use a name which a plain cell imports; a figure and a formula."""
    test = mini.cell(notebook, "double-test")
    test["source"] = test["source"].replace("double(4) == 8", "double(math.sqrt(16)) == 8")
    prose = {"cell_type": "markdown", "id": "prose", "metadata": {}}
    notebook["cells"][2:2] = [
        prose | {"source": "## Twice <b>as</b> much\n\n$2 \\cdot \\eta^{n+1}$ of `$HOME`"},
        mini.code("figure", FIGURE),
    ]


def told(notebook: mini.Notebook, text: str) -> mini.Notebook:
    mini.cell(notebook, "title")["source"] = text
    return notebook


def imports(notebook: mini.Notebook, source: str) -> mini.Notebook:
    mini.cell(notebook, "begin")["source"] = source
    return notebook


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> Class:
    """One run over a class of the mini lab."""
    root = mini.checkout(tmp_path_factory.mktemp("checkout"), hidden_math)
    release = mini.released(root)
    folder = tmp_path_factory.mktemp("class")

    def hand_in(student: str, notebook: Any, name: str = "mini.ipynb") -> None:
        mini.save(notebook, folder / student / name)

    def answers(**texts: str) -> mini.Notebook:
        return mini.solved(copy.deepcopy(release), **texts)

    hand_in("solved", answers())
    hand_in("untouched", release, "mini/mini.ipynb")
    hand_in("half", answers(square="def square(x):\n    return x"))
    hand_in("exits", answers(square="import os; os._exit(0)"))
    hand_in("loops", answers(square="while True: pass"))
    hand_in("stubborn", answers(double=STUBBORN))
    hand_in("no syntax", answers(square="def square(:"))
    hand_in("cheats", told(answers(square=CHEATS), EVIL), "mini-lab.ipynb")
    hand_in("skips", skipped(copy.deepcopy(release)))
    hand_in("eases", eased(copy.deepcopy(release)))
    hand_in("drops [1]", without("double-test")(answers()))
    hand_in("no imports", imports(answers(), "import mathematics_of_mine, math"))
    hand_in("other names", imports(answers(double=SHADOWS), ""))
    hand_in("李雷", answers(double="double = labcore_exercise.reference"))
    hand_in("renamed", answers(), "my homework.ipynb")
    hand_in("other lab", answers() | {"metadata": {}}, "maxi.ipynb")
    hand_in("other notebook", {"cells": [], "nbformat": 4, "metadata": {}})
    hand_in("=1+1", answers())
    for student, content in {"empty": b"", "no json": b"{", "text": b"\xff"}.items():
        (folder / student).mkdir()
        (folder / student / "mini.ipynb").write_bytes(content)
    (folder / "nothing").mkdir()
    # A file beside the notebook that would be imported in the place of the real one.
    (folder / "solved" / "math.py").write_text("raise SystemExit")

    said: list[str] = []
    before, out = tree(folder), root / "grades"
    steps.grade(root, folder, out, say=said.append, settings=SETTINGS)
    with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    return Class(rows=rows, out=out, said=said, before=before, after=tree(folder))


@pytest.mark.parametrize(
    ("student", "points", "status"),
    [
        ("solved", "5", "graded"),
        ("untouched", "0", "graded"),
        ("half", "2", "graded"),
        ("exits", "2", "graded; a cell killed the kernel (skipped)"),
        ("loops", "2", "graded; a cell ran out of time"),
        ("stubborn", "3", "graded; a cell ran out of time"),
        ("no syntax", "2", "graded"),
        ("cheats", "5", "graded"),
        ("skips", "0", "graded"),
        ("eases", "0", "graded"),
        ("drops [1]", "5", "graded"),
        ("no imports", "5", "graded"),
        ("other names", "5", "graded"),
        ("李雷", "3", "graded"),
        ("renamed", "5", "graded"),
        ("other lab", "", "not graded: there is no lab with this name"),
        ("other notebook", "0", "not graded: the notebook has none of this lab's graded cells"),
        ("empty", "0", "not graded: the file is empty"),
        ("no json", "0", "not graded: the file is not valid JSON"),
        ("text", "0", "not graded: the file is not valid JSON"),
        ("nothing", "", "not graded: the folder has no notebook"),
        ("'=1+1'", "", "not graded: its name"),
    ],
)
def test_each_submission_has_its_row(graded: Class, student: str, points: str, status: str) -> None:
    row = graded.rows[student]
    assert (row["points"], row["maximum"]) == (points, "5" if points else "")
    assert row["status"].startswith(status) and (";" in row["status"]) == (";" in status)
    parts = [row[name] for name in EXERCISES]
    assert sum(float(part or 0) for part in parts) == float(points or 0)


def test_there_are_no_other_rows_and_the_columns_are_named(graded: Class) -> None:
    assert len(graded.rows) == 22
    columns = ["student", "lab", "number", "points", "maximum", "status", "handed_in", "late"]
    assert list(graded.rows["solved"]) == [*columns, "flags", "feedback", *EXERCISES]


def test_flags_name_what_a_person_should_look_at(graded: Class) -> None:
    flags = {student: row["flags"] for student, row in graded.rows.items() if row["flags"]}
    assert flags == {
        "cheats": 'below "Twice <b>as</b> much" uses sys: read it',
        "exits": 'below "Twice <b>as</b> much" uses os: read it',
        "renamed": "'my homework.ipynb' is the lab mini, according to its metadata",
        "eases": "locked cell square-test changed, restored",
        "drops [1]": "cell double-test missing, put back",
        "李雷": 'below "Twice <b>as</b> much" uses labcore_exercise.reference',
        "other names": "imports missing, put back",
    }
    said = {line.split("] ")[1] for line in graded.said if "flag" in line and "[" in line}
    assert "eases mini 0/5: graded (1 flag)" in said and len(said) == len(flags)


def test_every_student_of_a_known_lab_gets_a_page(graded: Class) -> None:
    known = {student for student, row in graded.rows.items() if row["maximum"]}
    pages = {row["feedback"] for row in graded.rows.values() if row["feedback"]}
    assert {student for student, row in graded.rows.items() if row["feedback"]} == known
    assert len(pages) == len(known)
    made = {path for path in (graded.out / "feedback").rglob("*") if path.is_file()}
    assert {graded.out / page for page in pages} == made
    assert "Score: 2.0 / 5.0" in page_of(graded, "half")
    assert "the kernel died" in page_of(graded, "exits")
    for broken in ("empty", "no json", "other notebook"):
        assert "copy your answers from there into a new copy" in page_of(graded, broken)
    assert "Why: the file is empty." in page_of(graded, "empty")


def test_neither_a_path_nor_a_page_of_feedback_names_its_student(graded: Class) -> None:
    for student, row in graded.rows.items():
        folder = row["feedback"].split("/")[1] if row["feedback"] else ""
        assert student not in folder and (not folder or re.fullmatch("[0-9a-f]{20}", folder))
    assert "李雷" not in page_of(graded, "李雷") and "solved" not in page_of(graded, "solved")


def test_feedback_says_what_failed_and_shows_no_hidden_test(graded: Class) -> None:
    for path in (graded.out / "feedback").rglob("*.html"):
        text = path.read_text("utf-8")
        for word in ("square(-3)", "double(4)", "HIDDEN TESTS", "secret_two * x", "x**2"):
            assert word not in text, (path, word)
    half = page_of(graded, "half")
    assert "AssertionError: hidden square" in half


def test_no_student_code_runs_in_the_browser_showing_feedback(graded: Class) -> None:
    text = page_of(graded, "cheats")
    assert "<b>shown</b>" in text
    assert "<script>alert" not in text


def test_feedback_is_readable_without_scripts_or_requests(graded: Class) -> None:
    for path in (graded.out / "feedback").rglob("*.html"):
        text = path.read_text("utf-8")
        assert "default-src 'none'" in text and 'name="viewport"' in text, path
        assert not re.findall(r"<(?:script|link|iframe)|@import|@font-face", text), path
        assert not re.findall(r"<[^>]*src=[\"']?(?!data:)", text), path
        assert not re.findall(r"url\([\"']?(?!data:)", text), path
        assert len(re.findall(r"<meta[^>]*http-equiv", text)) == 1, path
        assert "Installs labcore where it is missing" not in text and ">Comment<" not in text, path
    assert "Comment on double" in page_of(graded, "untouched")
    page = page_of(graded, "half")
    assert "Test cell" not in page
    assert f'<a href="#{mini.SQUARE}">Twice &lt;b&gt;as&lt;/b&gt; much (square-test)</a>' in page
    assert "A figure, which this page cannot show" in page
    assert "Prose with `code`." in page and "&lt;p&gt;" not in page
    assert "<pre>task 1</pre>" in page and "&lt;tbody" not in page
    assert "<code>2 · η^(n+1)</code>" in page and "<code>$HOME</code>" in page
    assert "Twice <b>as</b> much" in page and "white-space: pre-wrap" in page
    cheats = page_of(graded, "cheats")
    assert "&lt;meta" in cheats and "evil.example" in cheats and "<code>&lt;b</code>" in cheats


def test_submissions_are_only_read(graded: Class) -> None:
    assert graded.before == graded.after


def test_progress_is_one_line_per_submission(graded: Class) -> None:
    first, *lines, summary, last = graded.said
    assert first.startswith("22 notebooks from 22 students") and "grading.log" in first
    assert len(lines) == 22 and all("\n" not in line for line in graded.said)
    assert any(line.endswith("solved mini 5/5: graded") for line in lines)
    assert "grades.csv" in last
    assert summary == "graded 15 of 22; not graded 7; timed out 2; flagged 7"
    assert (graded.out / "grading.log").read_text("utf-8") == ""


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A checkout and a class of one student whose notebook needs no kernel to be refused."""
    root = mini.checkout(tmp_path / "checkout")
    (tmp_path / "class" / "anna").mkdir(parents=True)
    (tmp_path / "class" / "anna" / "mini.ipynb").write_bytes(b"")
    return root, tmp_path / "class"


@pytest.mark.parametrize("step", [[], ["--work", "out"]])
def test_without_a_sandbox_nothing_is_run_or_written(
    small: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    step: list[str],
) -> None:
    root, folder = small
    before = tree(root.parent)
    monkeypatch.setattr(sandbox, "missing", lambda: "the program bwrap is missing")
    assert run(["grade", *(step or [str(folder)])], root) == 2
    said = capsys.readouterr()
    assert "bwrap is missing" in said.err and "your own privileges" in said.err and not said.out
    assert "--unsandboxed" in said.err and "UNSANDBOXED=1" in said.err
    assert tree(root.parent) == before


def test_unsandboxed_run_goes_on_and_a_second_replaces_the_first(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = small
    monkeypatch.setattr(sandbox, "missing", lambda: "the program bwrap is missing")
    assert run(["grade", str(folder), "--unsandboxed"], root) == 0
    assert "[1/1] anna mini 0/5: not graded: the file is empty" in capsys.readouterr().out
    out = root / "_build" / "grades"
    kept = {"course", "feedback", "grades.csv", "grading.log", "plan.json", "queue", "writer.lock"}
    assert {path.name for path in out.iterdir()} == kept
    assert out.stat().st_mode & 0o077 == 0
    (anna,) = (path.name for path in (out / "feedback").iterdir())
    (folder / "anna").rename(folder / "bo")
    assert run(["grade", str(folder), "--unsandboxed"], root) == 0
    (bo,) = (path.name for path in (out / "feedback").iterdir())
    assert bo != anna
    (folder / "bo").rename(folder / "anna")
    assert run(["grade", str(folder), "--unsandboxed"], root) == 0
    assert [path.name for path in (out / "feedback").iterdir()] == [anna]


def test_one_process_alone_writes(small: tuple[Path, Path]) -> None:
    root, folder = small
    out = root.parent / "out"
    steps.grade(root, folder, out, say=print)
    with locked(out / "writer.lock") as mine:
        assert mine
        for write in (steps.grade, steps.prepare):
            with pytest.raises(ValueError, match="another run writes to"):
                write(root, folder, out, say=print)
        with pytest.raises(ValueError, match="another run writes to"):
            steps.collect(root, out, say=print)
    assert steps.collect(root, out, say=print)


def test_nothing_to_work_on_is_said(small: tuple[Path, Path]) -> None:
    root, _ = small
    for step in (["--work", "out"], ["--collect", "out"]):
        (root / "out").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"has no queue; make it with: .*--only-queue"):
            run(["grade", *step, "--unsandboxed"] if "--work" in step else ["grade", *step], root)
    with pytest.raises(ValueError, match="submissions: a folder"):
        run(["grade", "--unsandboxed"], root)


@pytest.mark.parametrize("out", ["class", "class/out", "."])
def test_grades_never_go_among_the_submissions(small: tuple[Path, Path], out: str) -> None:
    root, folder = small
    before = tree(root.parent)
    with pytest.raises(ValueError, match="overlap"):
        steps.grade(root, folder, root.parent / out, say=print)
    assert tree(root.parent) == before


def test_a_folder_with_something_else_is_left_alone(small: tuple[Path, Path]) -> None:
    root, folder = small
    mine = root.parent / "mine"
    (mine / "feedback").mkdir(parents=True)
    with pytest.raises(ValueError, match="not an earlier output"):
        steps.grade(root, folder, mine, say=print)
    assert (mine / "feedback").is_dir()


def test_a_lab_with_a_fault_stops_before_anything_runs(small: tuple[Path, Path]) -> None:
    root, folder = small
    mini.checkout(root, lambda notebook: notebook["metadata"].pop("labcore"))
    with pytest.raises(ValueError, match=r"mini\.ipynb, metadata\.labcore"):
        steps.grade(root, folder, root.parent / "out", say=print)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grade", "nowhere", "--out", "new"], r"/.*/nowhere does not exist; name a folder"),
        (["grade", "{}", "--out", "new", "--roster", "r.csv"], "--roster needs --columns"),
        (["grade", "{}", "--out", "new", "--jobs", "-1"], "--jobs .* got -1"),
        (["grade", "{}", "--out", "new", "--due", "2026-11-30"], "has no time zone"),
        (["grade", "--collect", "new"], "new has no queue; make it with"),
        (["labs", "--out", "new"], "--out and --secret need --variant"),
    ],
)
def test_a_command_that_is_refused_leaves_nothing(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    root, folder = small
    monkeypatch.chdir(root)
    unsandboxed = ["--unsandboxed"] if words[0] == "grade" else []
    with pytest.raises(ValueError, match=said):
        run([*(word.format(folder) for word in words), *unsandboxed])
    assert not (root / "new").exists()
    monkeypatch.chdir(folder)  # no checkout
    with pytest.raises(ValueError, match="run this in the course's folder"):
        run(["grade", str(folder / "anna"), "--out", "new", "--unsandboxed"], folder)
    assert not (folder / "new").exists()


def test_last_lines_say_who_is_on_the_roster_and_what_is_unknown(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder = small
    out = root.parent / "out"
    settings = steps.Settings(
        due=datetime(2026, 3, 1, 22, 59, tzinfo=UTC),
        columns={"ID": "roster:ID"},
        roster={"anna meier": {"ID": "1"}, "bo": {"ID": "2"}},
    )
    steps.grade(root, folder, out, say=print, settings=settings)
    said = capsys.readouterr().out
    assert "1 notebooks from 1 students; due 2026-03-01 22:59 UTC; the log is " in said
    assert "\nno submission has a known time, so none counts as late\n" in said
    assert "\non the roster: 0 of 1 students; not on it: anna\n" in said
    assert (out / "export.csv").is_file()
    steps.grade(root, folder, out, say=print)
    assert "roster" not in capsys.readouterr().out and not (out / "export.csv").exists()


def bare_environment() -> dict[str, str]:
    """This environment with a PATH that has none of the programs beside Python."""
    here = Path(sys.executable).parent
    path = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != here]
    found = {**os.environ, "PATH": os.pathsep.join(path)}
    assert shutil.which("alembic", path=found["PATH"]) is None
    return found


def test_grading_needs_no_program_on_the_path(small: tuple[Path, Path]) -> None:
    root, folder = small
    mini.save(mini.solved(mini.released(root)), folder / "bo" / "mini.ipynb")
    command = [sys.executable, "-m", "labcore", "grade", str(folder), "--unsandboxed"]
    done = subprocess.run(
        command, cwd=root, env=bare_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2] bo mini 5/5: graded\n" in done.stdout


def test_lab_refused_by_nbgrader_gives_one_sentence_and_no_zeros(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = small

    def missing(*_: object) -> None:
        raise FileNotFoundError("alembic")

    monkeypatch.setattr(GenerateAssignment, "start", missing)
    with pytest.raises(GradingError, match=r"the lab mini could not be opened: .*grading\.log"):
        steps.grade(root, folder, root.parent / "out", say=print)
    assert not (root.parent / "out" / "grades.csv").exists()


def test_notebook_refused_by_nbgrader_keeps_its_flags(
    tmp_path: Path, bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbered(lab: mini.Notebook) -> None:
        mini.cell(lab, "begin")["source"] = "STUDENT = 0"

    def refused(*_: object, **__: object) -> None:
        raise GradingError("nbgrader does not take it")

    root = mini.checkout(tmp_path / "checkout", numbered)
    notebook = mini.solved(mini.released(root))
    mini.cell(notebook, "begin")["source"] = "STUDENT = 2 + 3"
    mini.save(notebook, tmp_path / "class" / "anna" / "mini.ipynb")
    monkeypatch.setattr(Gradebook, "record", refused)
    (row,) = steps.grade(root, tmp_path / "class", tmp_path / "out", say=print)
    assert row.status == "not graded: nbgrader does not take it" and not any(row.exercises.values())
    assert row.flags == ("STUDENT is not a number; graded as 5, its final value",)
    page = (tmp_path / "out" / row.feedback).read_text("utf-8")
    assert "Why: nbgrader does not take it." in page and "Ask them before you hand in" in page


def test_grades_folder_is_relative_to_where_the_command_runs(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = small
    monkeypatch.chdir(root)
    assert run(["grade", str(folder), "--unsandboxed", "--out", "here"]) == 0
    assert (root / "here" / "grades.csv").is_file()


def test_nbgrader_works_in_the_labs_folder_and_spares_releases(
    tmp_path: Path,
) -> None:
    root = mini.checkout(tmp_path)
    release = mini.released(root)
    shutil.copy(ROOT / "labs" / "nbgrader_config.py", root / "labs")
    command = [str(Path(sys.executable).parent / "nbgrader"), "generate_assignment", mini.SLUG]
    done = subprocess.run(
        command, cwd=root / "labs", env=bare_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = mini.read(root / "labs" / "grading" / "release" / mini.SLUG / "mini.ipynb")
    sources = ["".join(c["source"]) for c in made["cells"]]
    assert sources == ["".join(c["source"]) for c in release["cells"]]
    assert (root / "labs" / "grading" / "gradebook.db").is_file()
    assert mini.released(root) == release
    assert not list((root / "labs" / "release").rglob("*edited*"))
