"""A lab's source notebook run in this process: as it stands, or with its answers changed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from labcore.exercises import CheckFailedError, Exercise
from labcore.labs.source import cell_text, nbgrader_of
from tests.exercises.draws import answers, draws

LABS = Path(__file__).resolve().parents[2] / "labs/source"


def source(slug: str) -> Path:
    return LABS / slug / f"{slug}.ipynb"


def code_cells(slug: str) -> Iterator[dict[str, Any]]:
    """The code cells but for the one that installs the package on Colab."""
    for cell in json.loads(source(slug).read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code" and cell["id"] != "setup":
            yield cell


def texts(slug: str) -> dict[str, str]:
    """Cell id -> code."""
    return {cell["id"]: cell_text(cell) for cell in code_cells(slug)}


def run(
    slug: str,
    student: int = 0,
    change: Callable[[str], str] = lambda text: text,
    space: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Runs the lab, its answers changed by `change`: graded cell -> "" or its complaint.

    The notebook's names are left in `space`.
    """
    complaints = {}
    space = {} if space is None else space
    space["__name__"] = "__main__"
    for cell in code_cells(slug):
        text, meta = cell_text(cell), nbgrader_of(cell)
        text = text.replace("STUDENT = 0", f"STUDENT = {student}")
        if meta.get("solution"):
            text = change(text)
        code = compile(text, cell["id"], "exec")
        if not meta.get("grade"):
            exec(code, space)
            continue
        complaints[meta["grade_id"]] = ""
        try:
            exec(code, space)
        except CheckFailedError as problem:
            complaints[meta["grade_id"]] = " ".join(str(problem).split())
    return complaints


def complaints_about(slug: str, function: str, right: str, wrong: str) -> dict[str, str]:
    """Runs the lab with `right` in the answer `function` turned into `wrong`: what complains."""
    counts = []

    def change(text: str) -> str:
        if f"def {function}(" not in text:
            return text
        counts.append(text.count(right))
        return text.replace(right, wrong)

    complaints = run(slug, change=change)
    assert counts == [1], f"{right!r} stands {counts} times in {function}"
    return {name: complaint for name, complaint in complaints.items() if complaint}


@functools.cache
def solved(slug: str) -> Mapping[str, Any]:
    """The notebook's names after all of its cells ran with the solutions in place."""
    space: dict[str, Any] = {}
    run(slug, space=space)
    return MappingProxyType(space)


def check_changed_rule(
    slug: str, cell: str, function: str, exercise: Exercise, words: str, seed: int
) -> None:
    """The graded cell's own rule: the notebook's answer is right, the public reference fails the
    cell with `words`, and each of the rule's mistakes has its own hint."""
    names, graded = dict(solved(slug)), texts(slug)[cell]
    with pytest.raises(CheckFailedError) as caught:
        exec(graded, {**names, function: exercise.reference})
    assert words in " ".join(str(caught.value).split())
    exec(graded, names)
    changed = names["changed"]  # of this cell: each one names its own so
    for number, student in draws(seed, 2):
        given = answers(changed, names[function], number, student)
        assert changed.judge(given, seed=number, student=student).passed
        for name, (fn, hint) in changed.wrong.items():
            given = answers(changed, fn, number, student)
            outcome = changed.judge(given, seed=number, student=student)
            assert (outcome.mistake, hint in outcome.message) == (name, True), outcome
