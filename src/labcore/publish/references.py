"""Does a student's notebook use an exercise's answer? Read from its syntax, never run.

The package is public and so are the references: looking is allowed, handing in a call is not.
A flag is for the instructor's eyes and takes no points away; code that hides what it does is not
recognized here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labcore.publish.lab_source import cell_text, code_tree, nbgrader_of, sections

__all__ = ["uses_of_answers"]

ANSWERS = ("diagnoses", "reference", "wrong")
PACKAGE = "labcore.exercises"
# What recognizes mistakes, in every topic.
MACHINERY = ("clinic", "core", "matching", "running")


def _said(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


def _topic(module: str) -> bool:
    """Whether a module is a lab's own, `labcore.exercises.<slug>`, and no part of one."""
    inside = module.removeprefix(f"{PACKAGE}.")
    return "." not in inside and not inside.startswith("_") and inside not in MACHINERY


def _imports(node: ast.AST) -> Iterator[str]:
    """Imports of what lies behind a lab's exercises; the exercises are what a lab uses."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith(f"{PACKAGE}.") and not _topic(alias.name):
                yield f"import {alias.name}"
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            if node.module == PACKAGE:
                own = _topic(alias.name)
            else:
                own = _topic(node.module) and (alias.name.isupper() or alias.name == "*")
            if f"{node.module}.".startswith(f"{PACKAGE}.") and not own:
                yield f"from {node.module} import {alias.name}"


def _uses(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        yield from _imports(node)
        if isinstance(node, ast.Attribute) and node.attr in ANSWERS:
            yield _said(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ANSWERS or PACKAGE in node.value.replace("/", "."):
                yield f"the text {node.value[:60]!r}"
        elif isinstance(node, ast.Call) and _reveals(node):
            yield _said(node)


def _reveals(call: ast.Call) -> bool:
    """Whether a call is x.solution(reveal=…) with anything but a plain False."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "solution"
        and any(
            word.arg in (None, "reveal")
            and not (isinstance(word.value, ast.Constant) and word.value.value is False)
            for word in call.keywords
        )
    )


def _places(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where each cell stands, in words: Jupyter shows neither numbers of cells nor their ids."""
    name = ""
    for cell, section in zip(cells, sections(cells), strict=True):
        name = nbgrader_of(cell).get("grade_id") or name
        plain = "".join(sign for sign in str(section or name) if sign.isprintable())
        words = " ".join(plain.split())[:60]
        yield f'below "{words}"' if words else "at the top"


def _found(notebook: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cells = notebook["cells"]
    for cell, place in zip(cells, _places(cells), strict=True):
        if cell["cell_type"] != "code":
            continue
        try:
            uses = list(_uses(code_tree(cell_text(cell))))
        except SyntaxError:
            continue  # It does not run either.
        except (ValueError, RecursionError, MemoryError):
            uses = ["code that could not be read"]
        yield from ((place, use) for use in uses)


def uses_of_answers(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """`below "Settings" uses lion.TRANSFER.reference`: each use that the release has not itself.

    The words in quotes are the heading above the cell, else the grade_id at it or above it.
    """
    own = {use for _, use in _found(release)}
    found = [f"{place} uses {use}" for place, use in _found(notebook) if use not in own]
    return list(dict.fromkeys(found))
