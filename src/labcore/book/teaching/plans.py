"""Course plans from `book/teaching/syllabi.toml`: what happens when, and whether it fits."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.book.teaching.units import Course

__all__ = ["SYLLABI", "Plan", "Session", "Step", "read_plan", "read_plans"]

SYLLABI = "book/teaching/syllabi.toml"
PLAN = {"title": str, "about": str, "counts": str, "session": list}
SESSION = {"title": str, "minutes": int, "home_minutes": int, "steps": list}
OPTIONAL = {"home": list, "due": list}
# Steps with their own minutes; the others take theirs from the notebooks.
FREE = ("talk", "pause", "open")
TAKEN = ("chapter", "exercise", "lab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One activity. kind: talk, pause, open, chapter, exercise or lab.

    text: of a talk or a pause. slug: the chapter's. tasks: the names of the lab's exercises in this
    step. question: the name of an open question.
    """

    kind: str
    minutes: int
    text: str = ""
    slug: str = ""
    tasks: Sequence[str] = ()
    question: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A meeting: its minutes, the steps in class and at home afterwards, and the labs due."""

    title: str
    minutes: int
    home_minutes: int
    steps: Sequence[Step]
    home: Sequence[Step]
    due: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A course plan. about: for whom. counts: what is graded and how. name: its key in the file."""

    name: str
    title: str
    about: str
    counts: str
    sessions: Sequence[Session]

    @property
    def steps(self) -> list[Step]:
        """All steps in order, in class and at home."""
        return [step for one in self.sessions for step in (*one.steps, *one.home)]

    @property
    def chapters(self) -> list[str]:
        """The slugs of the chapters that are read, in order."""
        return [step.slug for step in self.steps if step.kind == "chapter"]

    def tasks(self) -> dict[str, list[str]]:
        """The assigned exercises, by slug."""
        found: dict[str, list[str]] = {}
        for step in self.steps:
            if step.tasks:
                found.setdefault(step.slug, []).extend(step.tasks)
        return found

    def last(self, course: Course) -> list[str]:
        """Labs assigned in full but due in no session; they are due a week after the last one."""
        due = {slug for one in self.sessions for slug in one.due}
        given = self.tasks()
        return [
            slug for slug in given if {*given[slug]} == {*course[slug].tasks} and slug not in due
        ]


def _keys(where: str, found: Any, form: Mapping[str, type], more: Mapping[str, type]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a table, got {found!r}")
    if missing := form.keys() - found.keys():
        raise ValueError(f"{where} is incomplete; add {', '.join(sorted(missing))}")
    if unknown := found.keys() - form.keys() - more.keys():
        raise ValueError(f"{where} has an unknown key; remove {', '.join(sorted(unknown))}")
    for key, kind in {**form, **more}.items():
        value = found.get(key, kind())
        wrong = not isinstance(value, kind) or isinstance(value, bool)
        if wrong or (kind is str and not value.strip()) or (kind is int and value < 0):
            raise ValueError(f"{where}: {key} must be a valid {kind.__name__}, got {value!r}")


def _unit(where: str, course: Course, slug: Any) -> str:
    if not isinstance(slug, str) or slug not in course:
        raise ValueError(f"{where}: unknown chapter {slug!r}; choose from {', '.join(course)}")
    return slug


def _step(where: str, found: Any, course: Course) -> Step:
    kinds = [key for key in (*FREE, *TAKEN) if isinstance(found, dict) and key in found]
    if len(kinds) != 1:
        raise ValueError(
            f"{where}: a step must have exactly one of {', '.join((*FREE, *TAKEN))}, got {found!r}"
        )
    kind = kinds[0]
    _keys(
        where,
        found,
        {kind: str} | ({"minutes": int} if kind in FREE else {}),
        {"less": list} if kind == "lab" else {},
    )
    slug, _, name = found[kind].partition(".")
    if kind in ("talk", "pause"):
        return Step(kind=kind, minutes=found["minutes"], text=found[kind])
    unit = course[_unit(where, course, slug)]
    if kind == "chapter":
        return Step(kind=kind, minutes=unit.chapter.minutes, slug=slug)
    if kind == "open":
        if name not in unit.open:
            raise ValueError(f"{where}: {slug} has no open question {name!r}")
        return Step(kind=kind, minutes=found["minutes"], slug=slug, question=name)
    named = [name] if kind == "exercise" else found.get("less", [])
    if unknown := [one for one in named if one not in unit.tasks]:
        raise ValueError(
            f"{where}: the lab {slug} has no exercise {unknown[0]!r}; "
            f"choose from {', '.join(unit.tasks)}"
        )
    minutes = sum(unit.tasks[one].minutes for one in named)
    if kind == "exercise":
        return Step(kind=kind, minutes=minutes, slug=slug, tasks=(name,))
    left = [one for one in unit.tasks if one not in named]
    return Step(kind=kind, minutes=unit.lab.minutes - minutes, slug=slug, tasks=left)


def _session(where: str, found: Any, course: Course) -> Session:
    _keys(where, found, SESSION, OPTIONAL)
    where = f"{where} ({found['title']})"
    return Session(
        title=found["title"],
        minutes=found["minutes"],
        home_minutes=found["home_minutes"],
        steps=tuple(_step(where, one, course) for one in found["steps"]),
        home=tuple(_step(where, one, course) for one in found.get("home", [])),
        due=tuple(_unit(where, course, slug) for slug in found.get("due", [])),
    )


def _load_problems(session: Session) -> Iterator[str]:
    for steps, limit, what in (
        (session.steps, session.minutes, "in class"),
        (session.home, session.home_minutes, "at home"),
    ):
        total = sum(step.minutes for step in steps)
        if total > limit:
            yield f"{total} minutes {what}, but at most {limit} are available"


def _order_problems(session: Session, course: Course, done: set[str]) -> Iterator[str]:
    """Steps that come twice, or before what they need.

    done: the earlier steps, "lion." for a chapter, "lion.drift" for an exercise or a question; this
    function adds to it.
    """
    # Students may begin an exercise in class before reading its chapter at home.
    later = {f"{step.slug}." for step in session.home if step.kind == "chapter"}
    for step in (*session.steps, None, *session.home):
        if step is None:  # the end of the meeting
            for slug in session.due:
                if lacks := [one for one in course[slug].tasks if f"{slug}.{one}" not in done]:
                    yield f"{slug} is due, but {', '.join(lacks)} was not assigned before"
            continue
        if step.kind == "chapter":
            for need in course[step.slug].needs:
                if f"{need}." not in done:
                    yield f"{step.slug} needs {need}, which does not come before it"
        elif step.slug and f"{step.slug}." not in (done | later if step.tasks else done):
            yield f"{step.kind} of {step.slug}, whose chapter has not been read by then"
        if step.slug:
            for name in step.tasks or [step.question]:
                if f"{step.slug}.{name}" in done:
                    yield f"{step.slug}{'.' if name else ''}{name} appears twice"
                done.add(f"{step.slug}.{name}")


def read_plan(name: str, found: Any, course: Course) -> Plan:
    """One plan from its table. Raises ValueError with a line for each fault."""
    where = f"{SYLLABI}, {name}"
    _keys(where, found, PLAN, {})
    sessions = [
        _session(f"{where}, session {number}", one, course)
        for number, one in enumerate(found["session"], 1)
    ]
    problems: list[str] = []
    done: set[str] = set()
    for session in sessions:
        faults = [*_load_problems(session), *_order_problems(session, course, done)]
        problems += [f"{where}, {session.title}: {fault}" for fault in faults]
    if problems or not sessions:
        raise ValueError("\n".join(problems) or f"{where} has no sessions; add one")
    return Plan(
        name=name,
        title=found["title"],
        about=found["about"],
        counts=found["counts"],
        sessions=tuple(sessions),
    )


def read_plans(root: Path, course: Course) -> dict[str, Plan]:
    """The plans in the checkout at root, by name. Raises ValueError if one has a fault."""
    tables = tomllib.loads((root / SYLLABI).read_text(encoding="utf-8"))
    return {name: read_plan(name, table, course) for name, table in tables.items()}
