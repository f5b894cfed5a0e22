"""Clinic.check answers the form of an answer before its content."""

from __future__ import annotations

import re
from typing import Any

import pytest

from labcore.exercises import Clinic, Fault

CLINIC = Clinic(
    id="test.clinic",
    healthy=lambda: 1.0,
    faults={
        "too fast": Fault(make=lambda: 2.0, symptom="the line rises twice as steeply"),
        "backwards": Fault(make=lambda: -1.0, symptom="the line falls"),
        "asleep": Fault(make=lambda: 0.0, symptom="the line lies flat"),
    },
    observe=lambda slope: {"line": [slope * step for step in range(5)]},
    explanation="Look at the slope.",
)


class Anything(str):
    """Text that equals every name."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Always(dict[str, str]):
    """A dict that has the right name for everybody."""

    def __getitem__(self, label: str) -> str:
        return Anything("asleep")


def not_written() -> dict[str, str]:
    raise NotImplementedError


def broken() -> dict[str, str]:
    raise KeyError("A")


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({}, "missing", "for each of A, B, C"),
        ({"A": "", "B": "", "C": ""}, "missing", "Nothing to check yet"),
        (not_written, "missing", "Nothing to check yet"),
        (broken, "error", "your function raised KeyError"),
        (["asleep"], "error", r'must be a dict \{"A": "...", "B"'),
        ({"A": "asleep"}, "error", r"got the keys \['A'\]"),
        ({"A": "aslep", "B": "too fast", "C": "backwards"}, "error", "did you mean 'asleep'"),
        ({"A": 3, "B": "too fast", "C": "backwards"}, "error", "A must be one of asleep, back"),
        ({"A": ["asleep"], "B": "too fast", "C": "backwards"}, "error", "A must be one of"),
        ({"A": "asleep", "B": "asleep", "C": ""}, "error", "C must be one of"),
        (dict.fromkeys("ABC", Anything("x")), "error", "A must be plain text .*type Anything"),
        (Always.fromkeys("ABC", "asleep"), "error", "a plain dict .*got a Always"),
    ],
)
def test_the_form_of_an_answer(answers: Any, kind: str, words: str) -> None:
    outcome = CLINIC.check(answers)
    assert outcome.kind == kind and not outcome.passed
    assert re.search(words, outcome.message), outcome
    assert re.search(r"[^?.!][.?]$", outcome.message), "one mark at the end"


def test_wrong_names_get_one_symptom_and_neither_a_count_nor_a_patient(seed: int) -> None:
    right = CLINIC.diagnoses(seed)
    wrong = dict(zip(right, [*list(right.values())[1:], right["A"]], strict=True))
    messages = {CLINIC.check(wrong, student=seed).message for _ in range(5)}
    (message,) = messages  # another try with the same answers tells nothing new
    assert sum(fault.symptom in message for fault in CLINIC.faults.values()) == 1
    assert not re.search(r"\b[ABC]\b|\d", message) and not any(
        name in message for name in right.values()
    )
    everywhere = dict.fromkeys(right, "asleep")
    assert "lies flat" in CLINIC.check(everywhere, student=seed).message
    assert CLINIC.check(lambda: right, student=seed).passed


def test_solution_opens_after_an_attempt_and_is_the_students_own(seed: int) -> None:
    fresh = Clinic(id="test.fresh", healthy=CLINIC.healthy, faults=CLINIC.faults,
                   observe=CLINIC.observe)  # fmt: skip
    assert "first attempt" in repr(fresh.solution(student=seed))
    fresh.check(dict.fromkeys("ABC", "asleep"), student=seed)
    text = fresh.solution(student=seed).text
    for label, name in fresh.diagnoses(seed).items():
        assert f"**{label}: {name}.** The line" in text
    assert "Look at the slope." in CLINIC.solution(reveal=True).text


def test_one_patient_is_judged_alone(seed: int) -> None:
    right = CLINIC.diagnoses(seed)
    wrong = {**right, "B": right["C"]}
    answers = {label: CLINIC.check(wrong, student=seed, patient=label) for label in right}
    assert [label for label in right if not answers[label]] == ["B"]
    assert f'B is not "{right["C"]}"' in answers["B"].message
    only = {"C": right["C"]}
    assert CLINIC.check(only, student=seed, patient="C").passed
    assert CLINIC.check(lambda: only, student=seed, patient="A").kind == "missing"
    assert CLINIC.check({**right, "A": "asleeep"}, student=seed, patient="C").passed
    assert CLINIC.check({**right, "A": "asleeep"}, student=seed, patient="A").kind == "error"
    with pytest.raises(ValueError, match="patient must be one of 'A', 'B', 'C', got 'D'"):
        CLINIC.check(right, student=seed, patient="D")
