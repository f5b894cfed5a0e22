"""`python -m labcore new-chapter <slug>`: every file and line that a chapter and its lab need.

The files come from `course/chapter/`, whose tree is that of the repository. A notebook is stored
there as text: its metadata on the first line, and a line `%% <id> <type>` before each cell. The
result is a small working chapter on moving averages, which the author replaces piece by piece.
"""

import json
import keyword
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from labcore.course import address
from labcore.labs.first_cell import first_cell

__all__ = ["write"]

TEMPLATES = Path(__file__).with_name("chapter")
CELL = re.compile(r"^%% (?P<id>\S+) (?P<type>markdown|code)(?: (?P<note>.*))?\n", re.MULTILINE)
SLUG = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CLAIM = """
[SLUG.variance]
statement = "Averaging white noise with beta 0.9 divides its variance by 18 or more."
quantity = "variance of white noise over that of its moving average"
parts = [
  { case = "variance/white-noise", quantity = "ratio/beta 0.9", at_least = 18.0 },
]
"""
TEACHING = """
[SLUG]
needs = []
helps = []
shown = [
    ["corrected", "quiz"],
    ["memory", "clinic", "open"],
]
decision = [
    "It takes a beta of 0.9 or less, whose memory is about ten values.",
    "The reason: with 0.99 the average is still mostly older values when the change is over.",
    "It says what it gives up: a curve that is as smooth.",
]

[SLUG.ask]
corrected = "What do the weights of the first two values sum to?"
memory = "What is the weight of a value after one step, and after two?"

[[SLUG.open]]
name = "which-beta"
question = "How would you choose beta for a curve that you want to read, and what would you lose?"
expects = [
    "It names the number of steps that an average covers.",
    "It says that a longer average is smoother and later.",
    "It says what the curve is read for: a trend, or a change that should be seen at once.",
]
"""
# file, a pattern, and what a new chapter inserts after the last text that matches it.
LINES = (
    (
        "_toc.yml",
        r"(?=  - caption: Practice\n)",
        '  - caption: "TITLE"\n    chapters:\n      - file: book/SLUG\n'
        "        sections:\n          - file: labs/release/SLUG/SLUG\n",
    ),
    ("_toc.yml", r"(?=          - file: book/api/models\n)", "          - file: book/api/SLUG\n"),
    (
        "README.md",
        r"^\| `\w+` \|.*\.ipynb\) \|\n",
        "| `SLUG` | TITLE | `SLUG` | [book/SLUG.ipynb](book/SLUG.ipynb) |\n",
    ),
    ("README.md", r"optim \| norm[\w| ]*?(?=  )", " | SLUG"),
    ("CHANGELOG.md", r"### Added\n\n", "- The chapter `SLUG`, with its lab.\n"),
    ("book/index.md", r"^\| \{doc\}`\w+` \|.*\n", "| {doc}`SLUG` | TITLE? | 30 |\n"),
    ("book/api.md", r"(?=^\| \[`labcore\.models`)", "| [`labcore.SLUG`](api/SLUG.md) | TITLE |\n"),
    ("pyproject.toml", r'"optim \| norm[^"]*(?=",\n)', " | SLUG"),
    ("pyproject.toml", r'"labcore\.hip"(?=, )', ', "labcore.SLUG"'),
    ("book/teaching/chapters.toml", r"\Z", TEACHING),
    ("src/labcore/claims.toml", r"\Z", CLAIM),
)


def write(root: Path, slug: str, title: str = "") -> list[str]:
    """Write a new chapter into the checkout at `root`, and return a line for each file.

    title: of the page; by default the slug in words.
    Raises ValueError, before anything is written, for a slug that is taken or no Python name, a
    title with a quote, a bar or a line break, and a file that lacks the line after which the
    chapter's own line belongs.
    """
    if not SLUG.fullmatch(slug) or keyword.iskeyword(slug):
        raise ValueError(f"slug must be words in lower case joined by _, got {slug!r}")
    title = title or slug.replace("_", " ").capitalize()
    if re.search(r'["|\n\\]', title):
        raise ValueError(f"title must have no quote, bar, backslash or line break, got {title!r}")

    def filled(text: str) -> str:
        return text.replace("SLUG", slug).replace("TITLE", title)

    texts = {}
    for template in sorted(TEMPLATES.rglob("*.txt")):
        name = filled(template.relative_to(TEMPLATES).with_suffix("").as_posix())
        text = filled(template.read_text("utf-8"))
        if name.endswith(".ipynb"):
            text = json.dumps(_notebook(text, address.read(root)), indent=1) + "\n"
        texts[name] = text
    taken = [name for name in (*texts, f"src/labcore/{slug}.py") if (root / name).exists()]
    if taken:
        raise ValueError(f"slug must be new, got {slug!r}, which has {taken[0]}; choose another")
    for name, pattern, inserted in LINES:
        text = texts.get(name) or (root / name).read_text("utf-8")
        found = [match.end() for match in re.finditer(pattern, text, re.MULTILINE)]
        if not found:
            raise ValueError(f"{name} must have a line that matches {pattern!r}; restore it")
        texts[name] = text[: found[-1]] + filled(inserted) + text[found[-1] :]
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    for module in (["benchmarks", slug, "--save"], ["labcore.claims"], ["labcore", "labs", slug]):
        _run(root, module)
    return [
        *(f"written: {name}" for name in texts),
        f"measured, judged, and released: {slug}; now run `make check`",
    ]


def _notebook(text: str, url: str) -> dict[str, Any]:
    """Return the notebook that a template's text describes."""
    head, _, text = text.partition("\n")
    marks = list(CELL.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        name = mark["id"]
        source = text[mark.end() : end].strip("\n").replace("FIRST_CELL", first_cell(url))
        cell = {"cell_type": mark["type"], "id": name, "metadata": _metadata(name, mark["note"])}
        if mark["type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append({**cell, "source": source.splitlines(keepends=True)})
    metadata = {
        "kernelspec": KERNEL,
        "labcore": json.loads(head),
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _metadata(name: str, note: str | None) -> dict[str, Any]:
    """Return a cell's metadata: JSON, or nbgrader's for SOLUTION and GRADED <points>."""
    kind, _, points = (note or "{}").partition(" ")
    if kind not in ("SOLUTION", "GRADED"):
        return json.loads(note or "{}")
    graded = kind == "GRADED"
    cell = {"grade": graded, "grade_id": name, "locked": graded, "schema_version": 3}
    cell |= {"points": int(points)} if graded else {}
    return {"nbgrader": {**cell, "solution": not graded, "task": False}}


def _run(root: Path, module: list[str]) -> None:
    """Run `python -m` with the code of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"`python -m {' '.join(module)}` must succeed, but it said: {said}")
