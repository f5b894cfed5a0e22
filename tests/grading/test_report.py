"""Tables of grades: late by how much, a learning system's columns, the summary."""

from __future__ import annotations

import csv
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from labcore.grading.report import (
    Row,
    lateness,
    parse_due,
    read_columns,
    summary,
    write_csv,
    write_export,
)

DUE = datetime(2026, 3, 1, 22, 59, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (timedelta(0), ""),
        (timedelta(seconds=-1), ""),
        (timedelta(seconds=1), "1 min"),
        (timedelta(hours=3, minutes=5), "3 h 5 min"),
        (timedelta(days=2, minutes=1), "2 d 1 min"),
        (timedelta(days=40), "40 d"),
    ],
)
def test_late_is_said_in_days_hours_and_minutes(after: timedelta, said: str) -> None:
    assert lateness(DUE + after, DUE) == said


def test_who_has_no_time_or_no_deadline_is_not_late() -> None:
    assert lateness(None, DUE) == lateness(DUE, None) == ""


@pytest.mark.parametrize("text", ["2026-03-01", "2026-03-01T23:59"])
def test_a_deadline_has_a_zone(text: str) -> None:
    assert parse_due("2026-03-01T23:59+01:00") == DUE
    with pytest.raises(ValueError, match=f"{text!r} has no time zone; write it as 2026"):
        parse_due(text)
    with pytest.raises(ValueError, match="'tomorrow' is not a time; write it as"):
        parse_due("tomorrow")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be TOML with lines such as"),
        ("[columns]", "has no columns"),
        ("[columns\n", "must be TOML"),
        ('[columns]\nA = "points:moon"', "column 'A' has an unknown value, 'points:moon'"),
        ('[columns]\nA = "roster:ID"', "an unknown value, 'roster:ID'"),
        ("[columns]\nA = 3", "column 'A' .*, 3;"),
    ],
)
def test_columns_that_mean_nothing_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "columns.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_columns(path, ["lion"], ["Name"])
    with pytest.raises(ValueError, match="cannot be read"):
        read_columns(tmp_path / "none.toml", ["lion"], [])


def test_titles_and_names_with_commas_and_quotes_stay_whole(tmp_path: Path) -> None:
    title, student = 'Lion, "first" (5)', 'Ó Néill, "Mo"'
    path = tmp_path / "columns.toml"
    path.write_text(f"\ufeff[columns]\n'{title}' = 'points:lion'\nName = 'student'", "utf-8")
    columns = read_columns(path, ["lion"], [])
    rows = [
        Row(student=student, lab="lion", status="graded", exercises={"a": 1.5}, worth={"a": 5}),
        Row(student="", lab="", status="not graded: it is not in a student's folder"),
    ]
    write_export(tmp_path / "export.csv", rows, columns, {})
    write_csv(tmp_path / "grades.csv", rows)
    with (tmp_path / "export.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [{title: "1.5", "Name": student}]
    with (tmp_path / "grades.csv").open(encoding="utf-8", newline="") as file:
        assert [row["points"] for row in csv.DictReader(file)] == ["1.5", ""]


def test_the_summary_counts_what_happened_alone() -> None:
    fine = Row(student="a", lab="x", status="graded")
    bad = Row(student="b", lab="x", status="not graded: it is empty", late="1 d", flags=("f",))
    slow = Row(student="c", lab="x", status="graded; a cell ran out of time", timed_out=2)
    assert summary([fine]) == "graded 1 of 1"
    assert summary([fine, bad, slow, slow]) == (
        "graded 3 of 4; not graded 1; late 1; timed out 2; flagged 1"
    )
