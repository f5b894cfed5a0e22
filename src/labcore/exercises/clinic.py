"""Bug clinics: curves of a healthy system and of faulty ones, to be told apart."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from labcore.checks import one_of
from labcore.exercises.core import Solution, attempted, kept, opened, student_number
from labcore.exercises.outcome import Outcome

__all__ = ["Clinic", "Curves", "Fault"]

Curves = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way in which the system can be broken.

    make: creates the broken system, as `Clinic.healthy` creates the healthy one.
    symptom: what its curves show and why; a reader who wrongly names this fault gets it as a hint.
    """

    make: Callable[[], Any]
    symptom: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Clinic:
    """Patients known only by their curves; each fault of `faults` has exactly one patient.

    id: slug, dot, name. points: as of an exercise. healthy: creates the healthy system.
    faults: name -> Fault; readers get the names.
    observe: system -> title of a panel -> curve.
    explanation: what the curves have in common, in Markdown, shown with the solution.
    """

    id: str
    points: int = 1
    healthy: Callable[[], Any]
    faults: Mapping[str, Fault]
    observe: Callable[[Any], Curves]
    explanation: str = ""

    def __repr__(self) -> str:
        return f"<clinic {self.id}: patients(), names, check(answers), solution()>"

    @property
    def names(self) -> tuple[str, ...]:
        """The faults to choose from, in alphabetical order."""
        return tuple(sorted(self.faults))

    def diagnoses(self, student: int = 0) -> dict[str, str]:
        """Return patient -> fault, in an order drawn from the student's number."""
        order = sorted(self.faults)
        random.Random(f"{self.id}:{student_number(student)}").shuffle(order)
        return dict(zip(string.ascii_uppercase, order, strict=False))

    def patients(self, student: int = 0) -> dict[str, Curves]:
        """Return the curves of "healthy" and of the patients "A", "B" and so on."""
        ill = {label: self.faults[name].make for label, name in self.diagnoses(student).items()}
        made = {"healthy": self.healthy, **ill}
        return {label: self.observe(make()) for label, make in made.items()}

    @kept
    def check(
        self,
        answers: Mapping[str, str] | Callable[[], Mapping[str, str]],
        *,
        student: int = 0,
        patient: str | None = None,
    ) -> Outcome:
        """Judge {"A": name of a fault, ...}, or a function that returns it.

        patient: judge only this one, whatever the answers for the others are.
        Of the wrong names, the message describes the curves of one fault. It says neither how many
        are wrong nor which patients have them, so that guessing doesn't pay.
        Raises ValueError for a patient that doesn't exist.
        """
        if callable(answers):
            try:
                answers = answers()
            except NotImplementedError:
                answers = {}
            except Exception as problem:  # a student's code may raise anything
                said = f"{type(problem).__name__}: {problem}"
                return _refused("error", f"Not yet: your function raised {said}.")
        right = self.diagnoses(student)
        if patient is not None:
            right = {patient: right[one_of("patient", patient, list(right))]}
            if type(answers) is dict:
                answers = {label: name for label, name in answers.items() if label == patient}
        if type(answers) is dict and not any(answers.values()):
            all_of = patient or f"each of {', '.join(right)}"
            return _refused("missing", f"Nothing to check yet: name a fault for {all_of}.")
        if complaint := self._complaint(answers, right):
            return _refused("error", f"Not yet: {complaint}")
        attempted(self.id)
        wrong = {label: answers[label] for label in right if answers[label] != right[label]}
        if not wrong:
            found = f"the fault of {patient} is" if patient else f"all {len(right)} faults are"
            return Outcome(passed=True, kind="right", message=f"Right: {found} found.")
        # The same answers get the same symptom, so that running the check again tells nothing new.
        name = random.Random(f"{sorted(answers.items())}").choice(sorted(wrong.values()))
        told = "Not yet: at least one diagnosis is wrong. One that is names the fault that looks "
        told += f"like this: {self.faults[name].symptom}"
        if patient is not None:
            told = f'Not yet: {patient} is not "{name}", which looks like this: '
            told += self.faults[name].symptom
        return Outcome(passed=False, kind="known mistake", mistake=name, message=told)

    def solution(self, *, student: int = 0, reveal: bool = False) -> Solution:
        """Return each patient's fault with its symptom, after an attempt or with `reveal`."""
        if refusal := opened(self.id, reveal):
            return refusal
        lines = [
            f"- **{label}: {name}.** {_sentence(self.faults[name].symptom)}"
            for label, name in self.diagnoses(student).items()
        ]
        return Solution(text="\n".join(lines) + ("\n\n" + self.explanation).rstrip())

    def _complaint(self, answers: Any, right: Mapping[str, str]) -> str:
        """Return what is wrong with the form of the answers, as a sentence, or ""."""
        form = "{" + ", ".join(f'"{label}": "..."' for label in right) + "}"
        if isinstance(answers, Mapping) and type(answers) is not dict:  # it could equal everything
            return f"the answer must be a plain dict {form}, got a {type(answers).__name__}."
        if type(answers) is not dict:
            return f"the answer must be a dict {form}, got {answers!r}."
        if set(answers) != set(right):
            return f"the answer must be a dict {form}, got the keys {list(answers)}."
        for label, name in answers.items():
            if isinstance(name, str) and type(name) is not str:
                return f"{label} must be plain text (a str), got one of type {type(name).__name__}."
            if name not in self.names:
                near = get_close_matches(str(name), self.names, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                return f"{label} must be one of {', '.join(self.names)}, got {name!r}{hint}"
        return ""


def _refused(kind: str, message: str) -> Outcome:
    return Outcome(passed=False, kind=kind, message=message)


def _sentence(text: str) -> str:
    """Capitalize the first letter of `text`."""
    return text[:1].upper() + text[1:]
