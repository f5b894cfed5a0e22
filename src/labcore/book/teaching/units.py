"""The teaching guide's data: chapters, labs and `book/teaching/chapters.toml`, checked.

Minutes, points and goals come from the notebooks themselves. `chapters.toml` adds what no notebook
says: which chapter needs which, what shows that a goal was reached, and what full answers have.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore import exercises
from labcore.book import contents
from labcore.book.chapter import ChapterMetadata, parse_metadata
from labcore.labs.releases import release_path
from labcore.labs.source import LabMetadata, cell_text, parse_lab_metadata, sections

__all__ = [
    "CHAPTERS",
    "OPEN",
    "QUIZ",
    "Course",
    "OpenQuestion",
    "Task",
    "Unit",
    "read_course",
    "read_units",
    "typed_table",
    "words",
]

CHAPTERS = "book/teaching/chapters.toml"
# What can show that a goal was reached, besides exercises.
QUIZ, OPEN = "quiz", "open"
FACTS = re.compile(r"^\*(\d+) points? · (\d+) minutes · (easy|medium|hard)\*$", re.MULTILINE)
CHECK = re.compile(r"^(?:\w+\.)?([A-Z][A-Z0-9_]*)\.check\(", re.MULTILINE)
KEYS = {"needs": list, "helps": list, "shown": list, "decision": list, "ask": dict, "open": list}
DECIDE = re.compile(r"\*\*Decide\.\*\* (.+)")  # its question, in the lab's cell "decision"
QUESTION = {"name": str, "question": str, "expects": list}
# Not prose: fences, directives' options, formulas, roles' names, HTML.
NOT_PROSE = [
    re.compile(r"^(```|~~~|:::).*$", re.MULTILINE),
    re.compile(r"^:\w[\w-]*:.*$", re.MULTILINE),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"\$[^$\n]+\$"),
    re.compile(r"\{[\w:-]+\}(?=`)"),
    re.compile(r"<[^>]+>"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """An exercise of a lab. name: its object's id in labcore.exercises, without the slug."""

    name: str
    title: str
    points: float
    minutes: int
    level: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenQuestion:
    """A question that a person grades. expects: what a full answer contains, one line each."""

    name: str
    question: str
    expects: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A chapter with its lab. title: the chapter's. part: its caption in the table of contents.

    words: the number of words of prose. tasks: the lab's exercises by name, in order. needs, helps:
    slugs of chapters that must or should be read before. shown: what shows each of the chapter's
    objectives: names of tasks, "quiz" or "open". ask: task name -> what to ask a stuck student.
    decision: what the lab asks the student to decide in two sentences.
    """

    slug: str
    part: str
    title: str
    chapter: ChapterMetadata
    words: int
    lab: LabMetadata
    tasks: Mapping[str, Task]
    needs: Sequence[str]
    helps: Sequence[str]
    shown: Sequence[Sequence[str]]
    ask: Mapping[str, str]
    open: Mapping[str, OpenQuestion]
    decision: OpenQuestion

    @property
    def short(self) -> str:
        """The title up to its colon."""
        return self.title.partition(":")[0]


Course = Mapping[str, Unit]


def words(markdown: str) -> int:
    """The number of words of prose in a Markdown text."""
    for pattern in NOT_PROSE:
        markdown = pattern.sub(" ", markdown)
    return len(re.findall(r"[A-Za-z][\w'’-]*", markdown))


def _order(root: Path) -> dict[str, str]:
    """slug -> part of each chapter, in the order of the table of contents."""
    return {
        name.rpartition("/")[2]: part.caption
        for part in contents.parts(root)
        for name, depth in part.pages
        if depth == 0 and (root / f"{name}.ipynb").is_file()
    }


def _tasks(slug: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Task]:
    """A lab's exercises by name: each is a heading with its facts and the first check below."""
    objects = vars(importlib.import_module(f"labcore.exercises.topics.{slug}"))
    known = {item.id: item.id.partition(".")[2] for item in exercises.load(slug)}
    found: dict[str, Task] = {}
    named = set()
    for cell, title in zip(cells, sections(cells), strict=True):
        text = cell_text(cell)
        if facts := FACTS.search(text) if cell["cell_type"] == "markdown" else None:
            points, minutes, level = int(facts[1]), int(facts[2]), facts[3]
        check = CHECK.search(text) if cell["cell_type"] == "code" else None
        if check and title not in named:
            name = known[objects[check[1]].id]
            plain = re.sub(r"^\d+\. ", "", title)
            found[name] = Task(name=name, title=plain, points=points, minutes=minutes, level=level)
            named.add(title)
    if lost := known.keys() - {f"{slug}.{name}" for name in found}:
        raise ValueError(f"the lab {slug} must have a task that checks {', '.join(sorted(lost))}")
    return found


def typed_table(where: str, found: Any, form: Mapping[str, type]) -> dict[str, Any]:
    """The table `found` if it has exactly the keys of `form`, with their types; else ValueError."""
    if not isinstance(found, dict) or found.keys() != form.keys():
        keys = ", ".join(found) if isinstance(found, dict) else repr(found)
        raise ValueError(f"{where} must have the keys {', '.join(form)}, got {keys}")
    for key, kind in form.items():
        if not isinstance(found[key], kind) or (kind is str and not found[key].strip()):
            raise ValueError(f"{where}: {key} must be of type {kind.__name__}, got {found[key]!r}")
    return found


def _lines(where: str, found: Sequence[Any]) -> tuple[str, ...]:
    if not all(isinstance(line, str) and line.strip() for line in found):
        raise ValueError(f"{where} must hold lines of text, got {found!r}")
    return tuple(found)


def _question(slug: str, found: Any) -> OpenQuestion:
    table = typed_table(f"{CHAPTERS}, [[{slug}.open]]", found, QUESTION)
    expects = _expected(slug, f"{table['name']}: expects", table["expects"])
    return OpenQuestion(name=table["name"], question=table["question"], expects=expects)


def _decision(
    slug: str, cells: Sequence[Mapping[str, Any]], expects: Sequence[Any]
) -> OpenQuestion:
    text = next((cell_text(cell) for cell in cells if cell.get("id") == "decision"), "")
    if not (asked := DECIDE.match(text)):
        raise ValueError(f"the lab {slug} must have a cell with the id decision: **Decide.** ...")
    lines = _expected(slug, "decision", expects)
    return OpenQuestion(name="decision", question=asked[1], expects=lines)


def _expected(slug: str, what: str, lines: Sequence[Any]) -> tuple[str, ...]:
    if len(lines) < 3:
        raise ValueError(f"{CHAPTERS}, {slug}, {what} must have at least 3 lines")
    return _lines(f"{CHAPTERS}, {slug}, {what}", lines)


def _unit(root: Path, slug: str, part: str, table: Mapping[str, Any]) -> Unit:
    notebook = json.loads((root / "book" / f"{slug}.ipynb").read_text(encoding="utf-8"))
    lab = json.loads(release_path(root, slug).read_text(encoding="utf-8"))
    prose = [cell_text(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    where = f"{CHAPTERS}, {slug}"
    asked = [_question(slug, one) for one in table["open"]]
    open_ = {one.name: one for one in asked}
    if len(open_) != len(asked):
        raise ValueError(f"{where}: two open questions have the same name; give each its own")
    return Unit(
        slug=slug,
        part=part,
        title=prose[0].splitlines()[0].removeprefix("# ").strip(),
        chapter=parse_metadata(notebook),
        words=words("\n\n".join(prose)),
        lab=parse_lab_metadata(lab),
        tasks=_tasks(slug, lab["cells"]),
        needs=_lines(f"{where}, needs", table["needs"]),
        helps=_lines(f"{where}, helps", table["helps"]),
        shown=tuple(_lines(f"{where}, shown", names) for names in table["shown"]),
        ask=dict(zip(table["ask"], _lines(f"{where}, ask", [*table["ask"].values()]), strict=True)),
        open=open_,
        decision=_decision(slug, lab["cells"], table["decision"]),
    )


def _unit_problems(unit: Unit, before: Sequence[str]) -> Iterator[str]:
    """The unit's faults. before: the slugs above it in the table of contents."""
    for key in ("needs", "helps"):
        for slug in getattr(unit, key):
            if slug not in before:
                yield f"{key} {slug!r}, which is not a chapter above it in the table of contents"
    if both := set(unit.needs) & set(unit.helps):
        yield f"needs and helps both name {', '.join(sorted(both))}; keep one"
    for line in unit.chapter.prerequisites:
        name = line.partition("the chapter on ")[2].partition(",")[0].lower()
        if name and not any(_named(slug, name) for slug in unit.needs):
            yield f"its notebook has the prerequisite {line!r}, but needs does not name it"
    goals = unit.chapter.objectives
    if len(unit.shown) != len(goals):
        yield f"shown has {len(unit.shown)} entries, but the notebook has {len(goals)} objectives"
    known = {*unit.tasks, QUIZ, OPEN}
    for goal, names in zip(goals, unit.shown, strict=False):
        if not names:
            yield f"nothing shows the goal {goal!r}"
        if unknown := set(names) - known:
            yield f"shown names {', '.join(sorted(unknown))}, which the lab does not have"
    unshown = unit.tasks.keys() - {name for names in unit.shown for name in names}
    if unshown:
        yield f"shown must name {', '.join(sorted(unshown))} for some goal"
    clinics = {item.id for item in exercises.load(unit.slug) if isinstance(item, exercises.Clinic)}
    functions = {name for name in unit.tasks if f"{unit.slug}.{name}" not in clinics}
    if unit.ask.keys() != functions:
        yield f"ask must name {', '.join(sorted(functions))}, got {', '.join(sorted(unit.ask))}"
    if not unit.open:
        yield "it must have at least one open question"


def _named(slug: str, name: str) -> bool:
    """Whether `slug` is the chapter that a prerequisite calls `name`."""
    return name.replace(" ", "_").startswith(slug)


def read_units(root: Path, tables: Mapping[str, Any]) -> Course:
    """The course in the checkout at root, by slug, with `tables` as its chapters.toml.

    Raises ValueError with a line for each fault.
    """
    order = _order(root)
    if order.keys() != tables.keys():
        gone, new = sorted(order.keys() - tables.keys()), sorted(tables.keys() - order.keys())
        lacks = [f"{CHAPTERS} is missing the chapters {', '.join(gone)}"] if gone else []
        more = [f"{CHAPTERS} names {', '.join(new)}, which the book does not have"] if new else []
        raise ValueError("; ".join(lacks + more))
    units: dict[str, Unit] = {}
    problems: list[str] = []
    for slug, part in order.items():
        unit = _unit(root, slug, part, typed_table(f"{CHAPTERS}, {slug}", tables[slug], KEYS))
        problems += [f"{CHAPTERS}, {slug}: {one}" for one in _unit_problems(unit, [*units])]
        units[slug] = unit
    if problems:
        raise ValueError("\n".join(problems))
    return units


def read_course(root: Path) -> Course:
    """The course in the checkout at root, by slug, in the order of the table of contents.

    Raises ValueError if the notebooks and `book/teaching/chapters.toml` disagree.
    """
    return read_units(root, tomllib.loads((root / CHAPTERS).read_text(encoding="utf-8")))
