"""`make labs`: the same source gives the same notebook, and no edited release is lost."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labcore.__main__ import run
from labcore.labs import releases
from labcore.labs.first_cell import first_cell
from labcore.labs.source import LabError, read_lab
from tests.labs import mini

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[mini.Notebook], Any]


def with_address(notebook: mini.Notebook, address: str = "") -> None:
    mini.cell(notebook, "begin")["source"] = first_cell(address)


def test_the_committed_releases_are_what_make_labs_gives() -> None:
    assert releases.stale(ROOT) == []


def test_different_missing_or_orphaned_releases_are_named(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path)
    (missing,) = releases.stale(root)
    assert "mini/mini.ipynb is missing" in missing and "make labs" in missing
    mini.released(root)
    assert releases.stale(root) == []
    path = releases.release_path(root, "mini")
    path.write_text(path.read_text("utf-8").replace("secret_two = 2", "secret_two = 3"), "utf-8")
    shutil.copytree(path.parent, path.parent.parent / "gone")
    differs, orphan = releases.stale(root)
    assert "mini/mini.ipynb does not match" in differs and "make labs" in differs
    assert "labs/release/gone has no source" in orphan


def test_the_same_source_gives_the_same_bytes_wherever_it_stands(tmp_path: Path) -> None:
    texts = []
    for folder in ("a", "an/other place"):
        root = mini.checkout(tmp_path / folder)
        releases.write(root)
        texts.append(releases.release_path(root, "mini").read_bytes())
        assert str(tmp_path).encode() not in texts[-1] and b"/tmp" not in texts[-1]
        assert not releases.write(root)[0].written
    assert texts[0] == texts[1]


def test_release_has_stubs_but_no_answers_tests_or_notes(
    tmp_path: Path,
) -> None:
    def add(notebook: mini.Notebook) -> None:
        notebook["metadata"] |= {"authors": ["Private Person"], "celltoolbar": "Assignment"}
        notebook["metadata"]["labcore"]["tier"] = "1gpu"
        more = mini.cell(notebook, "more")
        more["metadata"] = {"notes": "private note", "tags": ["kept"]}
        more |= {"execution_count": 7, "outputs": [output("private output")]}

    release = mini.released(mini.checkout(tmp_path, add))
    text = releases.release_path(tmp_path, "mini").read_text("utf-8")
    for word in ("secret_two * x", "x**2", "hidden", "HIDDEN", "SOLUTION", "rivate"):
        assert word not in text, word
    assert mini.cell(release, "more")["metadata"] == {"tags": ["kept"]}
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in release["cells"])
    scope: dict[str, Any] = {}
    exec("".join(mini.cell(release, "double")["source"]), scope)
    with pytest.raises(NotImplementedError, match="write"):
        scope["double"](2)
    metadata = release["metadata"]["labcore"]
    assert (metadata["points"], metadata["tier"], metadata["slug"]) == (5, "1gpu", "mini")
    assert metadata["release"].keys() == {"source", "cells"}
    assert [c["id"] for c in release["cells"]] == [c["id"] for c in mini.mini_lab()["cells"]]


def output(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": [text]}


@pytest.mark.parametrize(
    "edit",
    [
        lambda notebook: mini.cell(notebook, "double").update(source="def double(x): return 1"),
        lambda notebook: notebook["cells"].pop(),
        lambda notebook: mini.cell(notebook, "more").update(outputs=[output("mine")]),
        lambda notebook: grading("square-test", points=9)(notebook),
        lambda notebook: notebook["metadata"]["labcore"].pop("release"),
        lambda notebook: notebook.clear(),
    ],
    ids=["text", "cell removed", "outputs", "points", "no digest", "no notebook"],
)  # fmt: skip
def test_an_edited_release_is_kept_beside_the_new_one_and_named(
    tmp_path: Path, edit: Change
) -> None:
    root = mini.checkout(tmp_path)
    fresh = mini.released(root)
    path = releases.release_path(root, "mini")
    for number in (1, 2):
        notebook = copy.deepcopy(fresh)
        edit(notebook)
        mini.save(notebook, path)
        edited = path.read_bytes()
        (made,) = releases.write(root)
        assert made.written and made.kept == path.with_name(f"mini.edited-{number}.ipynb")
        assert made.kept.read_bytes() == edited
        assert made.kept.name in str(made)
        assert mini.read(path) == fresh


def test_a_file_that_is_no_text_is_kept_too(tmp_path: Path) -> None:
    path = releases.release_path(mini.checkout(tmp_path), "mini")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\x00 mine")
    (made,) = releases.write(tmp_path)
    assert made.kept is not None and made.kept.read_bytes() == b"\xff\x00 mine"


def test_an_address_or_another_source_is_no_edit(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path, with_address)
    release = mini.released(root)
    path = releases.release_path(root, "mini")
    with_address(release, "https://github.com/someone/course")
    mini.save(release, path)
    notebook = mini.mini_lab()
    with_address(notebook)
    mini.cell(notebook, "more")["source"] = "secret_two = 1 + 1"
    mini.save(notebook, mini.source_path(root))
    (made,) = releases.write(root)
    assert made.written and made.kept is None
    # A set-up cell that a person changed is an edit.
    release = mini.read(path)
    mini.cell(release, "begin")["source"] = first_cell("") + "\nprint('mine')"
    mini.save(release, path)
    assert releases.write(root)[0].kept is not None


def swap(name: str, old: str, new: str) -> Change:
    def change(notebook: mini.Notebook) -> None:
        one = mini.cell(notebook, name)
        assert old in one["source"]
        one["source"] = one["source"].replace(old, new)

    return change


def grading(name: str, **values: Any) -> Change:
    return lambda notebook: mini.cell(notebook, name)["metadata"]["nbgrader"].update(values)


def without_grading(notebook: mini.Notebook) -> None:
    for one in notebook["cells"]:
        one["metadata"].pop("nbgrader", None)


BAD = {
    "not marked": (without_grading, "no graded cell"),
    "no end": (swap("double", "    ### END SOLUTION", ""), "BEGIN SOLUTION has no END SOLUTION"),
    "no begin": (swap("double", "### BEGIN SOLUTION", ""), "END SOLUTION has no BEGIN SOLUTION"),
    "nested": (
        swap("double-test", "assert", "### BEGIN HIDDEN TESTS\nassert"),
        "a second BEGIN HIDDEN TESTS",
    ),
    "unmarked solution": (grading("double", solution=False), "go together"),
    "no hidden tests": (
        swap("double-test", "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"),
        "END HIDDEN TESTS has no BEGIN",
    ),
    "nothing outside": (swap("double-test", "# Graded.", ""), "must have a line outside"),
    "empty region": (swap("square", "    return x**2\n", ""), "a region is empty"),
    "same grade_id": (grading("square", grade_id="double"), "cells 3, 6 have the same grade_id"),
    "points missing": (grading("square-test", points=None), "points must be a number above 0"),
    "points negative": (grading("square-test", points=-1), "points must be a number above 0"),
    "not locked": (grading("square-test", locked=False), "locked true"),
    "old schema": (grading("square", schema_version=2), "schema_version must be 3"),
    "syntax": (swap("more", "=", "= ="), "does not parse"),
    "syntax without solution": (
        swap("square", "    ### BEGIN SOLUTION", "### BEGIN SOLUTION"),
        "does not parse without its solution",
    ),
    "same id": (lambda notebook: mini.cell(notebook, "more").update(id="begin"), "id, 'begin'"),
    "other slug": (
        lambda notebook: notebook["metadata"]["labcore"].update(slug="maxi"),
        "slug must be the file's name",
    ),
    "no minutes": (lambda n: n["metadata"]["labcore"].pop("minutes"), "add minutes"),
    "unknown tier": (lambda n: n["metadata"]["labcore"].update(tier="tpu"), "must be one of"),
    "no metadata": (lambda n: n["metadata"].pop("labcore"), "kind must be"),
    "no language": (lambda n: n["metadata"].pop("kernelspec"), "kernelspec.language"),
    "no cells": (lambda n: n.pop("cells"), "not a notebook of format 4"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_bad_source_is_refused_by_file_and_the_old_release_stays(
    tmp_path: Path, change: Change, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = mini.checkout(tmp_path)
    path = releases.release_path(root, "mini")
    mini.save({"old": "release"}, path)
    mini.checkout(root, change)
    before = path.read_bytes()
    assert run(["labs"], root) == 1
    said = capsys.readouterr().out
    assert "mini.ipynb" in said and sentence in said
    assert [p.name for p in path.parent.iterdir()] == ["mini.ipynb"]
    assert path.read_bytes() == before


def test_the_error_names_the_cell_and_every_fault(tmp_path: Path) -> None:
    def spoil(notebook: mini.Notebook) -> None:
        swap("double", "    ### END SOLUTION", "")(notebook)
        grading("square-test", points=0)(notebook)

    with pytest.raises(LabError) as caught:
        read_lab(mini.source_path(mini.checkout(tmp_path, spoil)))
    first, second = str(caught.value).splitlines()
    assert first.startswith("mini.ipynb, cell 3 (double): ")
    assert second.startswith("mini.ipynb, cell 7 (square-test): points")


def test_a_source_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = mini.source_path(mini.checkout(tmp_path))
    path.write_text("{", "utf-8")
    (made,) = releases.write(tmp_path)
    assert "is not valid JSON" in made.problem and not made.path.exists()


def test_one_bad_lab_does_not_keep_the_others_back(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path, without_grading)
    mini.save(mini.mini_lab("other"), mini.source_path(root, "other"))
    bad, good = releases.write(root)
    assert bad.problem and good.written and good.path.is_file()


def test_the_command_takes_names_and_refuses_strangers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = mini.checkout(tmp_path)
    assert run(["labs", "mini"], root) == run(["labs"], root) == 0
    assert capsys.readouterr().out == "mini: written\nmini: unchanged\n"
    with pytest.raises(ValueError, match="lion.*mini"):
        run(["labs", "lion"], root)
    with pytest.raises(ValueError, match="no labs/source"):
        run(["labs"], tmp_path / "labs")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_git_ignores_what_is_kept_and_what_nbgrader_writes() -> None:
    names = ["labs/release/lion/lion.edited-1.ipynb", "labs/grading/gradebook.db"]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == names
    done = subprocess.run(["git", "check-ignore", "labs/release/lion/lion.ipynb"], cwd=ROOT)
    assert done.returncode == 1
