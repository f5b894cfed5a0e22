"""What holds for the notebook of every lab: its solutions pass, its stubs do not, it adds up."""

from __future__ import annotations

import functools
import json
import random
import re
from importlib import import_module

import pytest

from labcore.exercises import CheckFailedError, Clinic, Exercise, load, slugs
from labcore.labs.source import cell_text, read_lab
from tests.exercises.notebook import complaints_about, run, solved, source, texts

names_of = functools.cache(solved)
each_lab = pytest.mark.parametrize("slug", slugs())


def without_solution(text: str) -> str:
    before, _, rest = text.partition("### BEGIN SOLUTION")
    return before + "raise NotImplementedError" + rest.partition("### END SOLUTION")[2]


@each_lab
def test_the_solutions_have_full_marks_for_any_student(slug: str, seed: int) -> None:
    assert not any(run(slug, seed).values())


@each_lab
def test_the_untouched_lab_has_no_marks(slug: str) -> None:
    complaints = run(slug, change=without_solution)
    assert len(complaints) == len(read_lab(source(slug)).points)
    assert all("Nothing to check yet" in complaint for complaint in complaints.values())


@each_lab
def test_points_and_minutes_add_up_and_the_chapter_is_linked(slug: str) -> None:
    lab, text = read_lab(source(slug)), source(slug).read_text("utf-8")
    headings = re.findall(r"(\d+) points? · (\d+) minutes · ", text)
    assert len(headings) == len(load(slug))
    assert sum(int(points) for points, _ in headings) == sum(lab.points.values())
    assert sum(int(minutes) for _, minutes in headings) == lab.metadata.minutes
    (link,) = re.findall(r"\]\(([^)]*)\)", text)
    assert link == f"../../../book/{slug}.ipynb"
    assert (source(slug).parent / link).resolve().is_file()


@each_lab
def test_the_last_points_are_those_that_the_task_says(slug: str) -> None:
    """What a check calls untested stands in the task, and the reverse."""
    every, told = texts(slug), {}
    cells = json.loads(source(slug).read_text("utf-8"))["cells"]
    tasks = {cell["id"]: cell_text(cell) for cell in cells if cell["id"].endswith("-task")}
    for cell, text in tasks.items():
        if found := re.search(r"\*\*The last (two )?points?\*\*", text):
            check = re.search(r"([A-Z_]+)\.check\(", every[cell.replace("-task", "-check")])
            assert check
            told[check[1].lower()] = 2 if found[1] else 1
    beyond = {one.id.partition(".")[2]: getattr(one, "beyond", 0) for one in load(slug)}
    assert {name: count for name, count in beyond.items() if count} == told


def graded(slug: str, name: str) -> tuple[str, list[str]]:
    """The student's function of an exercise, and the ids of the graded cells that check it."""
    checks = {
        cell: set(re.findall(rf"\b{name}\.check\((\w+), ", text))
        for cell, text in texts(slug).items()
    }
    functions = set().union(*checks.values())
    assert len(functions) == 1, f"{name} is checked with {functions}"
    return functions.pop(), [cell for cell, found in checks.items() if found and "-test" in cell]


@each_lab
def test_graded_cells_refuse_wrong_answers_and_hide_the_seed(slug: str, seed: int) -> None:
    names = names_of(slug)
    for exercise in load(slug):
        if isinstance(exercise, Exercise):
            (name,) = (
                n
                for n, one in vars(import_module(f"labcore.exercises.topics.{slug}")).items()
                if one is exercise
            )
            function, (cell,) = graded(slug, name)
            fn, hint = exercise.wrong[random.Random(seed).choice(list(exercise.wrong))]
            with pytest.raises(CheckFailedError) as caught:
                exec(texts(slug)[cell], {**names, function: fn})
            assert hint in " ".join(str(caught.value).split())
            assert "seed=" not in str(caught.value)


@each_lab
def test_each_patient_has_points_of_its_own(slug: str) -> None:
    names = names_of(slug)
    (clinic,) = (one for one in load(slug) if isinstance(one, Clinic))
    function, cells = graded(slug, "CLINIC")
    right = names[function]()
    assert len(cells) == len(right) == len(clinic.faults)
    exchanged = {**names, function: lambda: {**right, "A": right["B"]}}
    failed = []
    for cell in cells:
        try:
            exec(texts(slug)[cell], dict(exchanged))
        except CheckFailedError:
            failed.append(cell)
    assert failed == ["clinic-a-test"]


def test_a_change_that_finds_no_place_is_no_test() -> None:
    with pytest.raises(AssertionError, match="stands"):
        complaints_about("lion", "transfer", "nothing like this", "")
