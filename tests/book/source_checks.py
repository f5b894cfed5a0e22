"""Gates over the sources of the book. Each returns a list of sentences, empty when all is well."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pybtex.database import parse_string

from labcore.book.chapter import parse_metadata
from labcore.book.teaching.units import words
from labcore.labs.first_cell import SETUP_LINE
from tests.book.outputs import output_problems

CELL_LINES = 20
BLIND = {"skip-execution", "raises-exception"}  # of such a cell the build sees no error
WORDS = (1500, 4000)
# Calls that ask, fetch, draw or quote: a page folds their cells and shows what they produce.
PLUMBING = {
    "Question", "explore", "opening", "predict", "quiz", "recorded", "reveal", "show_source",
    "table", "takeaway", "verdicts",
}  # fmt: skip
AT_LEAST = {"predict": 2, "explore": 1, "quiz": 1}
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
CITE = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
DOI = re.compile(r"10\.\d{4,9}/\S+")
ARXIV = re.compile(r"(?:arXiv:)?(\d{4}\.\d{4,5}|[a-z.-]+/\d{7})(v\d+)?", re.IGNORECASE)


def _text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _nodes(code: str) -> Iterator[ast.AST]:
    """The syntax of a cell, its magics left out."""
    lines = [x for x in code.splitlines() if not x.lstrip().startswith(("%", "!"))]
    return ast.walk(ast.parse("\n".join(lines)))


def _calls(code: str) -> list[str]:
    """The names of the functions that code calls: f(…) and m.f(…) are both f."""
    found = []
    for node in _nodes(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            func = node.func
            found.append(func.id if isinstance(func, ast.Name) else func.attr)
    return found


def _name_problems(code: str) -> list[str]:
    """Private names and imports of anything but labcore, torch, numpy and Python's own library."""
    allowed = {"labcore", "torch", "numpy", "google", *sys.stdlib_module_names}
    names, modules = [], []
    for node in _nodes(code):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [part for alias in node.names for part in alias.name.split(".")]
            modules += [alias.name for alias in node.names if isinstance(node, ast.Import)]
            modules += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
    private = [name for name in names if name.startswith("_") and not name.endswith("__")]
    foreign = [module for module in modules if module.split(".")[0] not in allowed]
    return [f"uses the private name {name}" for name in private] + [
        f"imports {module}; a chapter needs labcore and torch alone" for module in foreign
    ]


def _cell_problems(cells: list[dict[str, Any]]) -> list[str]:
    problems = []
    for number, cell in enumerate(cells, 1):
        where = f"cell {number}"
        if not cell.get("id"):
            problems.append(f"{where} has no id")
        if cell["cell_type"] != "code":
            continue
        lines = _text(cell).count("\n") + 1
        if lines > CELL_LINES:
            problems.append(f"{where} has {lines} lines, at most {CELL_LINES}")
        problems += [f"{where} {problem}" for problem in _name_problems(_text(cell))]
        metadata = cell.get("metadata", {})
        tags = metadata.get("tags", ())
        problems += [
            f"{where} is tagged {tag}, which hides its errors" for tag in BLIND & set(tags)
        ]
        hidden = metadata.get("jupyter", {}).get("source_hidden")
        folded = hidden and "hide-input" in tags
        if (plumbing := PLUMBING.intersection(_calls(_text(cell)))) and not folded:
            problems.append(
                f"{where} calls {', '.join(sorted(plumbing))}, which a page folds: tag it "
                "hide-input, and set jupyter.source_hidden"
            )
        problems += [f"{where} {problem}" for problem in output_problems(cell)]
    ids = [cell.get("id") for cell in cells]
    return problems + ([] if len(set(ids)) == len(ids) else ["two cells share an id"])


def _yaml_problems(prose: str) -> Iterator[str]:
    for block in YAML.findall(prose):
        try:
            yaml.safe_load(block)
        except yaml.YAMLError as error:
            yield f"a block of YAML doesn't parse: {error}"


def chapter_problems(path: Path) -> list[str]:
    """What keeps a notebook from being a chapter."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells, problems = notebook["cells"], []
    try:
        parse_metadata(notebook)
    except ValueError as error:
        problems.append(str(error))
    if notebook["metadata"].get("kernelspec", {}).get("language") != "python":
        problems.append('metadata.kernelspec.language must be "python"')
    problems += _cell_problems(cells)
    code = [_text(cell) for cell in cells if cell["cell_type"] == "code"]
    if not code or not code[0].startswith(SETUP_LINE):
        problems.append("the first code cell must install labcore where it is missing")
    if not cells or not re.match(r"# \S", _text(cells[0])):
        problems.append("the first cell must be the title")
    prose = "\n\n".join(_text(c) for c in cells if c["cell_type"] == "markdown")
    problems += _yaml_problems(prose)
    count = words(prose)
    if not WORDS[0] <= count <= WORDS[1]:
        problems.append(f"{count} words of prose, {WORDS[0]} to {WORDS[1]}")
    calls = ["explore" if name == "opening" else name for text in code for name in _calls(text)]
    for name, least in AT_LEAST.items():
        if calls.count(name) < least:
            problems.append(f"{calls.count(name)} calls of {name}(), at least {least}")
    return [f"{path.name}: {problem}" for problem in problems]


def _cited(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(_text(cell) for cell in cells if cell["cell_type"] == "markdown")
    return {key.strip() for keys in CITE.findall(text) for key in keys.split(",")}


def citation_problems(sources: list[Path], bibliography: str) -> list[str]:
    """Keys that references.bib lacks, and entries without a DOI or an arXiv id."""
    entries = parse_string(bibliography, "bibtex").entries
    known, problems = {key.lower() for key in entries}, []
    for path in sources:
        missing = sorted(key for key in _cited(path) if key.lower() not in known)
        problems += [f"{path.name} cites {key}, which references.bib lacks" for key in missing]
    for key, entry in entries.items():
        fields = {name.lower(): value for name, value in entry.fields.items()}
        doi = DOI.fullmatch(fields.get("doi", ""))
        if not doi and not ARXIV.fullmatch(fields.get("eprint", "")):
            problems.append(f"{key} has neither a DOI nor an arXiv id (doi, eprint)")
    return problems
