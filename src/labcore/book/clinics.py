"""The labs' bug clinics on one page, without answers, and the instructor's key.

The directive `clinic-cases` shows each case as its lab does, with the figure that the lab's own
cells draw.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from labcore import exercises
from labcore.book import contents, explorers
from labcore.exercises.clinic import Clinic
from labcore.labs.source import cell_text, nbgrader_of
from labcore.ui import twin

__all__ = ["Case", "ClinicCases", "case", "clinic", "key", "setup"]

HEADING = re.compile(r"^##\s+(?:\d+\.\s+)?(.+)\n?")
# An exercise's points, in its first line and in a sentence.
POINTS = re.compile(
    r"^\*[\d.]+ points?\b[^*\n]*\*$|Each patient is graded by itself, for [\d.]+ points?\.", re.M
)


@dataclass(frozen=True, slots=True)
class Case:
    """A clinic as its lab shows it to one student.

    title, text: the lab's, in Markdown. names: the faults to choose from. figure: plotly JSON.
    printed: what the lab prints in addition to the curves.
    """

    slug: str
    title: str
    text: str
    names: tuple[str, ...]
    figure: dict[str, Any]
    printed: str


def clinic(slug: str) -> Clinic:
    """The clinic of a lab. Raises ValueError if it has none."""
    try:
        found = importlib.import_module(f"labcore.exercises.topics.{slug}").CLINIC
    except (ModuleNotFoundError, AttributeError):
        found = None
    if not isinstance(found, Clinic):
        raise ValueError(
            f"labcore.exercises.topics.{slug} must define a CLINIC, a lab's last exercise"
        )
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: the clinics' networks are too small for more to help."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def case(source: Path, number: int = 0) -> Case:
    """The case of the lab whose source is the notebook at `source`, for a student number.

    Raises ValueError if the lab's section with the patients is missing or malformed.
    """
    slug = source.stem
    ill = clinic(slug)
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    text, before, shown = _section(cells, source)
    names: dict[str, Any] = {"STUDENT": number}
    figure, printed = None, io.StringIO()
    with _one_thread(), contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(before, []), str(source), "exec"), names)
        for code in shown:
            value = _run(code, names, str(source))
            figure = value if hasattr(value, "to_plotly_json") else figure
    if figure is None:
        raise ValueError(f"{source}: a cell of the clinic must end with the patients' figure")
    head = HEADING.match(text)
    if head is None:
        raise ValueError(f"{source}: the clinic's section must begin with a heading, '## ...'")
    return Case(
        slug=slug,
        title=head[1].strip(),
        text=POINTS.sub("", text[head.end() :]).strip(),
        names=ill.names,
        figure=json.loads(figure.to_json()),
        printed=printed.getvalue().replace(ill.choices, "").strip("\n"),
    )


def _section(cells: list[dict[str, Any]], source: Path) -> tuple[str, list[ast.stmt], list[str]]:
    """The clinic's text, the imports above it, and its code cells before the answer's cell."""
    codes = [n for n, cell in enumerate(cells) if cell["cell_type"] == "code"]
    first = next((n for n in codes if ".patients(STUDENT)" in cell_text(cells[n])), None)
    if first is None:
        raise ValueError(f"{source}: no cell calls CLINIC.patients(STUDENT)")
    head = max(
        (n for n in range(first) if cells[n]["cell_type"] == "markdown"),
        default=0,
    )
    end = next(n for n in range(first, len(cells)) if n == len(cells) - 1 or nbgrader_of(cells[n]))
    imports: list[ast.stmt] = [
        node
        for n in codes
        if n < head and not nbgrader_of(cells[n])
        for node in ast.parse(cell_text(cells[n])).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    shown = [cell_text(cells[n]) for n in codes if head < n < end]
    return cell_text(cells[head]), imports, shown


def _run(code: str, names: dict[str, Any], file: str) -> Any:
    """Runs a cell and returns the value of its last expression, as a notebook does."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), file, "eval"), names)


def key(number: int = 0, slugs: Sequence[str] = ()) -> str:
    """The instructor's key for a student number, in Markdown: each patient's fault and why.

    slugs: the labs, all of the course if none is named. For each patient, the key says where the
    curves visibly depart from the healthy ones, clearest column first. Raises ValueError for a
    lab without a clinic and for an invalid student number.
    """
    blocks = [f"# Clinics: the key for number {number}"]
    for slug in slugs or exercises.slugs():
        ill = clinic(slug)
        with _one_thread():
            lines = [
                f"**{label}: {name}.** {ill.reason(name)}"
                for label, name in ill.diagnoses(number).items()
            ]
        blocks += [f"## {slug}", *lines, *filter(None, [ill.explanation])]
    return "\n\n".join(blocks) + "\n"


class ClinicCases(SphinxDirective):
    """Every lab's clinic in the book's order: text, names to choose from and curves, no answers.

    The patients are those of student number 0, the number in the released labs.
    """

    has_content = False

    def run(self) -> list[nodes.Node]:
        """A section for each lab."""
        root = Path(self.env.srcdir)
        sections: list[nodes.Node] = []
        for slug in contents.chapters(root):
            source = root / "labs" / "source" / slug / f"{slug}.ipynb"
            if not source.is_file():
                continue
            self._depend(source)
            sections.append(self._section(case(source)))
        return sections

    def _depend(self, source: Path) -> None:
        """Makes Sphinx read the page again when the lab or its exercises change."""
        folder = Path(
            str(importlib.import_module(f"labcore.exercises.topics.{source.stem}").__file__)
        )
        for path in (source, *sorted(folder.parent.glob("*.py"))):
            self.env.note_dependency(str(path))

    def _section(self, found: Case) -> nodes.section:
        section = nodes.section(ids=[f"clinic-{nodes.make_id(found.slug)}"])
        section += nodes.title("", "", *self._inline(found.title))
        lab = f"/labs/release/{found.slug}/{found.slug}"
        if lab[1:] in self.env.found_docs:
            section += nodes.paragraph("", "From the lab ", self._link(lab), nodes.Text("."))
        section += self._markdown(found.text)
        choose = nodes.bullet_list("", *[self._item(name) for name in found.names])
        section += [nodes.paragraph(text="Choose from:"), choose, self._curves(found)]
        if found.printed:
            wrapped = nodes.container(classes=["labcore-printed"])
            wrapped += nodes.literal_block(found.printed, found.printed, language="none")
            section += wrapped
        return section

    def _curves(self, found: Case) -> nodes.Element:
        alt = explorers.alternative_text(found.figure) or f"The curves of {found.title}"
        return explorers.figure_node(self.env, twin.still(found.figure, alt=alt))

    def _markdown(self, text: str) -> list[nodes.Node]:
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.split("\n"), source=self.env.docname), 0, holder)
        return list(holder.children)

    def _inline(self, text: str) -> list[nodes.Node]:
        (paragraph,) = self._markdown(text)
        return list(paragraph.children)

    def _item(self, text: str) -> nodes.list_item:
        return nodes.list_item("", nodes.paragraph(text=text))

    def _link(self, target: str) -> nodes.Node:
        return addnodes.pending_xref(
            "", nodes.inline(text=""), refdoc=self.env.docname, refdomain="std", reftype="doc",
            reftarget=target, refexplicit=False, refwarn=True,
        )  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to Sphinx."""
    app.add_directive("clinic-cases", ClinicCases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
