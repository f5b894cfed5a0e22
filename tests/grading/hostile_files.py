"""Submissions whose file or form is the attack: what is no notebook, and notebooks taken apart."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.grading.hostile import DIED, STOPPED, Hostile, wrong
from tests.labs import mini

# What is written ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A student's folder that cannot be graded. write: makes it, of the right notebook's text.

    points: "" where the lab is not known; status: what stands behind "not graded: ".
    """

    write: Callable[[Path, str], object]
    status: str
    points: str = "0"


def content(make: Callable[[str], str | bytes]) -> Callable[[Path, str], object]:
    """Writes what `make` makes of the right notebook's text."""

    def write(folder: Path, text: str) -> None:
        folder.mkdir()
        made = make(text)
        data = made.encode() if isinstance(made, str) else made
        (folder / "mini.ipynb").write_bytes(data)

    return write


def as_json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, str], object]:
    """Writes the right notebook with a change of its JSON."""

    def make(text: str) -> str:
        notebook = json.loads(text)
        change(notebook)
        return json.dumps(notebook)

    return content(make)


def _linked(folder: Path, _: str) -> None:
    folder.mkdir()
    (folder / "mini.ipynb").symlink_to("/etc/passwd")


def _linked_folder(folder: Path, _: str) -> None:
    folder.symlink_to("/etc")


def _pipe(folder: Path, _: str) -> None:
    folder.mkdir()
    os.mkfifo(folder / "mini.ipynb")


def _sparse(folder: Path, _: str) -> None:
    folder.mkdir()
    with (folder / "mini.ipynb").open("wb") as file:
        file.truncate(100 << 20)


def _folder(folder: Path, _: str) -> None:
    (folder / "mini.ipynb" / "deeper").mkdir(parents=True)


def _twice(folder: Path, text: str) -> None:
    folder.mkdir()
    for name in ("mini.ipynb", "mini (1).ipynb"):
        (folder / name).write_text(text)


def _other_lab(folder: Path, text: str) -> None:
    folder.mkdir()
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"].get("nbgrader", {})["grade_id"] = "maxi-" + str(cell.get("id"))
    (folder / "mini.ipynb").write_text(json.dumps(notebook))


def _long(notebook: dict[str, Any], source: str) -> None:
    notebook["cells"].append(mini.code("long", source))


NO_JSON = "the file is not valid JSON and so not a notebook"
NO_FORMAT = "the file is not a notebook of format 4"
BROKEN = {
    "an empty file": Broken(write=content(lambda _: b""), status="the file is empty"),
    "blanks alone": Broken(write=content(lambda _: b" \n\t"), status="the file is empty"),
    "no JSON": Broken(write=content(lambda _: "not { json"), status=NO_JSON),
    "cut off in the middle": Broken(
        write=content(lambda text: text[: len(text) // 2]), status=NO_JSON
    ),
    "deep brackets": Broken(write=content(lambda _: "[" * 1_000_000), status=NO_JSON),
    "bytes of no encoding": Broken(write=content(lambda _: b"\xff\xfe{\x00\xd8"), status=NO_JSON),
    "a list": Broken(write=content(lambda _: "[1, 2]"), status=NO_FORMAT),
    "format 3": Broken(
        write=as_json(lambda one: one.update(nbformat=3, worksheets=[{"cells": one.pop("cells")}])),
        status=NO_FORMAT,
    ),
    "format 5": Broken(write=as_json(lambda one: one.update(nbformat=5)), status=NO_FORMAT),
    "a format in words": Broken(
        write=as_json(lambda one: one.update(nbformat="4")), status=NO_FORMAT
    ),
    "a cell that is a number": Broken(
        write=as_json(lambda one: one["cells"].insert(2, 7)),
        status="cell 3 of the notebook is damaged",
    ),
    "a source of numbers": Broken(
        write=as_json(lambda one: one["cells"][1].update(source=[1, 2])),
        status="cell 2 of the notebook is damaged",
    ),
    "30 MB of blanks": Broken(
        write=content(lambda text: text + " " * 30_000_000), status="the file is larger than 20 MB"
    ),
    "100 MB of nothing": Broken(write=_sparse, status="the file is larger than 20 MB"),
    "a cell of 10 MB": Broken(
        write=as_json(lambda one: _long(one, "a;" * 5_000_000)),
        status="the text of its cells is longer than 1 MB",
    ),
    "5,000 cells": Broken(
        write=as_json(lambda one: one["cells"].extend(mini.code(f"{n}", "1") for n in range(5000))),
        status="the notebook has 5007 cells, more than 1000",
    ),
    "a link": Broken(write=_linked, status="it is a link or not a regular file"),
    "a linked folder": Broken(write=_linked_folder, status="the folder is a link", points=""),
    "a pipe": Broken(write=_pipe, status="it is a link or not a regular file"),
    "a folder called mini.ipynb": Broken(
        write=_folder, status="the folder has no notebook", points=""
    ),
    "two notebooks": Broken(
        write=_twice,
        status="2 notebooks for one lab (mini (1).ipynb, mini.ipynb); keep one",
    ),
    "another lab's notebook": Broken(
        write=_other_lab, status="the notebook has none of this lab's graded cells"
    ),
    "<b>Eve": Broken(
        write=content(str),
        status="its name has a character that a file name should not have",
        points="",
    ),
}

# What runs ---------------------------------------------------------------------------------------


def _without(*names: str) -> Callable[[mini.Notebook], object]:
    def change(notebook: mini.Notebook) -> None:
        notebook["cells"] = [one for one in notebook["cells"] if one["id"] not in names]

    return change


def _turned(notebook: mini.Notebook) -> None:
    notebook["cells"].reverse()


def _doubled(notebook: mini.Notebook) -> None:
    """The graded cell and the answer twice; the last answer is the wrong one."""
    again = copy.deepcopy([mini.cell(notebook, name) for name in ("square", "square-test")])
    again[0]["source"] = wrong("return 7")
    notebook["cells"] += again


def _renamed(notebook: mini.Notebook) -> None:
    for cell in notebook["cells"]:
        cell["id"] = "same"


def _worth_more(notebook: mini.Notebook) -> None:
    meta = mini.cell(notebook, "double-test")["metadata"]["nbgrader"]
    meta.update(points=1000, grade_id="double-test")
    mini.cell(notebook, "square-test")["metadata"]["nbgrader"].update(points=-5, grade=False)


def _other_test(notebook: mini.Notebook) -> None:
    mini.cell(notebook, "square-test")["source"] = "square = lambda x: 9"


def _without_kernel(notebook: mini.Notebook) -> None:
    notebook["metadata"] = {}


def _other_kernel(notebook: mini.Notebook) -> None:
    notebook["metadata"]["kernelspec"] = {"name": "../../evil", "display_name": "<b>R</b>"}
    notebook["metadata"]["language_info"] = {"name": "R"}


def _deep(notebook: mini.Notebook) -> None:
    inner: Any = 1
    for _ in range(400):
        inner = {"more": [inner]}
    for cell in notebook["cells"]:
        cell["metadata"]["deep"] = inner
        cell["attachments"] = inner


def _stale(notebook: mini.Notebook) -> None:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = 7
            said = {"output_type": "stream", "name": "stdout", "text": "Right: it passed, 3 points"}
            cell["outputs"] = [said]
        cell["metadata"]["tags"] = ["skip-execution", "raises-exception"]


def _surrogates(notebook: mini.Notebook) -> None:
    mini.cell(notebook, "title")["source"] = "# \ud800 and \0 and \u202e"
    notebook["cells"].append(mini.code("odd", "print('\udfff')"))


STUB = "def square(x):\n    raise NotImplementedError"
FORMS = {
    "graded cells deleted": Hostile(
        points=5,
        change=_without("double-test", "square-test"),
        flags=("cell double-test missing, put back", "cell square-test missing, put back"),
    ),
    "answer deleted": Hostile(
        points=2,
        change=_without("square"),
        flags=("cell square missing",),
        page=("square is not defined",),
    ),
    "cells in another order": Hostile(points=5, change=_turned),
    "cells twice": Hostile(
        points=2,
        change=_doubled,
        flags=(
            "cell square occurs 2 times; the last one counts",
            "cell square-test occurs 2 times",
        ),
    ),
    "ids all the same": Hostile(points=5, change=_renamed),
    "other points": Hostile(
        points=2,
        change=_worth_more,
        square=wrong("return 7"),
        flags=("grading data of double-test changed", "grading data of square-test changed"),
    ),
    "another test": Hostile(
        points=2,
        change=_other_test,
        square=wrong("return 7"),
        flags=("locked cell square-test changed, restored",),
    ),
    "no kernel named": Hostile(points=5, change=_without_kernel),
    "another kernel": Hostile(points=5, change=_other_kernel),
    "deep metadata": Hostile(points=5, change=_deep),
    "outputs that look right": Hostile(points=2, square=STUB, change=_stale),
    "signs that no file has": Hostile(points=5, change=_surrogates),
    "a deep expression": Hostile(
        points=5,
        extra="-" * 20_000 + "1",  # no Python parses that many levels
        also=(STOPPED, DIED),
        flags=("code that cannot be parsed",),
    ),
    "O'Brien & Söhne; =x": Hostile(points=5),
}
