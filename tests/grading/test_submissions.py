"""What students hand in: found, read and mended without running any of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labcore.grading.intake.submissions import (
    MAX_BYTES,
    MAX_CELLS,
    MAX_TEXT,
    find,
    mend,
    read_notebook,
)
from labcore.grading.references import uses_of_answers
from labcore.labs.students import name_problem, number_of
from tests.labs import mini

Change = Callable[[mini.Notebook], Any]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> mini.Notebook:
    return mini.released(mini.checkout(tmp_path_factory.mktemp("checkout")))


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_both_layouts_copies_and_strangers_are_found(tmp_path: Path) -> None:
    put(
        tmp_path,
        "anna/mini.ipynb",
        "bo/mini/mini.ipynb",
        "cy/mini-lab.ipynb",
        "di/mini-lab-2.ipynb",
    )
    put(tmp_path, "ed/other.ipynb", "flo/mini.py", "李 雷/mini.ipynb", ".hidden/mini.ipynb")
    put(tmp_path, "gil/.ipynb_checkpoints/mini.ipynb", "gil/mini.ipynb", "list.csv", "lost.ipynb")
    found = {one.student: (one.lab, one.problem) for one in find(tmp_path, {"mini"})}
    fine = {"anna", "bo", "cy", "di", "gil", "李 雷"}
    assert {name: found.pop(name) for name in fine} == dict.fromkeys(fine, ("mini", ""))
    assert found == {
        "ed": ("'other'", "there is no lab with this name"),
        "flo": ("", "the folder has no notebook"),
        "": ("'lost'", "it is not in a student's folder"),
    }


def test_two_notebooks_for_one_lab_are_not_guessed_between(tmp_path: Path) -> None:
    put(tmp_path, "anna/mini.ipynb", "anna/mini-lab.ipynb", "anna/mini/mini.ipynb")
    (one,) = find(tmp_path, {"mini"})
    assert "3 notebooks for one lab (mini/mini.ipynb, mini-lab.ipynb, mini.ipynb)" in one.problem


def test_links_lead_nowhere(tmp_path: Path) -> None:
    put(tmp_path / "secret", "mini.ipynb")
    folder = tmp_path / "class"
    put(folder, "anna/readme.txt", "bo/readme.txt")
    (folder / "cy").symlink_to(tmp_path / "secret")
    (folder / "anna" / "mini").symlink_to(tmp_path / "secret")
    (folder / "bo" / "mini.ipynb").symlink_to(tmp_path / "secret" / "mini.ipynb")
    (tmp_path / "secret" / "timestamp.txt").write_text("2026-03-01 22:30:00.000001 UTC")
    (folder / "bo" / "timestamp.txt").symlink_to(tmp_path / "secret" / "timestamp.txt")
    anna, bo, cy = find(folder, {"mini"})
    assert anna.problem == "the folder has no notebook"
    assert cy.problem == "the folder is a link"
    assert bo.handed_in is None
    with pytest.raises(ValueError, match="a link"):
        read_notebook(bo.path)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["1"] * MAX_CELLS, ""),
        (["1"] * (MAX_CELLS + 1), f"{MAX_CELLS + 1} cells, more than {MAX_CELLS}"),
        (["x" * (MAX_TEXT // 2)] * 2, ""),
        (["x" * MAX_TEXT, "x"], "longer than 1 MB"),
    ],
    ids=["cells", "a cell more", "text", "a letter more"],
)
def test_cells_and_their_texts_are_bounded(tmp_path: Path, texts: list[str], said: str) -> None:
    cells = [mini.code(f"c{place}", text) for place, text in enumerate(texts)]
    path = mini.save({"cells": cells, "metadata": {}, "nbformat": 4}, tmp_path / "mini.ipynb")
    if said:
        with pytest.raises(ValueError, match=said):
            read_notebook(path)
    else:
        assert len(read_notebook(path)["cells"]) == len(texts)


def test_halves_of_signs_are_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "mini.ipynb"
    cell = mini.code("a", "# \ud800 ü\udfff")
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}))
    assert read_notebook(path)["cells"][0]["source"] == "# ? ü?"


@pytest.mark.parametrize(
    "name",
    ["..", "..x", ".x", "~", "=1+1", "+1", "-rf", "@x", "a\\b", "a/b", "a\nb", "a\x00", "a\x1b[2J",
     "a:b", "*", "a?", " a", "a ", "a.", "é" * 51, "a\u202eb", "a\udcff"],
)  # fmt: skip
def test_names_like_paths_patterns_or_formulas_are_refused(name: str) -> None:
    assert name_problem(name)


@pytest.mark.parametrize("name", ["anna", "李雷", "O'Neill, Jo", "x_1-2", "[17]", "{0}", "é" * 50])
def test_other_names_are_fine(name: str) -> None:
    assert name_problem(name) == ""


def test_a_refused_name_is_shown_escaped_and_goes_nowhere(tmp_path: Path) -> None:
    put(tmp_path, "=cmd()/mini.ipynb", "..x/mini.ipynb")
    found = find(tmp_path, {"mini"})
    assert [one.student for one in found] == ["'..x'", "'=cmd()'"]
    assert all(one.problem.startswith("its name") and not one.lab for one in found)


def test_a_folder_without_students_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no student's folder"):
        find(tmp_path, {"mini"})
    with pytest.raises(ValueError, match="is not a folder"):
        find(tmp_path / "none", {"mini"})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"PK\x03\x04", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "format 4"),
        (b'{"nbformat": 3, "worksheets": []}', "format 4"),
        (b'{"nbformat": 4, "cells": {}}', "format 4"),
        (b'{"nbformat": 4, "cells": [1]}', "cell 1 of the notebook is damaged"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "x", "source": ""}]}', "damaged"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": [1]}]}', "damaged"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "damaged"),
    ],
)
def test_a_file_that_is_no_notebook_is_named_for_what_it_is(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    path = tmp_path / "mini.ipynb"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_notebook(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mini.ipynb"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="larger than 20 MB"):
        read_notebook(path)


def changed(release: mini.Notebook, *changes: Change) -> mini.Notebook:
    notebook = json.loads(json.dumps(release))
    for change in changes:
        change(notebook)
    return dict(notebook)


def update(name: str, **values: Any) -> Change:
    return lambda notebook: mini.cell(notebook, name).update(values)


def meta(name: str, **values: Any) -> Change:
    return lambda notebook: mini.cell(notebook, name)["metadata"]["nbgrader"].update(values)


def drop(*names: str) -> Change:
    def change(notebook: mini.Notebook) -> None:
        notebook["cells"] = [c for c in notebook["cells"] if c["id"] not in names]

    return change


def twice(name: str, source: str) -> Change:
    def change(notebook: mini.Notebook) -> None:
        first = mini.cell(notebook, name)
        place = notebook["cells"].index(first)
        notebook["cells"].insert(place + 1, {**first, "source": source})

    return change


def forms(cells: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (c["cell_type"], "".join(c["source"]), c["metadata"].get("nbgrader") or {}) for c in cells
    ]


def test_an_untouched_release_stays_as_it_is(release: mini.Notebook) -> None:
    mended = mend(release, release)
    assert mended.changes == ()
    assert forms(mended.notebook["cells"]) == forms(release["cells"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (update("double-test", source="pass"), "locked cell double-test changed, restored"),
        (update("double-test", cell_type="raw"), "grading data of double-test changed, restored"),
        (meta("double-test", points=99), "grading data of double-test changed, restored"),
        (meta("double-test", points="x"), "grading data of double-test changed, restored"),
        (meta("double-test", grade=False), "grading data of double-test changed, restored"),
        (meta("double-test", solution=True), "grading data of double-test changed, restored"),
        (drop("double-test"), "cell double-test missing, put back"),
        (drop("double-test", "square-test"), "cell square-test missing, put back"),
        (drop("square", "square-test"), "cell square-test missing, put back"),
        (drop("square"), "cell square missing"),
        (twice("double-test", "pass"), "cell double-test occurs 2 times; the last one counts"),
        (lambda n: n["cells"].reverse(), None),
    ],
)
def test_tampering_is_undone_and_named(
    release: mini.Notebook, change: Change, said: str | None
) -> None:
    mended = mend(changed(release, change), release)
    assert said is None or said in mended.changes
    found = {row[2]["grade_id"]: row for row in forms(mended.notebook["cells"]) if row[2]}
    for row in forms(release["cells"]):
        if row[2].get("grade"):
            assert found[row[2]["grade_id"]] == row
    names = [row[2]["grade_id"] for row in forms(mended.notebook["cells"]) if row[2]]
    assert len(names) == len(set(names))


def test_a_graded_cell_is_put_back_below_its_answer(release: mini.Notebook) -> None:
    mended = mend(changed(release, drop("double-test")), release)
    names = [c["metadata"].get("nbgrader", {}).get("grade_id") for c in mended.notebook["cells"]]
    assert names.index("double-test") == names.index("double") + 1


def test_of_two_answers_the_last_counts_and_the_first_still_runs(release: mini.Notebook) -> None:
    mended = mend(changed(release, twice("double", "second")), release)
    marked = [row for row in forms(mended.notebook["cells"]) if row[2].get("grade_id") == "double"]
    assert [row[1] for row in marked] == ["second"]
    assert len(mended.notebook["cells"]) == len(release["cells"]) + 1


def numbered(notebook: mini.Notebook) -> mini.Notebook:
    """The notebook with a cell for the student's number above the first exercise."""
    found = json.loads(json.dumps(notebook))
    found["cells"].insert(2, mini.code("student", "STUDENT = 0  # yours"))
    return dict(found)


@pytest.mark.parametrize(
    ("change", "said", "texts"),
    [
        (drop("begin"), ["imports missing, put back"], ["import math"]),
        (update("begin", source="import maths"), ["imports missing, put back"], ["import math"]),
        (update("begin", source="import math ("), ["imports missing, put back"], ["import math"]),
        (update("begin", source="import numpy, math\nmine()"), [], ["import math"]),
        (update("begin", source="import math\n"), [], []),
        (drop("student"), ["STUDENT missing, put back as in the release"],
         ["STUDENT = 0  # yours"]),
        (update("student", source="STUDENT = 17"), [], []),
        (update("student", source="STUDENT ="), ["STUDENT missing, put back as in the release"],
         ["STUDENT = 0  # yours"]),
    ],
)  # fmt: skip
def test_needed_plain_cells_come_back_and_the_students_stay(
    release: mini.Notebook, change: Change, said: list[str], texts: list[str]
) -> None:
    lab = numbered(release)
    notebook = changed(lab, change)
    mended = mend(notebook, lab)
    assert list(mended.changes) == said
    sources = ["".join(cell["source"]) for cell in mended.notebook["cells"]]
    theirs = ["".join(cell["source"]) for cell in notebook["cells"]]
    added = [text for text in sources if text not in theirs]
    assert [text.split("\n", 1)[1] for text in added] == texts
    assert all(text.startswith("# Put back for grading") for text in added)
    assert [text for text in sources if text not in added] == theirs
    for text in added:  # what the student wrote there runs first, the answers later
        assert sources.index(text) < sources.index(theirs[-1])
        name = "begin" if "math" in text else "student"
        own = [one["source"] for one in notebook["cells"] if one["id"] == name]
        assert not own or sources.index(text) == sources.index(own[0]) + 1


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("STUDENT = 17  # mine", "17"),
        ("STUDENT: int = 8", "8"),
        ("STUDENT = '17'", "?"),
        ("STUDENT = True", "?"),
        ("STUDENT = -1", "?"),
        ("STUDENT = 16 + 1", "?"),
        ("STUDENT = 0\nSTUDENT = 3", "?"),
        ("STUDENT = 0\nSTUDENT += 3", "?"),
        ("STUDENT = 0x" + "f" * 5000, "?"),
        ("STUDENT =", "?"),
        ("student = 17", "?"),
    ],
)
def test_the_number_is_read_and_never_run(release: mini.Notebook, source: str, number: str) -> None:
    lab = numbered(release)
    notebook = changed(lab, update("student", source=source))
    assert number_of(notebook, lab) == number
    assert number_of(notebook, release) == ""


def test_only_texts_pass(release: mini.Notebook) -> None:
    """A tag can make the kernel's client skip a cell; nbgrader counts a skipped cell as right."""

    def mark(notebook: mini.Notebook) -> None:
        for one in notebook["cells"]:
            one["metadata"]["tags"] = ["skip-execution"]
        notebook["metadata"]["kernelspec"]["name"] = "other"
        notebook["cells"].append(
            {"cell_type": "code", "source": "1", "metadata": {"nbgrader": {"grade_id": "mine"}}}
        )

    mended = mend(changed(release, mark), release).notebook
    assert all(cell["metadata"].keys() <= {"nbgrader"} for cell in mended["cells"])
    assert mended["cells"][-1]["metadata"] == {}
    assert mended["metadata"] == {"kernelspec": release["metadata"]["kernelspec"]}


def test_a_notebook_of_another_kind_is_refused(release: mini.Notebook) -> None:
    with pytest.raises(ValueError, match="none of this lab's graded cells"):
        mend({"cells": [mini.code("x", "1")]}, release)


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("f = lion.STEP.reference", "lion.STEP.reference"),
        ("x = [e for e in load('lion')][0] . wrong['sign']", "load('lion')][0].wrong"),
        ("lion.STEP.solution(reveal=True)", "lion.STEP.solution(reveal=True)"),
        ("lion.STEP.solution(reveal=bool(1))", "solution(reveal=bool(1))"),
        ("lion.STEP.solution(**options)", "solution(**options)"),
        ("from labcore.exercises.core import Exercise", "from labcore.exercises.core import"),
        ("import labcore.exercises.topics.lion.step as s", "import labcore.exercises.topics.lion"),
        ("from labcore.exercises import core", "from labcore.exercises import core"),
        ("getattr(lion.STEP, 'reference')", "the text 'reference'"),
        ("importlib.import_module('labcore.exercises.topics.lion')", "the text"),
        ("open('labcore/exercises/topics/lion/step.py').read()", "the text"),
        ("answers = lion.CLINIC.diagnoses(0)", "lion.CLINIC.diagnoses"),
        ("%time f = lion.STEP.reference\nf = lion.STEP.reference", "lion.STEP.reference"),
        ("lion.STEP.solution()", None),
        ("lion.STEP.solution(reveal=False)", None),
        ("lion.STEP.check(f)\nfrom labcore.exercises.topics import lion", None),
        ("from labcore.exercises import Exercise, load, topics", None),
        ("reference = 1\nwrong = 'no reference here'", None),
        ("def broken(:", None),
        ("import labcore.exercises.core", None),
        ("from labcore.exercises.topics.lion import STEP", None),
        ("from labcore.exercises.topics.lion import STEP, step", "topics.lion import step"),
        ("import labcore.exercises.topics.lion as lab", None),
        ("from labcore.exercises.topics.adamw_epsilon import *", None),
        ("from labcore.exercises import wording", "import wording"),
        ("from labcore.exercises.topics.lion import MASKED_STEP, EXERCISES", None),
        ("import labcore.exercises.running", "import labcore.exercises.running"),
        ("from labcore.exercises.topics.lion.step import STEP", "exercises.topics.lion.step"),
        ("from labcore.exercises_of_mine import step", None),
    ],
)  # fmt: skip
def test_uses_of_answers_are_flagged_and_the_labs_own_are_not(code: str, use: str | None) -> None:
    imports = "import labcore.exercises.core\nfrom labcore.exercises.topics.lion import DRIFT, STEP"
    own = {"cells": [mini.code("a", imports)]}
    cells = [{"cell_type": "markdown", "source": "## x.reference"}, mini.code("b", code)]
    found = uses_of_answers({"cells": cells}, own)
    if use is None:
        assert found == []
    else:
        (said,) = found
        assert said.startswith('below "x.reference" uses ') and use in said


def test_flag_names_the_exercise_not_a_number_jupyter_hides() -> None:
    """The nearest heading, else the nearest name of a cell: a student may have cut either."""

    def prose(text: str) -> dict[str, Any]:
        return {"cell_type": "markdown", "metadata": {}, "source": text}

    cells = [
        mini.code("a", "x.reference"),
        mini.code("double", "y.reference", solution=True),
        mini.code("b", "z.reference"),
        prose("# Lab\n\n## How  far\x1b\n*4 points*\n#hash"),
        prose("More, without a heading."),
        mini.code("square", "w.reference", solution=True),
    ]
    assert uses_of_answers({"cells": cells}, {"cells": []}) == [
        "at the top uses x.reference",
        'below "double" uses y.reference',
        'below "double" uses z.reference',
        'below "How far" uses w.reference',
    ]


@pytest.mark.parametrize("code", ["-" * 50_000 + "1", "x = '\x00'", "(" * 5000])
def test_code_that_cannot_be_parsed_does_not_stop_the_search(code: str) -> None:
    cells = [mini.code("a", code), mini.code("b", "x.reference")]
    assert uses_of_answers({"cells": cells}, {"cells": []})[-1] == "at the top uses x.reference"


def test_the_folder_of_a_student_who_cannot_be_read_is_a_row(tmp_path: Path) -> None:
    put(tmp_path, "anna/mini.ipynb")
    os.mkfifo(tmp_path / "anna" / "mini-lab.ipynb")
    (tmp_path / "anna" / "mini.ipynb").unlink()
    (one,) = find(tmp_path, {"mini"})
    with pytest.raises(ValueError, match="not a regular file"):
        read_notebook(one.path)
