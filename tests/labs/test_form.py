"""Every lab has the form of one, and each gate over the form can fail."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from labcore.exercises import core, load
from labcore.labs import releases
from labcore.labs.first_cell import first_cell
from labcore.labs.source import Lab, cell_text, read_lab
from tests.labs import lab_checks, mini

ROOT = Path(__file__).resolve().parents[2]
SOURCES = releases.source_paths(ROOT)


@pytest.mark.parametrize("slug", SOURCES)
def test_a_lab_has_the_form_of_one(slug: str) -> None:
    assert lab_checks.form_problems(read_lab(SOURCES[slug])) == []


def test_a_check_knows_the_modules_that_the_import_cells_bring() -> None:
    cells = [cell for path in SOURCES.values() for cell in read_lab(path).notebook["cells"]]
    code = "\n".join(cell_text(cell) for cell in cells if cell["id"] == "imports")
    assert set(re.findall(r"^import (\w+)$", code, re.MULTILINE)) == set(core.MODULES)


@pytest.mark.parametrize("slug", SOURCES)
def test_a_check_runs_after_a_restart_and_knows_its_points(slug: str) -> None:
    """A check cell imports its own exercise, and a card says the points that the lab states."""
    found = []
    for cells in lab_checks.exercises(read_lab(SOURCES[slug]).notebook["cells"]):
        stated = int(lab_checks.FACTS.findall(cell_text(cells[0]))[0][0])
        checks = [text for cell in cells[1:] if ".check(" in (text := cell_text(cell))]
        imports, _, call = next(text for text in checks if "HIDDEN" not in text).partition("\n\n")
        names: dict[str, Any] = {}
        exec(imports, names)
        found.append(eval(call.partition(".check(")[0], names))
        assert found[-1].points == stated, found[-1]
    assert {one.id for one in found} == {one.id for one in load(slug)}


@pytest.mark.parametrize("slug", SOURCES)
def test_a_release_shows_no_solution_and_no_hidden_test(slug: str) -> None:
    release = mini.read(releases.release_path(ROOT, slug))
    assert lab_checks.leaks(read_lab(SOURCES[slug]), release) == []
    assert all(not cell.get("outputs") for cell in release["cells"])
    assert all(cell.get("id") for cell in release["cells"])


@pytest.mark.parametrize("slug", SOURCES)
def test_a_release_stands_below_its_chapter(slug: str) -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [entry for part in toc["parts"] for entry in part["chapters"]]
    below = {
        entry["file"]: [section["file"] for section in entry.get("sections", ())]
        for entry in chapters
    }
    assert f"labs/release/{slug}/{slug}" in below[f"book/{slug}"]


def whole_lab(tmp_path: Path) -> Lab:
    """A lab that passes every gate: the mini lab with headings, checks and a third exercise."""
    notebook = mini.mini_lab()
    cells = [notebook["cells"][0] | {"source": "# Lab: small"}, mini.code("setup", first_cell(""))]
    for name, points in (("double", 2), ("square", 3), ("cube", 1)):
        text = f"## {name}\n\n*{points} point{'s' * (points > 1)} · 3 minutes · easy*\n\nWrite it."
        cells.append(
            {"cell_type": "markdown", "id": f"{name}-task", "metadata": {}, "source": text}
        )
        body = mini.exercise(name, f"x**{points}", f"assert {name}(0) == 0", points)
        cells += [body[0], mini.code(f"{name}-check", f"lab.{name.upper()}.check({name})"), body[1]]
    text = "## Afterwards\n\nRead on."
    cells.append({"cell_type": "markdown", "id": "after", "metadata": {}, "source": text})
    notebook["cells"] = cells
    return read_lab(mini.save(notebook, tmp_path / "mini.ipynb"))


def test_a_lab_in_form_passes(tmp_path: Path) -> None:
    assert lab_checks.form_problems(whole_lab(tmp_path)) == []


def cut(name: str) -> Any:
    return lambda n: n.update(cells=[c for c in n["cells"] if not c["id"].startswith(name)])


def text(name: str, old: str, new: str) -> Any:
    def change(notebook: mini.Notebook) -> None:
        one = mini.cell(notebook, name)
        one["source"] = one["source"].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cut("cube"), "2 exercises"),
        (text("setup", "sys", "os"), "the first code cell"),
        (text("setup", 'REPOSITORY = ""', 'REPOSITORY = "x"'), None),
        (text("title", "# Lab", "# A lab"), "the title"),
        (text("cube-task", "minutes", "hours"), "2 exercises"),
        (text("cube-task", "easy", "nice"), "cube-test is graded outside of an exercise"),
        (text("cube-task", "1 point", "2 points"), "2 points stated, 1 in its graded cells"),
        (text("cube-task", "3 minutes", "60 minutes"), "66 minutes in a lab of 10"),
        (cut("cube-check"), "an answer, a visible check and a graded cell"),
        (cut("cube-test"), "1 points stated, 0"),
        (text("cube-check", "check", "chequers"), "no plain cell calls .check"),
        (text("cube-check", "lab", "\n" * 20 + "lab"), "more than 20 lines"),
        (text("cube-test", "cube(0)", "secret_two + cube(0)"), "cube-test uses secret_two"),
        (text("cube-test", "cube(0)", "sum(cube(i) for i in [int(), 0])"), None),
        (lambda n: mini.cell(n, "cube").update(execution_count=1), "execution count"),
        (lambda n: mini.cell(n, "cube").update(outputs=[{}]), "has outputs"),
    ],
)
def test_each_gate_over_the_form_can_fail(
    tmp_path: Path, change: Any, sentence: str | None
) -> None:
    lab = whole_lab(tmp_path)
    notebook = copy.deepcopy(dict(lab.notebook))
    change(notebook)
    found = lab_checks.form_problems(dataclasses.replace(lab, notebook=notebook))
    assert (found == []) == (sentence is None)
    assert sentence is None or any(sentence in line for line in found), found


def test_a_release_that_shows_too_much_is_named(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path)
    lab, release = read_lab(mini.source_path(root)), mini.released(root)
    assert lab_checks.leaks(lab, release) == []
    planted = mini.solved(copy.deepcopy(release), double="def double(x):\n  return secret_two * x")
    mini.cell(planted, "square-test")["source"] = "### BEGIN HIDDEN TESTS\nassert 1"
    assert lab_checks.leaks(lab, planted) == [
        "mini.ipynb: double shows 'return secret_two * x'",
        "mini.ipynb: double has no stub",
        "mini.ipynb: square has no stub",
        "mini.ipynb: square-test shows a mark of HIDDEN TESTS",
    ]


def test_a_source_among_the_built_pages_is_found(tmp_path: Path) -> None:
    lab = read_lab(mini.source_path(mini.checkout(tmp_path)))
    html = tmp_path / "html"
    mini.save({"cells": ["nothing"]}, html / "_sources" / "release.ipynb")
    (html / "picture.png").write_bytes(b"\x89PNG\xff")
    assert lab_checks.published(html, lab) == []
    mini.save(dict(lab.notebook), html / "_sources" / "mini.ipynb")
    (html / "page.html").write_text("<p>assert square(-3) == 9, 'hidden square'</p>")
    found = lab_checks.published(html, lab)
    assert any(line.startswith("_sources/mini.ipynb: BEGIN HIDDEN") for line in found)
    assert any(line.startswith("_sources/mini.ipynb: BEGIN SOLUTION") for line in found)
