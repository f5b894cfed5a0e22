"""Clinic.check answers the form of an answer before its content."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
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
    observe=lambda slope: {"line": [slope * step for step in range(5)], "level": [1.0] * 5},
    axis=range(10, 60, 10),
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


def not_written() -> dict[str, Any]:
    raise NotImplementedError


def broken() -> dict[str, Any]:
    raise KeyError("A")


def seen(names: Iterable[str], patients: Iterable[str] = "ABC") -> dict[str, Any]:
    """Each patient's name with a reason that holds."""
    return {label: (name, "line", 50) for label, name in zip(patients, names, strict=True)}


FAST = ("too fast", "line", 50)
FALLS = ("backwards", "line", 20)


def third(*diagnosis: Any) -> dict[str, Any]:
    """Diagnoses of A and B in the right form, and another of C."""
    return {"A": FAST, "B": FALLS, "C": diagnosis}


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({}, "missing", "for each of A, B, C"),
        ({"A": "", "B": "", "C": ""}, "missing", "Nothing to check yet"),
        (not_written, "missing", "Nothing to check yet"),
        (broken, "error", "your function raised KeyError"),
        (["asleep"], "refused", r'must be a dict \{"A": \("fault", "column", step\), ...\}'),
        ({"A": FAST}, "refused", r"got the keys \['A'\]"),
        ({"A": "asleep", "B": FAST, "C": FALLS}, "refused", r"A must be \(.*\), got 'asleep'"),
        (third("asleep", "line"), "refused", r"C must be \(.*\), got \('asleep', 'line'\)"),
        (third("aslep", "line", 50), "refused", "for C, the fault .* did you mean 'asleep'"),
        (third(3, "line", 50), "refused", "for C, the fault must be one of .*'asleep'.*, got 3"),
        (third(["asleep"], "line", 50), "refused", "for C, the fault must be one of"),
        (
            third("asleep", "lines", 50),
            "refused",
            "for C, the column .*'level'.* did you mean 'line'",
        ),
        (
            third("asleep", "line", "50"),
            "refused",
            "for C, the step must be a number from 10 to 50",
        ),
        (third("asleep", "line", 60), "refused", "from 10 to 50, got 60"),
        (third("asleep", "line", float("nan")), "refused", "from 10 to 50, got nan"),
        (third("asleep", "line", True), "refused", "from 10 to 50, got True"),
        (third(Anything("x"), "line", 50), "refused", "plain text .*got a Anything"),
        (third("asleep", Anything("x"), 50), "refused", "for C, the column must be plain text"),
        (seen(["asleep", "backwards", "asleep"]), "refused", "two patients have 'asleep'"),
        (Always.fromkeys("ABC", "asleep"), "refused", "a plain dict .*got a Always"),
    ],
)
def test_the_form_of_an_answer(answers: Any, kind: str, words: str) -> None:
    outcome = CLINIC.check(answers)
    assert outcome.kind == kind and not outcome.passed
    assert re.search(words, outcome.message), outcome
    assert re.search(r"[^?.!][.?]$", outcome.message), "one mark at the end"


def test_wrong_names_get_one_symptom_and_neither_a_count_nor_a_patient(seed: int) -> None:
    right = CLINIC.diagnoses(seed)
    wrong = seen([*list(right.values())[1:], right["A"]])
    messages = {CLINIC.check(wrong, student=seed).message for _ in range(5)}
    (message,) = messages  # another try with the same answers tells nothing new
    assert sum(fault.symptom in message for fault in CLINIC.faults.values()) == 1
    assert not re.search(r"\b[ABC]\b|\d", message) and not any(
        name in message for name in right.values()
    )
    assert CLINIC.check(lambda: seen(right.values()), student=seed).passed


def test_a_reason_that_does_not_hold_is_told_by_the_named_fault_alone(seed: int) -> None:
    right = seen(CLINIC.diagnoses(seed).values())
    for label, (name, _, _) in right.items():
        for column, step in (("line", 10), ("line", 14), ("level", 50)):
            told = CLINIC.check({**right, label: (name, column, step)}, student=seed)
            assert told.kind == "wrong" and not told.passed
            assert (
                f'with "{name}", the curve of "{column}" would not show the fault at this '
                f"place (step: {step}). "
                f"So for {label}, the fault, the column, or the step is wrong" in told.message
            )
        assert CLINIC.check({**right, label: [name, "line", 16]}, student=seed).passed
    # The words are the same for a patient that has the fault and for one that hasn't.
    for names in itertools.permutations(CLINIC.names):
        answers = seen(names) | {"B": (names[1], "level", 30)}
        assert (
            f'"{names[1]}", the curve of "level" would not show the fault at this place (step: 30).'
            in CLINIC.check(answers, student=seed).message
        )


def test_a_fault_is_told_where_its_curve_departs() -> None:
    nan = float("nan")
    curves = {
        "healthy": {"same": [0.0, 1.0], "far": [0.0, 0.0], "near": [0.0, 10.0], "ends": [1.0, 1.0]},
        "A": {"same": [0.0, 1.0], "far": [0.0, 5.0], "near": [0.0, 9.0], "ends": [1.0, nan]},
        "B": {"same": [9.0, 1.0], "far": [0.0, 0.0], "near": [0.2, 10.0], "ends": [1.0, 1.0]},
    }
    clinic = Clinic(
        id="test.curves",
        healthy=lambda: "healthy",
        faults={name: Fault(make=lambda name=name: name, symptom=name) for name in "AB"},
        observe=lambda name: curves[name],
        axis=range(3, 5),
        unit="block",
    )
    assert clinic.telling("A") == {"ends": [4], "far": [4], "near": [4]}
    assert list(clinic.telling("A")) == ["ends", "far", "near"]
    assert clinic.telling("B") == {"same": [3]}
    assert clinic.reason("B") == 'B Where it shows: "same" (block: first 3, last 3).'
    assert "block" in clinic.check({"A": ("A", "far", 3), "B": ("B", "same", 3)}).message


def test_what_chance_explains_is_no_reason() -> None:
    curves = {"healthy": [0.1, 0.2], "A": [0.2, 0.8]}
    clinic = Clinic(
        id="test.chance",
        healthy=lambda: "healthy",
        faults={"A": Fault(make=lambda: "A", symptom="A")},
        observe=lambda name: {"rate": curves[name]},
        axis=range(2),
    )
    assert clinic.telling("A") == {"rate": [0, 1]}
    noisy = dataclasses.replace(clinic, noise={"rate": 0.2})
    assert noisy.telling("A") == {"rate": [1]}
    assert clinic.choices == "Faults:\n    A\nColumns:\n    rate"
    assert "no hints" in clinic.hint({}, student=3).text


def test_a_patient_s_curves_may_be_changed_without_harm(seed: int) -> None:
    patients = CLINIC.patients(seed)
    for curves in patients.values():
        curves["line"][:] = [9.0] * 5  # type: ignore[index]
    assert CLINIC.patients(seed)["healthy"]["line"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_solution_opens_after_an_attempt_and_is_the_students_own(seed: int) -> None:
    fresh = Clinic(id="test.fresh", healthy=CLINIC.healthy, faults=CLINIC.faults,
                   observe=CLINIC.observe, axis=CLINIC.axis)  # fmt: skip
    assert "first attempt" in repr(fresh.solution(student=seed))
    fresh.check(seen(CLINIC.names), student=seed)
    text = fresh.solution(student=seed).text
    for label, name in fresh.diagnoses(seed).items():
        assert re.search(
            rf'\*\*{label}: {name}\.\*\* The line .* Where it shows: "line" \(step: first 20', text
        )
    assert "Look at the slope." in CLINIC.solution(reveal=True).text


def test_one_patient_is_judged_alone(seed: int) -> None:
    right = seen(CLINIC.diagnoses(seed).values())
    wrong = {**right, "B": right["C"]}
    answers = {label: CLINIC.check(wrong, student=seed, patient=label) for label in right}
    assert [label for label in right if not answers[label]] == ["B"]
    assert f'B is not "{right["C"][0]}"' in answers["B"].message
    only = {"C": right["C"]}
    assert CLINIC.check(only, student=seed, patient="C").passed
    assert CLINIC.check(lambda: only, student=seed, patient="A").kind == "missing"
    spoiled = {**right, "A": ("asleeep", "line", 50)}
    assert CLINIC.check(spoiled, student=seed, patient="C").passed
    assert CLINIC.check(spoiled, student=seed, patient="A").kind == "refused"
    with pytest.raises(ValueError, match="patient must be one of 'A', 'B', 'C', got 'D'"):
        CLINIC.check(right, student=seed, patient="D")
