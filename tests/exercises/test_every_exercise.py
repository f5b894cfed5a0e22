"""What holds for the exercises of every slug: no right answer fails, each mistake is told apart.

LABCORE_SOAK=1 draws the mistakes' cases for four students in place of one.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from labcore.exercises import Clinic, Exercise, load, slugs, student_seed
from labcore.exercises.matching import difference
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.lion import MASKED_STEP
from tests.exercises.draws import answers
from tests.exercises.reasons import with_reasons

SOAK = os.environ.get("LABCORE_SOAK") == "1"
ALL = {slug: load(slug) for slug in slugs()}
EXERCISES = [one for every in ALL.values() for one in every if isinstance(one, Exercise)]
CLINICS = [one for every in ALL.values() for one in every if isinstance(one, Clinic)]
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda one: one.id)
each_clinic = pytest.mark.parametrize("clinic", CLINICS, ids=lambda one: one.id)


def draws(seed: int, students: int = 2) -> list[tuple[int, int]]:
    """(seed of the cases, student's number): nobody's, and some students'."""
    numbers = range(1, students + 1)
    return [(seed, 0)] + [(seed + n, student_seed("secret", f"{seed} {n}")) for n in numbers]


@pytest.mark.parametrize("slug", ALL)
def test_a_lab_has_enough_of_everything_and_good_names(slug: str) -> None:
    every = ALL[slug]
    names = [one.id for one in every]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{slug}.") for name in names)
    assert 3 <= len(every) <= 6 and sum(isinstance(one, Clinic) for one in every) >= 1
    wrong = [one.wrong for one in every if isinstance(one, Exercise)]
    assert min(map(len, wrong)) >= 2 and sum(map(len, wrong)) >= 6
    hints = [hint for mistakes in wrong for _, hint in mistakes.values()]
    assert len(set(hints)) == len(hints) and all(map(str.strip, hints))


@each_exercise
def test_three_hints_lead_to_the_line(exercise: Exercise) -> None:
    nudge, idea, line = exercise.hints
    assert len({nudge, idea, line}) == 3 and "`" in line
    for one in exercise.hints:
        assert one[0].isupper() or one[0] == "`"
        assert one.count("`") % 2 == 0 and one.rstrip(".?`)") != one
    # The line is in Python, and what a reader asks for is named as in the lab.
    spans = line.split("`")[1::2]
    assert any(_parses(span) for span in spans), spans
    module = importlib.import_module(f"labcore.exercises.topics.{exercise.id.partition('.')[0]}")
    assert getattr(module, exercise.id.partition(".")[2].upper()) is exercise


def _parses(code: str) -> bool:
    try:
        ast.parse(f"{code} pass" if code.endswith(":") else code)
    except SyntaxError:
        return False
    return True


@each_exercise
def test_the_reference_passes(exercise: Exercise, seed: int) -> None:
    for number, student in draws(seed):
        right = answers(exercise, exercise.reference, number, student)
        outcome = exercise.judge(right, seed=number, student=student)
        assert outcome.passed and outcome.kind == "right", outcome
        assert outcome.mistake == ""


@each_exercise
def test_each_wrong_answer_gets_its_own_hint(exercise: Exercise, seed: int) -> None:
    for (number, student), (name, (fn, hint)) in itertools.product(
        draws(seed, students=4 if SOAK else 1), exercise.wrong.items()
    ):
        outcome = exercise.judge(
            answers(exercise, fn, number, student), seed=number, student=student
        )
        assert (outcome.passed, outcome.kind, outcome.mistake) == (False, "known mistake", name)
        assert hint in outcome.message and f"seed={number}" in outcome.repeat


def test_second_mistake_on_nan_does_not_hide_the_first(seed: int) -> None:
    for name in ("betas swapped", "momentum first", "uphill", "edge outside", "no sign"):
        fn, hint = MASKED_STEP.wrong[name]
        given = answers(MASKED_STEP, fn, seed, 0)
        usual = MASKED_STEP.numbered_cases(seed)
        spoiled = [
            (weight.nan_to_num(nan=0.0), momentum)
            if case["grad"].isnan().any()
            else (weight, momentum)
            for (weight, momentum), case in zip(given, usual, strict=True)
        ]
        outcome = MASKED_STEP.judge(spoiled, seed=seed)
        assert outcome.mistake == name and hint in outcome.message


@each_exercise
def test_in_the_worker_the_reference_passes_and_changes_nothing(
    exercise: Exercise, seed: int
) -> None:
    outcome = exercise.check(exercise.reference, seed=seed, student=seed)
    assert outcome.kind == "right", outcome


@each_exercise
def test_in_the_worker_one_wrong_answer_is_known(exercise: Exercise, seed: int) -> None:
    name = random.Random(seed).choice(list(exercise.wrong))
    outcome = exercise.check(exercise.wrong[name][0], seed=seed)
    assert outcome.mistake == name, outcome


@each_exercise
def test_the_stub_is_missing(exercise: Exercise) -> None:
    def stub(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    outcome = exercise.check(stub)
    assert (outcome.passed, outcome.kind) == (False, "missing")


@each_exercise
def test_a_seed_repeats_the_cases_in_new_memory(exercise: Exercise, seed: int) -> None:
    first, second = exercise.numbered_cases(seed, 7), exercise.numbered_cases(seed, 7)
    for one, other in zip(first, second, strict=True):
        assert difference(one, other, rtol=0.0, atol=0.0) is None
        for name, value in one.items():
            if hasattr(value, "data_ptr") and value.numel():
                assert value.data_ptr() != other[name].data_ptr()


@each_exercise
def test_the_solution_is_the_reference_with_its_reason(exercise: Exercise) -> None:
    solution = exercise.solution(reveal=True)
    assert f"def {exercise.reference.__name__}(" in solution.code
    compile(solution.code, exercise.id, "exec")
    assert solution.text == exercise.explanation and len(solution.text) > 80
    assert solution._repr_markdown_().startswith("```python\n")


@each_clinic
def test_right_diagnosis_passes_and_every_swap_of_two_fails(clinic: Clinic, seed: int) -> None:
    for student in (0, seed, student_seed("secret", str(seed))):
        names = clinic.diagnoses(student)
        assert sorted(names.values()) == sorted(clinic.faults)
        right = with_reasons(clinic, names)
        assert clinic.check(right, student=student).passed
        for one, other in itertools.combinations(right, 2):
            outcome = clinic.check({**right, one: right[other], other: right[one]}, student=student)
            assert outcome.kind == "known mistake" and outcome.mistake in (names[one], names[other])
            assert clinic.faults[outcome.mistake].symptom in outcome.message


@each_clinic
def test_a_reason_has_to_hold(clinic: Clinic, seed: int) -> None:
    names = clinic.diagnoses(seed)
    right = with_reasons(clinic, names)
    columns = clinic.patients(seed)["healthy"]
    healthy = [
        (label, name, column, at)
        for label, name in names.items()
        for column in columns
        for at in set(clinic.axis) - set(clinic.telling(name).get(column, []))
    ]
    for label, name, column, at in random.Random(seed).sample(healthy, 8):
        outcome = clinic.check({**right, label: (name, column, at)}, student=seed)
        assert outcome.kind == "wrong" and f'with "{name}", the curve' in outcome.message


@each_clinic
def test_students_get_patients_in_different_orders(clinic: Clinic, seed: int) -> None:
    orders = {tuple(clinic.diagnoses(seed + n).values()) for n in range(40)}
    assert len(orders) > 5


def gap(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> float:
    """The largest distance between two patients in any panel, as a share of what it shows."""
    found = 0.0
    for panel, curve in one.items():
        pairs = list(zip(curve, other[panel], strict=True))
        both = [value for pair in pairs for value in pair if math.isfinite(value)]
        span = max(both) - min(both) if both else 0.0
        if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
            return 1.0
        apart = max((abs(a - b) for a, b in pairs if math.isfinite(a)), default=0.0)
        found = max(found, apart / span if span else 0.0)
    return found


@each_clinic
def test_no_two_patients_look_alike(clinic: Clinic, seed: int) -> None:
    patients = clinic.patients(seed)
    assert next(iter(patients)) == "healthy" and len(patients) == 1 + len(clinic.faults) >= 5
    for one, other in itertools.combinations(patients, 2):
        assert gap(patients[one], patients[other]) > 0.15, (clinic.diagnoses(seed), one, other)


@each_clinic
def test_patients_are_the_same_each_time(clinic: Clinic, seed: int) -> None:
    first, second = clinic.patients(seed), clinic.patients(seed)
    assert difference(first, second, rtol=0.0, atol=0.0) is None


# Plants: what the gates above must catch ---------------------------------------------------------


def test_hints_that_are_confused_are_caught(seed: int) -> None:
    exercise = EXERCISES[0]
    (fn, _), *_ = exercise.wrong.values()
    twins = replace(
        exercise,
        mistakes=[
            Mistake("one", fn, "First."),
            Mistake("other", fn, "Second."),
        ],
    )
    right = replace(
        exercise,
        mistakes=[
            Mistake("none", exercise.reference, "No mistake at all."),
        ],
    )
    for planted in (twins, right):
        with pytest.raises(AssertionError):
            test_each_wrong_answer_gets_its_own_hint(planted, seed)


def test_a_reference_that_changes_its_arguments_is_caught(seed: int) -> None:
    def spoils(**case: Any) -> Any:
        answer = MASKED_STEP.reference(**case)
        case["weight"].zero_()
        return answer

    with pytest.raises(AssertionError, match="in place"):
        test_in_the_worker_the_reference_passes_and_changes_nothing(
            replace(MASKED_STEP, reference=spoils), seed
        )


def test_patients_that_look_alike_are_caught(seed: int) -> None:
    clinic = CLINICS[0]
    twins = dict(clinic.faults)
    twins["new"] = replace(next(iter(twins.values())), symptom="Like another.")
    with pytest.raises(AssertionError):
        test_no_two_patients_look_alike(replace(clinic, faults=twins), seed)
