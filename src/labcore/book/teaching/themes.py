"""Mistakes that recur from lab to lab, from `book/teaching/themes.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore import exercises
from labcore.book.teaching.units import Course, typed_table

__all__ = ["THEMES", "Mistake", "Theme", "read_themes", "themes_of"]

THEMES = "book/teaching/themes.toml"
FORM = {"title": str, "text": str, "mistakes": list}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A known wrong answer. slug, exercise: where it occurs. hint: what the check says about it."""

    slug: str
    exercise: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """What several mistakes have in common. text: their cause and what helps."""

    title: str
    text: str
    mistakes: Sequence[Mistake]


def _mistake(where: str, line: Any, course: Course) -> Mistake:
    place, _, wrong = str(line).partition(": ")
    slug, _, name = place.partition(".")
    if slug not in course or name not in course[slug].tasks:
        raise ValueError(
            f"{where}: unknown exercise {place!r}; write a mistake as '<slug>.<name>: <mistake>'"
        )
    (item,) = (one for one in exercises.load(slug) if one.id == place)
    known: Mapping[str, Any] = getattr(item, "wrong", {})
    if wrong not in known:
        raise ValueError(
            f"{where}: {place} has no mistake {wrong!r}; choose from {', '.join(known)}"
        )
    return Mistake(slug=slug, exercise=name, hint=known[wrong][1])


def read_themes(tables: Sequence[Any], course: Course) -> list[Theme]:
    """The themes from their tables. Raises ValueError for one that does not match the labs."""
    found = []
    for number, table in enumerate(tables, 1):
        one = typed_table(f"{THEMES}, theme {number}", table, FORM)
        where = f"{THEMES}, {one['title']}"
        mistakes = [_mistake(where, line, course) for line in one["mistakes"]]
        if len({mistake.slug for mistake in mistakes}) < 2:
            raise ValueError(f"{where}: a theme must have mistakes from at least two labs")
        found.append(Theme(title=one["title"], text=one["text"], mistakes=mistakes))
    return found


def themes_of(root: Path, course: Course) -> list[Theme]:
    """The themes in the checkout at root."""
    return read_themes(
        tomllib.loads((root / THEMES).read_text(encoding="utf-8")).get("theme", []), course
    )
