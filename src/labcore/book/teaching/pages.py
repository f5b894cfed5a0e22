"""The directive `teaching`: tables, plans and a drawing for the teaching guide."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from labcore import exercises
from labcore.book.teaching.graph import graph_figure
from labcore.book.teaching.plans import SYLLABI, Plan, Session, Step, read_plans
from labcore.book.teaching.themes import THEMES, Theme, themes_of
from labcore.book.teaching.units import (
    CHAPTERS,
    OPEN,
    QUIZ,
    Course,
    OpenQuestion,
    Unit,
    read_course,
)
from labcore.grading.sandbox import Limits
from labcore.labs.releases import release_path
from labcore.labs.source import TIERS

__all__ = ["Teaching", "escape", "hours", "parts"]

# A part of a page: a heading ("" for none) and the Markdown below it.
Part = tuple[str, str]


def escape(text: str) -> str:
    """Plain text with `code` as Markdown, with all other markup characters escaped."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        piece if at % 2 else re.sub(r"([\\*_\[\]<>$#|~{}^])", r"\\\1", piece)
        for at, piece in enumerate(pieces)
    )


def hours(minutes: int) -> str:
    """90 -> "1 h 30 min"."""
    whole, rest = divmod(minutes, 60)
    named = ((whole, "h"), (rest, "min"))
    return " ".join(f"{count} {unit}" for count, unit in named if count)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _chapter(unit: Unit) -> str:
    return f"{{doc}}`{unit.short} </book/{unit.slug}>`"


def _lab(unit: Unit, text: str = "lab") -> str:
    return f"{{doc}}`{text} </labs/release/{unit.slug}/{unit.slug}>`"


def _goals(course: Course) -> Iterator[Part]:
    for unit in course.values():
        lines = []
        for goal, shown in zip(unit.chapter.objectives, unit.shown, strict=True):
            titles = [unit.tasks[name].title for name in shown if name in unit.tasks]
            named = [f"“{escape(title)}”" for title in titles]
            named += ["the questions at the chapter's end"] * (QUIZ in shown)
            named += ["the open question"] * (OPEN in shown)
            lines.append(f"- {escape(goal)}\\\n  *Shown by:* {', '.join(named)}.")
        before = [_chapter(course[slug]) for slug in unit.needs]
        better = [_chapter(course[slug]) for slug in unit.helps]
        needs = f"Needs {', '.join(before)}." if before else "Needs no other chapter."
        needs += f" Better after {', '.join(better)}." if better else ""
        goals = "\n".join(lines)
        yield unit.short, f"{_chapter(unit)}, {_lab(unit)}. {needs}\n\n{goals}"


def _timing(course: Course) -> Iterator[Part]:
    units = [*course.values()]
    rows = [
        (
            _chapter(unit),
            unit.chapter.minutes,
            f"{unit.words:,}",
            unit.lab.minutes,
            len(unit.tasks),
            f"{unit.lab.points:g}",
        )
        for unit in units
    ]
    reading, working = (
        sum(unit.chapter.minutes for unit in units),
        sum(unit.lab.minutes for unit in units),
    )
    total = (
        "**all**",
        f"**{reading}**",
        f"**{sum(unit.words for unit in units):,}**",
        f"**{working}**",
        f"**{sum(len(unit.tasks) for unit in units)}**",
        f"**{sum(unit.lab.points for unit in units):g}**",
    )
    head = ("chapter", "minutes", "words", "lab, minutes", "exercises", "points")
    yield "", _table(head, [*rows, total])
    yield "", f"In total: {hours(reading)} of chapters and {hours(working)} of labs."


def _exercises(course: Course) -> Iterator[Part]:
    for unit in course.values():
        rows = [
            (escape(task.title), task.minutes, task.level, f"{task.points:g}")
            for task in unit.tasks.values()
        ]
        yield unit.short, _table(("exercise", "minutes", "level", "points"), rows)


def _hardware(course: Course) -> Iterator[Part]:
    rows = [
        (_chapter(unit), TIERS[unit.chapter.tier], TIERS[unit.lab.tier]) for unit in course.values()
    ]
    yield "", _table(("", "chapter", "lab"), rows)
    each = Limits().memory_mib / 1024
    yield (
        "",
        f"Grading runs one notebook per processor and lets each use up to {each:g} GiB of memory. "
        "Most use far less. On a machine with little memory, grade with `--jobs 2` or 1.",
    )


def _misconceptions(course: Course) -> Iterator[Part]:
    for unit in course.values():
        parts = []
        for item in exercises.load(unit.slug):
            if isinstance(item, exercises.Clinic):
                continue
            name = item.id.partition(".")[2]
            mistakes = "\n".join(
                f"- **{escape(wrong)}.** {escape(hint)}" for wrong, (_, hint) in item.wrong.items()
            )
            parts.append(
                f"**{escape(unit.tasks[name].title)}**\n\n"
                f"*Ask:* {escape(unit.ask[name])}\n\n"
                f"````{{dropdown}} {len(item.wrong)} known mistakes\n{mistakes}\n````"
            )
        yield unit.short, "\n\n".join(parts)


def _themes(themes: Sequence[Theme], course: Course) -> Iterator[Part]:
    for theme in themes:
        hints = "\n".join(
            f"- *{course[one.slug].short}, {escape(course[one.slug].tasks[one.exercise].title)}:* "
            f"{escape(one.hint)}"
            for one in theme.mistakes
        )
        count = f"{len(theme.mistakes)} places where it occurs"
        folded = f"````{{dropdown}} {count}\n{hints}\n````"
        yield theme.title, f"{escape(theme.text)}\n\n{folded}"


def _questions(course: Course) -> Iterator[Part]:
    for unit in course.values():
        yield unit.short, "\n\n".join(map(_with_answer, unit.open.values()))


def _decisions(course: Course) -> Iterator[Part]:
    for unit in course.values():
        yield unit.short, _with_answer(unit.decision)


def _with_answer(asked: OpenQuestion) -> str:
    expects = "\n".join(f"- {escape(line)}" for line in asked.expects)
    folded = f"````{{dropdown}} What a full answer has\n{expects}\n````"
    return f"{escape(asked.question)}\n\n{folded}"


def _said(step: Step, course: Course) -> str:
    """A description of a step, as Markdown."""
    if step.kind in ("talk", "pause"):
        return escape(step.text)
    unit = course[step.slug]
    if step.kind == "chapter":
        return f"read and run {_chapter(unit)}"
    if step.kind == "open":
        return f"discuss the {{doc}}`open question <questions>` of {unit.short}"
    titles = ", ".join(escape(unit.tasks[name].title) for name in step.tasks)
    whole = len(step.tasks) == len(unit.tasks)
    return f"{_lab(unit)} of {unit.short}" + ("" if whole else f": {titles}")


def _meeting(session: Session, course: Course) -> str:
    rows = [(step.minutes, _said(step, course)) for step in session.steps]
    if left := session.minutes - sum(step.minutes for step in session.steps):
        rows.append((left, "left for questions"))
    text = _table(("minutes", "in class"), rows)
    if session.home:
        home = [(step.minutes, _said(step, course)) for step in session.home]
        text += "\n\n" + _table(("minutes", "at home"), home)
    if session.due:
        due = ", ".join(_lab(course[slug], course[slug].short) for slug in session.due)
        text += f"\n\nDue by the end: {due}."
    return text


def _syllabus(course: Course, plan: Plan) -> Iterator[Part]:
    in_class = sum(session.minutes for session in plan.sessions)
    at_home = sum(step.minutes for one in plan.sessions for step in one.home)
    given = plan.tasks()
    points = sum(course[slug].tasks[name].points for slug, names in given.items() for name in names)
    home = f" and {hours(at_home)} at home" if at_home else ""
    total = (
        f"In total, {hours(in_class)} in class{home}: {len(plan.chapters)} of {len(course)} "
        f"chapters, {sum(map(len, given.values()))} exercises worth {points:g} points."
    )
    yield "", f"{escape(plan.about)}\n\n{escape(plan.counts)}\n\n{total}"
    for session in plan.sessions:
        yield session.title, _meeting(session, course)
    if last := plan.last(course):
        names = ", ".join(_lab(course[slug], course[slug].short) for slug in last)
        yield "", f"Due a week after the last session: {names}."


def _graph(course: Course) -> Iterator[Part]:
    yield "", f"````{{raw}} html\n{graph_figure(course)}\n````"


TABLES: dict[str, Callable[[Course], Iterator[Part]]] = {
    "goals": _goals,
    "graph": _graph,
    "timing": _timing,
    "exercises": _exercises,
    "hardware": _hardware,
    "misconceptions": _misconceptions,
    "questions": _questions,
    "decisions": _decisions,
}


def parts(root: Path, what: str) -> list[Part]:
    """The parts of a table, or of a plan such as "syllabus days". Raises ValueError otherwise."""
    course = read_course(root)
    if what in TABLES:
        return list(TABLES[what](course))
    if what == "themes":
        return list(_themes(themes_of(root, course), course))
    plans = {f"syllabus {name}": plan for name, plan in read_plans(root, course).items()}
    if what not in plans:
        known = ", ".join((*TABLES, "themes", *plans))
        raise ValueError(f"the directive teaching must name one of {known}, got {what!r}")
    return list(_syllabus(course, plans[what]))


class Teaching(SphinxDirective):
    """```{teaching} timing``` writes one table of the guide, from the notebooks and TOML files.

    A part with a heading becomes a subsection of the section with the directive.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The parts, as sections if they have a heading."""
        root, what = Path(self.env.srcdir).parents[1], self.arguments[0]
        for name in (CHAPTERS, SYLLABI, THEMES, "_toc.yml"):
            self.env.note_dependency(str(root / name))
        for slug in exercises.slugs():
            self.env.note_dependency(str(root / "book" / f"{slug}.ipynb"))
            self.env.note_dependency(str(release_path(root, slug)))
        for path in Path(exercises.__file__).parent.rglob("*.py"):
            self.env.note_dependency(str(path))
        try:
            found = parts(root, what)
        except (OSError, ValueError) as problem:
            raise self.error(str(problem)) from problem
        made: list[nodes.Node] = []
        for title, text in found:
            holder: nodes.Element = nodes.Element()
            if title:
                holder = nodes.section("", nodes.title(text=title))
                holder["ids"] = [nodes.make_id(f"{what} {title}")]
            self.state.nested_parse(StringList(text.splitlines(), source=what), 0, holder)
            made += [holder] if title else list(holder.children)
        return made
