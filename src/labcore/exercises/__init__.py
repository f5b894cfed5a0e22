"""Exercises for the labs: functions to write and faults to diagnose, with their usual mistakes."""

import importlib
import pkgutil

from labcore.checks import one_of
from labcore.exercises import missing_names, topics
from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.core import Exercise, Solution, student_seed, switched_off
from labcore.exercises.mistakes import Mistake
from labcore.exercises.outcome import CheckFailedError, Outcome
from labcore.exercises.progress import Progress

__all__ = [
    "CheckFailedError",
    "Clinic",
    "Exercise",
    "Fault",
    "Mistake",
    "Outcome",
    "Progress",
    "Solution",
    "load",
    "slugs",
    "student_seed",
    "switch_off_solutions",
]

missing_names.explain()


def slugs() -> list[str]:
    """Return the topics that have exercises, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(topics.__path__))


def load(slug: str) -> list[Exercise | Clinic]:
    """Return all exercises and clinics of a topic. Raises ValueError for a slug that has none."""
    one_of("slug", slug, slugs())
    return list(importlib.import_module(f"{topics.__name__}.{slug}").EXERCISES)


def switch_off_solutions(slug: str) -> None:
    """Refuse to show a topic's solutions in this process, even with `reveal`; for graded releases.

    This removes the temptation, but anyone can still read the package's public sources.
    Raises ValueError for a slug that has no exercises.
    """
    switched_off.add(one_of("slug", slug, slugs()))
