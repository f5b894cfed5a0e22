"""Finds uses of the exercises' answers in a student's notebook, by its syntax; nothing is run.

The package is public, and so are its reference solutions: students may read them but not hand in a
call to one. A flag is for the instructor and costs no points. Code that hides what it does cannot
be recognized here, but `doubts` lists what it would need to hide, for a person to read.
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
# Ways to reach code and processes that syntax does not show. No lab's answer needs one.
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
    """Whether a module is a lab's `labcore.exercises.topics.<slug>` itself, not a part of it."""
    parent, _, slug = module.rpartition(".")
    return parent == TOPICS and not slug.startswith("_")


def _imports(node: ast.AST) -> Iterator[str]:
    """Imports of exercise internals; a lab itself imports only the exercises."""
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
    """Where each cell is, in words: Jupyter shows neither cell numbers nor ids."""
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
            continue  # it does not run either
        except (ValueError, RecursionError, MemoryError):
            uses = ["code that cannot be parsed"]
        yield from ((place, use) for use in uses)


def uses_of_answers(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """Each use that the release does not have: `below "Settings" uses lion.TRANSFER.reference`.

    The quoted words are the heading above the cell, or else the grade_id of the cell or of one
    above it.
    """
    return _new(notebook, release, _uses)


def doubts(notebook: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """Each use of a way to hide what an answer does: `below "Settings" uses exec(): read it`.

    Such code may be honest, but running it in the same Python cannot prove that.
    """
    commands = [
        f"{place} runs a system command: read it"
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
    """A function's instructions, the same wherever the same text was compiled; None without code.

    LOAD_METHOD counts as LOAD_ATTR: next to an import of torch, Python compiles the same call
    to the latter.
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
    """Whether a function is a loaded lab's reference, with the same names and constants."""
    own = [
        exercise.reference
        for slug in slugs()
        if f"labcore.exercises.topics.{slug}" in sys.modules
        for exercise in load(slug)
        if not isinstance(exercise, Clinic)
    ]
    return _shape(thing) is not None and any(_shape(thing) == _shape(one) for one in own)
