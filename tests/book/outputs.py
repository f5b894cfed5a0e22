"""Notebooks have no outputs, except below `# NBVAL_CHECK_OUTPUT`, where they are compared.

It needs Python alone: pre-commit runs it as a program, and the gate on chapters imports it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def output_problems(cell: dict[str, Any]) -> list[str]:
    """What is wrong with the outputs of one code cell."""
    kept = "# NBVAL_CHECK_OUTPUT" in "".join(cell["source"])
    if not kept and (cell.get("outputs") or cell.get("execution_count") is not None):
        return ["has outputs or an execution count; strip them"]
    if kept and not cell.get("outputs"):
        return ["is marked NBVAL_CHECK_OUTPUT and has no output to compare"]
    if kept and cell.get("execution_count") is None:  # nbval then fails the cell as "unrun"
        return ["has outputs but no execution count; set it to 1"]
    return []


def _printed(cell: dict[str, Any]) -> str:
    texts = (one.get("text") or one["data"]["text/plain"] for one in cell["outputs"])
    return "".join("".join(text) for text in texts)


def changed_outputs(notebook: Path, executed: Path) -> list[str]:
    """Name the marked cells of a notebook that printed something else in a build."""
    cells = {one["id"]: one for one in json.loads(executed.read_text("utf-8"))["cells"]}
    return [
        f"cell {cell['id']} printed {_printed(cells[cell['id']])!r}, kept is {_printed(cell)!r}"
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]
        if "# NBVAL_CHECK_OUTPUT" in "".join(cell["source"])
        and _printed(cell) != _printed(cells[cell["id"]])
    ]


def main(paths: list[str]) -> int:
    """Prints a line for each cell that breaks the rule; returns 1 if there is one, else 0."""
    lines = [
        f"{path}: cell {number} {problem}"
        for path in paths
        for number, cell in enumerate(json.loads(Path(path).read_text("utf-8"))["cells"], 1)
        if cell["cell_type"] == "code"
        for problem in output_problems(cell)
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
