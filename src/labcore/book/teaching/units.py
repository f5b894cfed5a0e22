"""What the teaching guide knows: chapters, labs, `chapters.toml` and `syllabi.toml`, checked.

Minutes, points and goals come from the notebooks themselves. The two files in `book/teaching`
add what no notebook says: which chapter needs which, what shows that a goal was reached, open
questions, and plans of courses.
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
# What shows a goal, besides the names of exercises.
QUIZ, OPEN = "quiz", "open"
FACTS = re.compile(r"^\*(\d+) points? · (\d+) minutes · (easy|medium|hard)\*$", re.MULTILINE)
CHECK = re.compile(r"^(?:\w+\.)?([A-Z][A-Z0-9_]*)\.check\(", re.MULTILINE)
KEYS = {"needs": list, "helps": list, "shown": list, "ask": dict, "open": list}
QUESTION = {"name": str, "question": str, "expects": list}
# What is not prose: fences, directives' options, formulas, roles' names, HTML.
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
    """An exercise of a lab. name: that of its object in labcore.exercises, without the slug."""

    name: str
    title: str
    points: float
    minutes: int
    level: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenQuestion:
    """A question that a person marks. expects: what a full answer has, a line each."""

    name: str
    question: str
    expects: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A chapter with its lab. title: the chapter's; part: its caption in the table of contents.

    words: of prose. tasks: the lab's exercises by name, in order. needs, helps: slugs of chapters
    to be read before, or better before. shown: for each of the chapter's objectives the names of
    tasks, "quiz" or "open". ask: task's name -> what to ask a student who is stuck.
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

    @property
    def short(self) -> str:
        """The title up to its colon."""
        return self.title.partition(":")[0]


Course = Mapping[str, Unit]


def words(markdown: str) -> int:
    """How many words of prose a Markdown text has."""
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
    """The exercises of a lab by name: a heading with its facts, and the first check below it."""
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
        raise ValueError(f"the lab {slug} has no task with a check of {', '.join(sorted(lost))}")
    return found


def typed_table(where: str, found: Any, form: Mapping[str, type]) -> dict[str, Any]:
    """A table with all of these keys, none else, each of its type. Raises ValueError."""
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
    expects = _lines(f"{CHAPTERS}, {slug}, expects", table["expects"])
    if len(expects) < 3:
        raise ValueError(f"{CHAPTERS}, {slug}, {table['name']}: expects needs three lines or more")
    return OpenQuestion(name=table["name"], question=table["question"], expects=expects)


def _unit(root: Path, slug: str, part: str, table: Mapping[str, Any]) -> Unit:
    notebook = json.loads((root / "book" / f"{slug}.ipynb").read_text(encoding="utf-8"))
    lab = json.loads(release_path(root, slug).read_text(encoding="utf-8"))
    prose = [cell_text(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    where = f"{CHAPTERS}, {slug}"
    asked = [_question(slug, one) for one in table["open"]]
    open_ = {one.name: one for one in asked}
    if len(open_) != len(asked):
        raise ValueError(f"{where}: two open questions share a name; give each its own")
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
    )


def _unit_problems(unit: Unit, before: Sequence[str]) -> Iterator[str]:
    """What does not fit. before: the slugs above it in the table of contents."""
    for key in ("needs", "helps"):
        for slug in getattr(unit, key):
            if slug not in before:
                yield f"{key} {slug!r}, which is no chapter above it in the table of contents"
    if both := set(unit.needs) & set(unit.helps):
        yield f"needs and helps both name {', '.join(sorted(both))}; leave one"
    for line in unit.chapter.prerequisites:
        name = line.partition("the chapter on ")[2].partition(",")[0].lower()
        if name and not any(_named(slug, name) for slug in unit.needs):
            yield f"its notebook names {line!r} as a prerequisite, and needs does not"
    goals = unit.chapter.objectives
    if len(unit.shown) != len(goals):
        yield f"shown has {len(unit.shown)} entries for {len(goals)} objectives of the notebook"
    known = {*unit.tasks, QUIZ, OPEN}
    for goal, names in zip(goals, unit.shown, strict=False):
        if not names:
            yield f"nothing shows the goal {goal!r}"
        if unknown := set(names) - known:
            yield f"shown names {', '.join(sorted(unknown))}, which the lab does not have"
    unshown = unit.tasks.keys() - {name for names in unit.shown for name in names}
    if unshown:
        yield f"no goal is shown by {', '.join(sorted(unshown))}"
    clinics = {item.id for item in exercises.load(unit.slug) if isinstance(item, exercises.Clinic)}
    functions = {name for name in unit.tasks if f"{unit.slug}.{name}" not in clinics}
    if unit.ask.keys() != functions:
        yield f"ask must name {', '.join(sorted(functions))}, got {', '.join(sorted(unit.ask))}"
    if not unit.open:
        yield "it has no open question"


def _named(slug: str, name: str) -> bool:
    """Whether the chapter `slug` is the one that a prerequisite calls by this name."""
    return name.replace(" ", "_").startswith(slug)


def read_units(root: Path, tables: Mapping[str, Any]) -> Course:
    """The course of the checkout at root, by slug, with `tables` as its chapters.toml.

    Raises ValueError, with every fault that was found, a line each.
    """
    order = _order(root)
    if order.keys() != tables.keys():
        gone, new = sorted(order.keys() - tables.keys()), sorted(tables.keys() - order.keys())
        lacks = [f"{CHAPTERS} lacks the chapters {', '.join(gone)}"] if gone else []
        more = [f"{CHAPTERS} names {', '.join(new)}, which the book has not"] if new else []
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
    """The course of the checkout at root, by slug, in the order of the table of contents.

    Raises ValueError where the notebooks and `book/teaching/chapters.toml` do not agree.
    """
    return read_units(root, tomllib.loads((root / CHAPTERS).read_text(encoding="utf-8")))
