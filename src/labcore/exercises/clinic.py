"""Bug clinics: curves of a healthy system and of faulty ones, to be told apart."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from labcore.checks import one_of
from labcore.exercises.core import Solution, kept, opened, student_number
from labcore.exercises.outcome import Outcome

__all__ = ["Clinic", "Curves", "Fault", "ends", "one_scale"]

Curves = Mapping[str, Sequence[float]]
Diagnosis = tuple[str, str, float]  # a fault, a column, and a step at which its curve shows it
WIDER = 20  # curves whose span is more times the healthy one's do not share its scale
VISIBLE = 0.03  # of a scale: the least distance that a reader sees


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
    observe: system -> title of a column -> curve; the same curve for the same system.
    axis: where a curve's values stand, in `unit`.
    noise: column -> the largest distance from the healthy curve that chance explains.
    explanation: what the curves have in common, in Markdown, shown with the solution.
    """

    id: str
    points: int = 1
    healthy: Callable[[], Any]
    faults: Mapping[str, Fault]
    observe: Callable[[Any], Curves]
    axis: range
    unit: str = "step"
    noise: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""
    _observed: dict[str, Curves] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        return f"<clinic {self.id}: patients(), names, check(answers), solution()>"

    @property
    def names(self) -> tuple[str, ...]:
        """The faults to choose from, in alphabetical order."""
        return tuple(sorted(self.faults))

    @property
    def choices(self) -> str:
        """The faults and the columns, one in a line, to print above the figure."""
        listed = {"Faults": self.names, "Columns": tuple(self._curves()["healthy"])}
        return "\n".join("\n    ".join((f"{what}:", *names)) for what, names in listed.items())

    def diagnoses(self, student: int = 0) -> dict[str, str]:
        """Return patient -> fault, in an order drawn from the student's number."""
        order = sorted(self.faults)
        random.Random(f"{self.id}:{student_number(student)}").shuffle(order)
        return dict(zip(string.ascii_uppercase, order, strict=False))

    def patients(self, student: int = 0) -> dict[str, Curves]:
        """Return the curves of "healthy" and of the patients "A", "B" and so on."""
        names = {"healthy": "healthy", **self.diagnoses(student)}
        every = self._curves()
        return {
            label: {column: list(curve) for column, curve in every[name].items()}
            for label, name in names.items()
        }

    def telling(self, fault: str) -> dict[str, list[int]]:
        """Return column -> where on the axis a fault's curve visibly departs from the healthy one.

        The column with the largest distance comes first; those without any are left out.
        """
        every, found = self._curves(), {}
        for column, healthy in every["healthy"].items():
            pair = [every["healthy"], every[fault]]
            low, high = ends(every.values() if one_scale(every, column) else pair, column)
            scale = max(high, 0.0) - min(low, 0.0) or 1.0  # as in the figures, from zero
            gaps = [
                math.inf if math.isnan(a) != math.isnan(b) else abs(a - b)
                for a, b in zip(healthy, every[fault][column], strict=True)
            ]
            least = max(VISIBLE * scale, self.noise.get(column, 0.0))
            seen = [gap >= least for gap in gaps]
            if any(seen):
                largest = max(gap for gap in gaps if not math.isnan(gap)) / scale
                places = [at for at, visible in zip(self.axis, seen, strict=True) if visible]
                found[column] = (largest, places)
        ranked = sorted(found, key=lambda column: -found[column][0])
        return {column: found[column][1] for column in ranked}

    def _curves(self) -> dict[str, Curves]:
        """Return the curves of "healthy" and of each fault."""
        if not self._observed:
            made = {"healthy": self.healthy} | {n: one.make for n, one in self.faults.items()}
            self._observed.update({name: self.observe(make()) for name, make in made.items()})
        return self._observed

    @kept
    def check(
        self,
        answers: Mapping[str, Diagnosis] | Callable[[], Mapping[str, Diagnosis]],
        *,
        student: int = 0,
        patient: str | None = None,
    ) -> Outcome:
        """Judge {"A": (fault, column, step), ...}, or a function that returns it.

        At the step, the curve of that column must visibly show the fault: depart from the healthy
        one. patient: judge only this one, whatever the answers for the others are.
        The message speaks of one fault that was named: where it can't be seen, or what its curves
        look like. It says neither how many names are wrong nor which patients have them, so that
        guessing doesn't pay. Raises ValueError for a patient that doesn't exist.
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
            said = f"Nothing to check yet: for {all_of}, name the fault and where it shows."
            return _refused("missing", said)
        if complaint := self._complaint(answers, right):
            return _refused("refused", f"Not yet: {complaint}")
        given = {label: (name, column, at) for label, (name, column, at) in answers.items()}
        # The same answers get the same words, so that running the check again tells nothing new.
        chance = random.Random(f"{sorted(given.items())}")
        if unseen := sorted(label for label, one in given.items() if not self._seen(*one)):
            label = chance.choice(unseen)
            name, column, place = given[label]
            said = (
                f'Not yet: with "{name}", the curve of "{column}" would not show the fault at this '
                f"place ({self.unit}: {place}). So for {label}, the fault, the column, or the "
                f"{self.unit} is wrong."
            )
            return Outcome(passed=False, kind="wrong", message=said)
        wrong = sorted(given[label][0] for label in right if given[label][0] != right[label])
        if not wrong:
            found = f"the fault of {patient} is" if patient else f"all {len(right)} faults are"
            return Outcome(passed=True, kind="right", message=f"Right: {found} found.")
        name = chance.choice(wrong)
        told = "Not yet: at least one diagnosis is wrong. One of the faults that you gave to the "
        told += f"wrong patient looks like this: {self.faults[name].symptom}"
        if patient is not None:
            told = f'Not yet: {patient} is not "{name}", which looks like this: '
            told += self.faults[name].symptom
        return Outcome(passed=False, kind="known mistake", mistake=name, message=told)

    def hint(self, *_: Any, **__: Any) -> Solution:
        """Say that the check's answers are the hints; take the arguments of `check`."""
        return Solution(
            text="A clinic has no hints. If a diagnosis is wrong, the check says either that the "
            "fault you named would not show at your place, or what that fault's curves look like."
        )

    def solution(self, *, student: int = 0, reveal: bool = False) -> Solution:
        """Return each patient's fault, its symptom, and where it shows, after an attempt.

        reveal: return it at once.
        """
        if refusal := opened(self.id, reveal):
            return refusal
        lines = [
            f"- **{label}: {name}.** {self.reason(name)}"
            for label, name in self.diagnoses(student).items()
        ]
        return Solution(text="\n".join(lines) + ("\n\n" + self.explanation).rstrip())

    def reason(self, fault: str) -> str:
        """Return a fault's symptom, and the columns and steps where it can be seen."""
        symptom = self.faults[fault].symptom
        where = "; ".join(
            f'"{column}" ({self.unit}: first {places[0]}, last {places[-1]})'
            for column, places in self.telling(fault).items()
        )
        return f"{symptom[:1].upper()}{symptom[1:]} Where it shows: {where}."

    def _seen(self, fault: str, column: str, place: float) -> bool:
        """Return whether the fault shows at the place of the axis that is nearest to `place`."""
        nearest = min(self.axis, key=lambda at: abs(at - place))
        return nearest in self.telling(fault).get(column, [])

    def _complaint(self, answers: Any, right: Mapping[str, str]) -> str:
        """Return what is wrong with the form of the answers, as a sentence, or ""."""
        one = f'("fault", "column", {self.unit})'
        form = "{" + f'"{next(iter(right))}": {one}' + ", ..." * (len(right) > 1) + "}"
        if isinstance(answers, Mapping) and type(answers) is not dict:  # it could equal everything
            return f"the answer must be a plain dict {form}, got a {type(answers).__name__}."
        if type(answers) is not dict:
            return f"the answer must be a dict {form}, got {answers!r}."
        if set(answers) != set(right):
            return f"the answer must be a dict {form}, got the keys {list(answers)}."
        columns = tuple(self._curves()["healthy"])
        first, last = self.axis[0], self.axis[-1]
        for label, answer in answers.items():
            if type(answer) not in (tuple, list) or len(answer) != 3:
                return f"{label} must be {one}, got {answer!r}."
            fault, column, place = answer
            for what, given, names in (("fault", fault, self.names), ("column", column, columns)):
                if type(given) is not str and isinstance(given, str):
                    kind = type(given).__name__
                    return f"for {label}, the {what} must be plain text (a str), got a {kind}."
                if given not in names:
                    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
                    hint = f"; did you mean {near[0]!r}?" if near else "."
                    return f"for {label}, the {what} must be one of {names}, got {given!r}{hint}"
            if type(place) not in (int, float) or not first <= place <= last:
                return (
                    f"for {label}, the {self.unit} must be a number from {first} to {last}, "
                    f"got {place!r}."
                )
        named = [fault for fault, _, _ in answers.values()]
        twice = next((fault for fault in named if named.count(fault) > 1), "")
        return f"two patients have {twice!r}; each fault belongs to one patient." if twice else ""


def ends(curves: Iterable[Curves], column: str) -> tuple[float, float]:
    """Return the smallest and the largest of a column's finite values."""
    values = [value for one in curves for value in one[column] if math.isfinite(value)]
    return min(values, default=0.0), max(values, default=0.0)


def one_scale(every: Mapping[str, Curves], column: str) -> bool:
    """Return whether all curves of a column fit on one scale: none is far wider than "healthy"."""
    (low, high), (least, most) = ends(every.values(), column), ends([every["healthy"]], column)
    return high - low <= WIDER * (most - least)


def _refused(kind: str, message: str) -> Outcome:
    return Outcome(passed=False, kind=kind, message=message)
