"""Does a student's notebook use an exercise's answer? Read from its syntax, never run.

The package is public and so are the references: looking is allowed, handing in a call is not.
A flag is for the instructor's eyes and takes no points away. Code that hides what it does is not
recognized here, but what it would need for that is: `doubts` names it for a person to read.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from labcore import exercises
from labcore.exercises import Clinic, load, slugs
from labcore.labs.source import cell_text, code_tree, nbgrader_of, sections

__all__ = ["copied", "doubts", "uses_of_answers"]

ANSWERS = ("diagnoses", "reference", "wrong")
PACKAGE = "labcore.exercises"
TOPICS = f"{PACKAGE}.topics"
# Ways to code and processes that syntax does not show: no lab needs one for an answer.
HIDING = ("eval", "exec", "compile", "__import__", "open", "globals", "vars", "breakpoint")
REACHING = (
    *("ctypes", "gc", "importlib", "inspect", "linecache", "marshal", "multiprocessing"),
    *("os", "pathlib", "pickle", "pkgutil", "runpy", "shutil", "signal", "socket", "subprocess"),
    *("sys", "threading", "traceback", "types", "_thread", "builtins"),
)
INSIDE = ("__globals__", "__code__", "__closure__", "__subclasses__", "__builtins__", "f_back")


def _said(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


def _topic(module: str) -> bool:
    """Whether a module is a lab's own, `labcore.exercises.topics.<slug>`, and no part of one."""
    parent, _, slug = module.rpartition(".")
    return parent == TOPICS and not slug.startswith("_")


def _imports(node: ast.AST) -> Iterator[str]:
    """Imports of what lies behind a lab's exercises; the exercises are what a lab uses."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith(f"{PACKAGE}.") and not _topic(alias.name):
                yield f"import {alias.name}"
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            if node.module == PACKAGE:
                own = alias.name in (*exercises.__all__, "topics", "*")
            elif node.module == TOPICS:
                own = _topic(f"{TOPICS}.{alias.name}")
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


def _doubtful(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for name in [module] if module else [alias.name for alias in node.names]:
                if name.partition(".")[0] in REACHING:
                    yield name
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in HIDING:
            yield f"{_said(node.func)}()"
        elif isinstance(node, ast.Attribute) and node.attr in INSIDE:
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


def _found(
    notebook: Mapping[str, Any], uses_of: Callable[[ast.Module], Iterator[str]]
) -> Iterator[tuple[str, str]]:
    cells = notebook["cells"]
    for cell, place in zip(cells, _places(cells), strict=True):
        if cell["cell_type"] != "code":
            continue
        try:
            uses = list(uses_of(code_tree(cell_text(cell))))
        except SyntaxError:
            continue  # It does not run either.
        except (ValueError, RecursionError, MemoryError):
            uses = ["code that could not be read"]
        yield from ((place, use) for use in uses)


def uses_of_answers(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """`below "Settings" uses lion.TRANSFER.reference`: each use that the release has not itself.

    The words in quotes are the heading above the cell, else the grade_id at it or above it.
    """
    return _new(notebook, release, _uses)


def doubts(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """`below "Settings" uses exec(): read it`, for each way to hide what an answer does.

    Such code may be honest. That it is cannot be proved by running it in the same Python.
    """
    commands = [
        f"{place} runs a command of the system: read it"
        for cell, place in zip(notebook["cells"], _places(notebook["cells"]), strict=True)
        if cell["cell_type"] == "code" and _commands(cell_text(cell))
    ]
    found = [f"{use}: read it" for use in _new(notebook, release, _doubtful)]
    return list(dict.fromkeys([*found, *commands]))


def _commands(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines()]
    return any(line.startswith(("!", "%%", "%sx", "%system")) for line in lines)


def _new(
    notebook: Mapping[str, Any],
    release: Mapping[str, Any],
    uses_of: Callable[[ast.Module], Iterator[str]],
) -> list[str]:
    own = {use for _, use in _found(release, uses_of)}
    found = _found(notebook, uses_of)
    return list(dict.fromkeys(f"{place} uses {use}" for place, use in found if use not in own))


def _shape(thing: Any) -> list[tuple[str, Any]] | None:
    """What a function's code does step by step, as it is wherever the same text was compiled.

    Where torch is imported beside it, Python loads an attribute; elsewhere it loads a method.
    """
    code = getattr(thing, "__code__", None)
    if code is None:
        return None
    named = {*dis.hasname, *dis.haslocal, *dis.hasconst, *dis.hascompare}
    return [
        (
            one.opname.replace("LOAD_METHOD", "LOAD_ATTR"),
            one.argval
            if one.opcode in named and not isinstance(one.argval, CodeType)
            else one.argrepr * (one.opname == "BINARY_OP"),
        )
        for one in dis.get_instructions(code)
        if one.opname not in ("PUSH_NULL", "PRECALL", "NOP")
    ]


def copied(thing: Any) -> bool:
    """Whether a function is a loaded lab's reference, name for name and constant for constant."""
    own = [
        exercise.reference
        for slug in slugs()
        if f"labcore.exercises.topics.{slug}" in sys.modules
        for exercise in load(slug)
        if not isinstance(exercise, Clinic)
    ]
    return _shape(thing) is not None and any(_shape(thing) == _shape(one) for one in own)
