"""A grading run's reports: a row per submission, a table for a learning system, a summary."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from labcore.grading.queue import write_whole

__all__ = [
    "Row",
    "lateness",
    "parse_due",
    "read_columns",
    "summary",
    "write_csv",
    "write_export",
]

COLUMNS = (
    *("student", "lab", "number", "points", "maximum", "status", "handed_in", "late", "flags"),
    "feedback",
)
COLUMN_HELP = (
    'a column holds "student", "total", "points:<lab>", "percent:<lab>", "maximum:<lab>", '
    '"status:<lab>", "late:<lab>", "feedback:<lab>" or "roster:<column of the roster>"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of grades.csv. status: "graded", or what happened. flags: for a person to review.

    number: the notebook's STUDENT. points: None if the lab is unknown. exercises: points by graded
    cell; worth: the maximum of each. handed_in: in UTC, None if unknown. late: by how much, "" if
    on time. feedback: the page, relative to the output folder. timed_out: cells that were stopped.
    unchecked: cells that this machine could not check.
    """

    student: str
    lab: str
    status: str
    number: str = ""
    flags: Sequence[str] = ()
    exercises: Mapping[str, float] = field(default_factory=dict)
    worth: Mapping[str, float] = field(default_factory=dict)
    handed_in: datetime | None = None
    late: str = ""
    feedback: str = ""
    timed_out: int = 0
    unchecked: int = 0

    @property
    def graded(self) -> bool:
        """Whether the notebook was run and judged."""
        return self.status.startswith("graded")

    @property
    def points(self) -> float | None:
        """The sum over the exercises."""
        return sum(self.exercises.values()) if self.worth else None

    @property
    def maximum(self) -> float | None:
        """The maximum for the lab."""
        return sum(self.worth.values()) if self.worth else None

    def cells(self) -> dict[str, str]:
        """The row by column."""
        numbers = {"points": self.points, "maximum": self.maximum}
        named = {
            f"{self.lab}: {name} ({self.worth[name]:g})": value
            for name, value in self.exercises.items()
        }
        return {
            "student": self.student,
            "lab": self.lab,
            "number": self.number,
            "status": self.status,
            "handed_in": "" if self.handed_in is None else f"{self.handed_in:%Y-%m-%d %H:%M:%SZ}",
            "late": self.late,
            "flags": "; ".join(self.flags),
            "feedback": self.feedback,
        } | {key: f"{value:g}" for key, value in (numbers | named).items() if value is not None}


def lateness(handed_in: datetime | None, due: datetime | None) -> str:
    """By how much a submission is late, as "2 d 3 h 5 min"; "" if it is on time or unknown."""
    if handed_in is None or due is None or handed_in <= due:
        return ""
    minutes = max(1, round((handed_in - due).total_seconds() / 60))
    parts = zip((minutes // 1440, minutes // 60 % 24, minutes % 60), ("d", "h", "min"), strict=True)
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def parse_due(text: str) -> datetime:
    """A time with its zone, such as 2026-11-30T23:59+01:00, converted to UTC. Raises ValueError."""
    try:
        due = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a time; write it as 2026-11-30T23:59+01:00") from error
    if due.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; write it as 2026-11-30T23:59+01:00")
    return due.astimezone(UTC)


def _written(columns: Sequence[str], lines: Iterable[Mapping[str, str]], path: Path) -> None:
    class Text(list[str]):
        write = list.append

    text = Text()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, "".join(text))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes grades.csv: a line per submission, with a column for each exercise."""
    exercises = dict.fromkeys(key for row in rows for key in row.cells() if key not in COLUMNS)
    _written([*COLUMNS, *exercises], [row.cells() for row in rows], path)


def read_columns(path: Path, labs: Iterable[str], roster: Iterable[str]) -> dict[str, str]:
    """What a learning system's columns hold, from a TOML file: `[columns]`, title = "points:lion".

    labs: the labs' slugs. roster: the columns of the roster. Raises ValueError.
    """
    try:
        columns = tomllib.loads(path.read_text(encoding="utf-8-sig"))["columns"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ValueError(f'{path} must be TOML with lines such as "ID" = "student" under '
                         f"[columns]; {COLUMN_HELP}") from error  # fmt: skip
    known = {"student", "total"} | {f"roster:{name}" for name in roster}
    known |= {f"{kind}:{lab}" for kind in _VALUES for lab in labs}
    if not isinstance(columns, dict) or not columns:
        raise ValueError(f"{path} has no columns; {COLUMN_HELP}")
    for title, what in columns.items():
        if what not in known:
            raise ValueError(f"{path}: column {title!r} has an unknown value, {what!r}; "
                             f"{COLUMN_HELP}; the roster's columns: {', '.join(roster) or 'none'}"
                             )  # fmt: skip
    return dict(columns)


def _percent(row: Row) -> str:
    return f"{100 * (row.points or 0) / row.maximum:.4g}" if row.maximum else ""


_VALUES: Mapping[str, Callable[[Row], str]] = {
    "points": lambda row: row.cells().get("points", ""),
    "percent": _percent,
    "maximum": lambda row: row.cells().get("maximum", ""),
    "status": lambda row: row.status,
    "late": lambda row: row.late,
    "feedback": lambda row: row.feedback,
}


def write_export(
    path: Path,
    rows: Sequence[Row],
    columns: Mapping[str, str],
    roster: Mapping[str, Mapping[str, str]],
) -> None:
    """Writes one line per student, in the columns of a learning system.

    roster: the roster's columns, by student. A student on it who handed in nothing gets a line
    without points.
    """
    by_student: dict[str, dict[str, Row]] = {student: {} for student in roster}
    for row in rows:
        if row.student:
            by_student.setdefault(row.student, {})[row.lab] = row

    def value(student: str, what: str) -> str:
        kind, _, name = what.partition(":")
        if kind == "student":
            return student
        if kind == "roster":
            return roster.get(student, {}).get(name, "")
        if kind == "total":
            got = [row.points for row in by_student[student].values() if row.points is not None]
            return f"{sum(got):g}" if got else ""
        found = by_student[student].get(name)
        return "" if found is None else _VALUES[kind](found)

    lines = [
        {title: value(student, what) for title, what in columns.items()} for student in by_student
    ]
    _written(list(columns), lines, path)


def summary(rows: Sequence[Row]) -> str:
    """One line, `graded 196 of 200; not graded 4; late 3; …`; counts of 0 are left out."""
    counts = {
        "not graded": sum(not row.graded for row in rows),
        "late": sum(bool(row.late) for row in rows),
        "timed out": sum(row.timed_out > 0 for row in rows),
        "not all checked on this machine": sum(row.unchecked > 0 for row in rows),
        "flagged": sum(bool(row.flags) for row in rows),
    }
    graded = sum(row.graded for row in rows)
    parts = [f"{what} {count}" for what, count in counts.items() if count]
    return "; ".join([f"graded {graded} of {len(rows)}", *parts])
