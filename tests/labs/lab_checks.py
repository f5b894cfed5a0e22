"""Gates over the form of a lab. Each returns a list of sentences, empty when all is well."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Any

from labcore.grading.judging import answer_names
from labcore.labs.first_cell import is_first_cell
from labcore.labs.source import (
    HIDDEN,
    SOLUTION,
    Lab,
    cell_text,
    code_tree,
    import_cells,
    nbgrader_of,
    regions,
)

EXERCISES = (3, 6)
CELL_LINES = 20
FACTS = re.compile(r"^\*(\d+) points? · (\d+) minutes · (easy|medium|hard)\*$", re.MULTILINE)
STUB = "raise NotImplementedError"
BINDING = (ast.arg, ast.FunctionDef, ast.ClassDef, ast.alias, ast.ExceptHandler)


def exercises(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The cells of each exercise: from the heading with its facts to the next heading."""
    found: list[list[dict[str, Any]]] = []
    inside = False
    for cell in cells:
        text = cell_text(cell)
        if cell["cell_type"] == "markdown" and re.match(r"## \S", text):
            inside = bool(FACTS.search(text))
            found += [[]] if inside else []
        if inside:
            found[-1].append(cell)
    return found


def _exercise_problems(exercise: list[dict[str, Any]]) -> Iterator[str]:
    text = cell_text(exercise[0])
    title = text.splitlines()[0].removeprefix("## ")
    stated = int(FACTS.findall(text)[0][0])
    points = sum(nbgrader_of(cell).get("points", 0) for cell in exercise)
    if points != stated:
        yield f"{title}: {stated} points stated, {points:g} in its graded cells"
    kinds = "".join(
        "s" if nbgrader_of(cell).get("solution") else "g" if nbgrader_of(cell).get("grade") else "c"
        for cell in exercise
        if cell["cell_type"] == "code"
    )
    # Code may show something first; then the answer, its visible check, and the graded cell.
    if not re.fullmatch(r"c*(s+c+g+)+", kinds):
        yield f"{title}: needs an answer, a visible check and a graded cell, in this order"
    checks = [
        cell_text(cell)
        for cell in exercise
        if cell["cell_type"] == "code" and not nbgrader_of(cell)
    ]
    if not any(".check(" in check for check in checks):
        yield f"{title}: no plain cell calls .check(…)"


def _bound(tree: ast.Module) -> set[str]:
    """The names that code gives a value itself, arguments and comprehensions too."""
    return {
        getattr(node, "id", "") or getattr(node, "arg", "") or getattr(node, "name", "") or ""
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        or isinstance(node, BINDING)
    }


def strange_names(lab: Lab) -> list[str]:
    """Names in graded cells that grading does not know: it runs them apart from the notebook."""
    cells = lab.notebook["cells"]
    known = set(dir(builtins)) | set(answer_names(lab))
    for cell in import_cells(cells):
        for alias in ast.walk(code_tree(cell_text(cell))):
            if isinstance(alias, ast.alias):
                known.add(alias.asname or alias.name.partition(".")[0])
    problems = []
    for cell in cells:
        if nbgrader_of(cell).get("grade"):
            tree = code_tree(cell_text(cell))
            known |= _bound(tree)  # for the graded cells after it too
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            problems += [
                f"{nbgrader_of(cell)['grade_id']} uses {name}: a graded cell may use the lab's "
                "imports, STUDENT and answers alone"
                for name in sorted(used - known)
            ]
    return problems


def form_problems(lab: Lab) -> list[str]:
    """What keeps a source without faults from being a lab of this course."""
    cells = list(lab.notebook["cells"])
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    problems = []
    if not re.match(r"# Lab: \S", cell_text(cells[0])):
        problems.append("the first cell must be the title, '# Lab: …'")
    if not is_first_cell(cell_text(code[0])):
        problems.append("the first code cell must be the one of labcore.course.address")
    for cell in code:
        name = cell["id"]
        if cell.get("outputs") or cell.get("execution_count") is not None:
            problems.append(f"{name} has outputs or an execution count; strip them")
        shown = cell_text(cell)
        for kind in (SOLUTION, HIDDEN):
            for region in regions(shown, kind):
                shown = shown.replace(region, "")
        if shown.count("\n") + 1 > CELL_LINES:
            problems.append(f"{name} shows a student more than {CELL_LINES} lines")
    found = exercises(cells)
    if not EXERCISES[0] <= len(found) <= EXERCISES[1]:
        problems.append(
            f"{len(found)} exercises with a line '*4 points · 15 minutes · medium*', "
            f"{EXERCISES[0]} to {EXERCISES[1]}"
        )
    for exercise in found:
        problems += _exercise_problems(exercise)
    graded = {cell["id"] for exercise in found for cell in exercise}
    problems += [
        f"{cell['id']} is graded outside of an exercise"
        for cell in code
        if nbgrader_of(cell).get("grade") and cell["id"] not in graded
    ]
    minutes = sum(int(FACTS.findall(cell_text(exercise[0]))[0][1]) for exercise in found)
    if minutes > lab.metadata.minutes:
        problems.append(f"exercises of {minutes} minutes in a lab of {lab.metadata.minutes}")
    problems += strange_names(lab)
    return [f"{lab.path.name}: {problem}" for problem in problems]


def leaks(lab: Lab, release: dict[str, Any]) -> list[str]:
    """Solutions and hidden tests that a release still shows."""
    problems = []
    shown = {cell["id"]: cell_text(cell) for cell in release["cells"]}
    for cell in lab.notebook["cells"]:
        text = shown.get(cell["id"], "")
        for kind in (SOLUTION, HIDDEN):
            hidden = regions(cell_text(cell), kind)
            lines = {line.strip() for region in hidden for line in region.split("\n")} - {""}
            found = sorted(line for line in lines if line in map(str.strip, text.split("\n")))
            problems += [f"{cell['id']} shows {line!r}" for line in found]
            if f"BEGIN {kind}" in text or f"END {kind}" in text:
                problems.append(f"{cell['id']} shows a mark of {kind}")
        if nbgrader_of(cell).get("solution") and STUB not in text:
            problems.append(f"{cell['id']} has no stub")
    return [f"{lab.path.name}: {problem}" for problem in problems]


def published(html: Any, lab: Lab) -> list[str]:
    """Files of a built book with a line of the lab's hidden tests or with marks of a source."""
    marks = [f"BEGIN {SOLUTION}", f"BEGIN {HIDDEN}"]
    for cell in lab.notebook["cells"]:
        for kind in (SOLUTION, HIDDEN):
            for region in regions(cell_text(cell), kind):
                # Long lines only: short ones, such as "return x", may stand anywhere.
                marks += [line.strip() for line in region.split("\n") if len(line.strip()) > 40]
    found = []
    for path in sorted(html.rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.relative_to(html).as_posix()
            # A notebook has its lines as JSON texts.
            found += [f"{name}: {mark}" for mark in marks if mark in text or _as_json(mark) in text]
    return found


def _as_json(line: str) -> str:
    return line.replace("\\", "\\\\").replace('"', '\\"')
