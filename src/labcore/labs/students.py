"""A student's name, as a folder has it, and a student's number, as a notebook has it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from labcore.labs.source import statements

__all__ = ["FORMULA", "NUMBER", "assigned_numbers", "name_problem", "number_of"]

# A spreadsheet treats a cell that begins with one of these as a formula.
FORMULA = ("=", "+", "-", "@")
NUMBER = "STUDENT"


def name_problem(name: str) -> str:
    """Why a folder's name cannot be a student's, "" if it can."""
    if not name.isprintable() or any(sign in name for sign in '/\\:*?"<>|'):
        return "its name has a character that a file name should not have"
    if name != name.strip() or name.startswith((".", "~", *FORMULA)) or name.endswith("."):
        return "its name must begin with a letter or digit and end without a dot or space"
    if len(name.encode()) > 100:
        return "its name is longer than 100 bytes"
    return ""


def assigned_numbers(cells: Iterable[Mapping[str, Any]]) -> list[ast.expr]:
    """The expressions that the cells assign to STUDENT, in order."""
    found = []
    for one in statements(cells):
        if isinstance(one, ast.Assign):
            targets = one.targets
        elif isinstance(one, ast.AnnAssign | ast.AugAssign):
            targets = [one.target]
        else:
            continue
        if one.value and any(isinstance(at, ast.Name) and at.id == NUMBER for at in targets):
            found.append(one.value)
    return found


def number_of(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> str:
    """The student's number in the notebook, "?" unless STUDENT is assigned one integer literal.

    "" if the lab has no numbers. The student's own cases depend on it.
    """
    if not assigned_numbers(release["cells"]):
        return ""
    values = [getattr(value, "value", None) for value in assigned_numbers(notebook["cells"])]
    plain = len(values) == 1 and type(values[0]) is int and values[0] < 10**18
    return str(values[0]) if plain else "?"
