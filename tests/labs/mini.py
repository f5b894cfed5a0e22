"""A lab of two exercises that imports nothing, so that its kernels start fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labcore.labs import releases

# For a program that imports labcore: what CUDA's libraries only reserve counts too.
MEMORY_MIB = 1500 if torch.version.cuda is None else 4500
CELL_S = 6 if torch.version.cuda is None else 20  # enough to fill that much on a busy machine
SLUG = "mini"
Notebook = dict[str, Any]
DOUBLE, SQUARE = "double-test", "square-test"


def code(name: str, source: str, **nbgrader: Any) -> dict[str, Any]:
    """A code cell; with nbgrader's keys one that is graded or holds a solution."""
    meta = {"grade": False, "locked": False, "solution": False, "task": False, "schema_version": 3}
    return {
        "cell_type": "code",
        "id": name,
        "metadata": {"nbgrader": {**meta, "grade_id": name, **nbgrader}} if nbgrader else {},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }


def exercise(name: str, answer: str, tests: str, points: float) -> list[dict[str, Any]]:
    """A solution cell and its graded cell."""
    body = f"def {name}(x):\n    ### BEGIN SOLUTION\n    return {answer}\n    ### END SOLUTION"
    hidden = f"# Graded.\n### BEGIN HIDDEN TESTS\n{tests}\n### END HIDDEN TESTS"
    return [
        code(name, body, solution=True),
        code(f"{name}-test", hidden, grade=True, locked=True, points=points),
    ]


def mini_lab(slug: str = SLUG) -> Notebook:
    """The source: double for 2 points, square for 3."""
    return {
        "cells": [
            {"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# Lab: größer"},
            code("begin", "import math"),
            *exercise("double", "secret_two * x", "assert double(4) == 8, 'hidden double'", 2),
            code("more", "secret_two = 2"),
            *exercise("square", "x**2", "assert square(-3) == 9, 'hidden square'", 3),
        ],
        "metadata": {
            "kernelspec": {
                "name": "python3",
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
            },
            "language_info": {"name": "python"},
            "labcore": {"kind": "lab", "slug": slug, "minutes": 10, "tier": "cpu"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def source_path(root: Path, slug: str = SLUG) -> Path:
    """Where the source of a lab stands."""
    return root / "labs" / "source" / slug / f"{slug}.ipynb"


def save(notebook: Notebook, path: Path) -> Path:
    """Writes a notebook, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def checkout(root: Path, change: Callable[[Notebook], object] = bool) -> Path:
    """A checkout with the mini lab alone, its notebook changed in place; not released yet."""
    notebook = mini_lab()
    change(notebook)
    save(notebook, source_path(root))
    return root


def read(path: Path) -> Notebook:
    """A notebook as JSON."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def cell(notebook: Notebook, name: str) -> dict[str, Any]:
    """The cell with this id."""
    return next(one for one in notebook["cells"] if one["id"] == name)


def released(root: Path) -> Notebook:
    """The release of the checkout's mini lab, made now."""
    (made,) = releases.write(root)
    assert not made.problem, made.problem
    return read(made.path)


def solved(notebook: Notebook, **answers: str) -> Notebook:
    """The release with code in the place of its stubs: by default the right one."""
    texts = {
        "double": "def double(x):\n    return 2 * x",
        "square": "def square(x):\n    return x * x",
    }
    for name, text in (texts | answers).items():
        cell(notebook, name)["source"] = text
    return notebook
