"""Exercises that recognize their usual mistakes.

A check runs a student's function in a separate process and compares what it returns with the
reference. If they differ, it looks for a known wrong answer that returns the same. The reference,
the wrong answers and the verdict stay in this process.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import inspect
import re
import secrets
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from labcore.checks import positive_int
from labcore.exercises import progress
from labcore.exercises.laws import law
from labcore.exercises.matching import difference, finite
from labcore.exercises.mistakes import Mistake
from labcore.exercises.outcome import Outcome
from labcore.exercises.running import Played, play
from labcore.exercises.wording import describe, inputs_at, size

__all__ = [
    "Exercise",
    "Solution",
    "student_seed",
]

Check = TypeVar("Check", bound=Callable[..., Outcome])
UNJUDGED = ("missing", "refused", "unavailable")  # kinds of outcome that are no attempt
# What the labs' import cells bring; another module's name may be the student's own variable.
MODULES = ("dataclasses", "itertools", "math", "random", "statistics", "torch")
switched_off: set[str] = set()  # topics whose solutions a release doesn't show


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Solution:
    """A reference with the reason why it's right.

    code: Python source, or "" if there is none to show; text: the explanation.
    """

    code: str = ""
    text: str

    def __repr__(self) -> str:
        return "\n\n".join(part for part in (self.code, self.text) if part)

    def _repr_markdown_(self) -> str:
        code = f"```python\n{self.code}\n```" if self.code else ""
        return "\n\n".join(part for part in (code, self.text) if part)


def opened(name: str, reveal: bool) -> Solution | None:
    """Return a refusal, unless `reveal` is set or something was checked for exercise `name`."""
    if name.partition(".")[0] in switched_off:
        return Solution(text="Solutions are switched off in this lab; ask your instructor.")
    if reveal or progress.task(name).attempts:
        return None
    return Solution(
        text="The solution opens after your first attempt: run the check on your own answer. "
        "`solution(reveal=True)` shows it at once."
    )


def hinted(name: str, hints: Sequence[str]) -> Solution:
    """Return the open hints of exercise `name`, after opening the next if it's due.

    Once the exercise is passed, all of them are open.
    """
    row = progress.task(name)
    if row.hints < len(hints) and row.attempts > row.hinted:
        row = progress.note(name, hints=row.hints + 1, hinted=row.attempts)
    shown = len(hints) if row.passed else row.hints
    told = [f"**Hint {at} of {len(hints)}.** {one}" for at, one in enumerate(hints[:shown], 1)]
    if shown < len(hints):
        told.append("The next hint opens after another attempt.")
    return Solution(text="\n\n".join(told))


def kept(check: Check) -> Check:
    """Decorate a check, so that its outcome is kept as the reader's progress and names its task."""

    @functools.wraps(check)
    def noted(self: Any, *args: Any, **options: Any) -> Outcome:
        outcome = check(self, *args, **options)
        if options.get("patient") is not None:  # a graded cell's own check
            return outcome
        row = progress.task(self.id)
        task = f"{row.name}, {self.points} points"
        if outcome.kind != "unavailable":
            judged = outcome.kind not in UNJUDGED
            attempts = row.attempts + (judged and not row.passed)
            progress.note(self.id, passed=outcome.passed, attempts=attempts)
            task += f", attempt {attempts}" * judged
        more = row.hints < len(getattr(self, "hints", ()))
        if outcome.kind not in ("right", *UNJUDGED) and more:
            stuck = "Stuck? Replace `check` with `hint` in this cell and run it. Then change it "
            stuck += "back. After another attempt, `hint` shows one more."
            outcome = replace(outcome, repeat="\n".join(filter(None, (outcome.repeat, stuck))))
        return replace(outcome, task=task)

    return cast(Check, noted)


def student_number(student: int) -> int:
    """Return `student`; raise ValueError unless it's an int of at least 0.

    A number given as text would draw other cases.
    """
    if isinstance(student, bool) or not isinstance(student, int) or student < 0:
        raise ValueError(
            f"student must be a whole number of at least 0, got {student!r}; write the number "
            "that your instructor gave you, or 0"
        )
    return student


def no_numbers(student: int) -> Mapping[str, Any]:
    """Return no replacements: the exercise is the same for every student."""
    del student
    return {}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Exercise:
    """A function to write.

    id: slug, dot, name.
    points: what the lab gives for it, for the reader's progress; graded cells have their own.
    beyond: those of the points that are for a rule of the task that only graded cells test.
    reference: the right answer; it takes a case as keyword arguments.
    mistakes: the usual wrong answers, at least two.
    parts: helpers of the reference whose source the mistakes may also edit.
    cases: seed -> keyword arguments of each call.
    variant: student's number -> keyword arguments that replace those of every case; 0 is no
    student.
    explanation: why the reference is right, in Markdown.
    hints: a nudge, the idea, and the line that is hardest to find, in Markdown.
    returns: names of the results, if there are several, for messages.
    rtol, atol: tolerances, see `matching.difference`; also used to recognize wrong answers.
    compare: (answers, reference's answers, cases) -> complaint or None, for random functions, with
    its false-alarm rate in its docstring; None compares answer by answer.
    timeout_s: wall-clock seconds for all cases together.
    """

    id: str
    points: int = 1
    beyond: int = 0
    reference: Callable[..., Any]
    mistakes: Sequence[Mistake]
    parts: Sequence[Callable[..., Any]] = ()
    cases: Callable[[int], Sequence[Mapping[str, Any]]]
    variant: Callable[[int], Mapping[str, Any]] = no_numbers
    explanation: str
    hints: Sequence[str] = ()
    returns: Sequence[str] = ()
    rtol: float = 1e-6
    atol: float = 0.0
    compare: (
        Callable[[Sequence[Any], Sequence[Any], Sequence[Mapping[str, Any]]], str | None] | None
    ) = field(default=None)
    timeout_s: float = 10.0

    def __repr__(self) -> str:
        return f"<exercise {self.id}: check(function), hint(), solution()>"

    @property
    def wrong(self) -> dict[str, tuple[Callable[..., Any], str]]:
        """Each mistake by name: (function, hint)."""
        return {
            one.name: (one.function(self.reference, *self.parts), one.hint) for one in self.mistakes
        }

    @kept
    def check(
        self, fn: Callable[..., Any], *, seed: int | None = None, student: int = 0
    ) -> Outcome:
        """Judge `fn` on the cases of `seed`; None draws a new seed, which the outcome shows.

        fn gets copies of the arguments and runs in a separate process for at most `timeout_s`.
        Nothing that fn does raises here. Raises ValueError for a `student` that isn't an integer of
        at least 0.
        """
        seed = secrets.randbelow(2**31) if seed is None else seed
        cases = self.numbered_cases(seed, student)
        if complaint := _callable_complaint(fn, cases[0]):
            return Outcome(passed=False, kind="refused", message=complaint)
        played = play(fn, cases, timeout_s=self.timeout_s)
        if played.kind == "missing":
            message = (
                f"Nothing to check yet: {_name(fn)} still raises NotImplementedError. "
                "Replace that line with your own code and run the check again."
            )
            return Outcome(passed=False, kind="missing", message=message)
        if played.kind:
            return self._failed(played, cases, _repeat(seed, student))
        return self.judge(played.answers, seed=seed, student=student, changed=played.changed)

    def judge(
        self,
        answers: Sequence[Any],
        *,
        seed: int,
        student: int = 0,
        changed: Sequence[Sequence[str]] = (),
    ) -> Outcome:
        """Judge existing answers, one for each of `numbered_cases(seed, student)`.

        changed: for each answer, the names of the arguments that were changed in place.
        """
        cases = self.numbered_cases(seed, student)
        # New cases, so that no function can change another's arguments.
        wanted = [self.reference(**case) for case in self.numbered_cases(seed, student)]
        complaint = self._complaint(answers, wanted, cases, range(len(cases)))
        in_place = sorted({name for names in changed for name in names})
        spoiled = (
            f"It changes its argument{'s' * (len(in_place) > 1)} "
            f"{', '.join(f'`{name}`' for name in in_place)} in place. "
            "The caller still needs those numbers, so compute new tensors (x * 2 instead of "
            "x.mul_(2), x + y instead of x += y), or copy a list before you change it."
        )
        if complaint is None and in_place:
            message = f"The results are right, but the function isn't yet. {spoiled}"
            return Outcome(passed=False, kind="in place", message=message)
        if complaint is None:
            message = f"Right: {len(cases)} cases agree with the reference (seed {seed})."
            return Outcome(passed=True, kind="right", message=message + self.untested())
        mistake, seen = self._recognized(answers, wanted, seed, student)
        parts = [f"Not yet: {complaint}."]
        if mistake:
            parts = [f"Not yet. {self.wrong[mistake][1]}", f"({seen}.)"]
        elif self.compare is None and (common := law(answers, wanted, self.returns)):
            parts.append(f"{common}.")
        parts += [spoiled] * bool(in_place)
        return Outcome(
            passed=False,
            kind="known mistake" if mistake else "wrong",
            mistake=mistake,
            message="\n".join(parts),
            repeat=_repeat(seed, student),
        )

    def untested(self) -> str:
        """Return the sentence on points that the check does not test, or ""."""
        if not self.beyond:
            return ""
        last = "The last point is" if self.beyond == 1 else f"The last {self.beyond} points are"
        return f" {last} for a part that this check doesn't test. Grading does: try it yourself."

    def hint(self, *_: Any, **__: Any) -> Solution:
        """Return the hints so far; each call after another attempt adds the next.

        It takes the arguments of `check` and ignores them.
        """
        return hinted(self.id, self.hints)

    def solution(self, *, reveal: bool = False) -> Solution:
        """Return the reference's source and explanation, after an attempt or with `reveal`."""
        if refusal := opened(self.id, reveal):
            return refusal
        code = textwrap.dedent(inspect.getsource(self.reference)).rstrip()
        return Solution(code=code, text=self.explanation)

    def numbered_cases(self, seed: int, student: int = 0) -> list[dict[str, Any]]:
        """Return the cases of `seed` with the student's own numbers; each call makes new tensors.

        The arguments are in the order of the reference, which is also the stub's.
        """
        own = self.variant(student_number(student))
        order = [*inspect.signature(self.reference).parameters]
        cases = []
        for drawn in self.cases(seed):
            case = {**drawn, **own}
            cases.append({name: case[name] for name in [*order, *case] if name in case})
        positive_int(f"the number of cases of {self.id}", len(cases), "return one or more")
        return cases

    def _complaint(
        self,
        answers: Sequence[Any],
        wanted: Sequence[Any],
        cases: Sequence[Mapping[str, Any]],
        among: Sequence[int],
    ) -> str | None:
        """Say how the answers differ in the cases of these places, or return None."""
        if self.compare is not None:
            chosen = ([some[at] for at in among] for some in (answers, wanted, cases))
            try:
                return self.compare(*chosen)
            except Exception as problem:  # the answers can have any form
                return f"the results don't have the form of the reference's ({problem})"
        found = []
        for at in among:
            case = cases[at]
            text = difference(
                answers[at], wanted[at], rtol=self.rtol, atol=self.atol, parts=self.returns,
                case=case,
            )  # fmt: skip
            if text is not None:
                found.append((size(case), at, text))
        if not found:
            return None
        _, at, text = min(found)  # the smallest inputs are the easiest to redo by hand
        fail = " (all fail)" if len(found) == len(cases) else f" ({len(found)} fail)"
        fail = " (the only one that fails)" if len(found) == 1 else fail
        return f"in case {at + 1} of {len(cases)}{fail * (len(among) == len(cases))}, {text}"

    def _recognized(
        self, answers: Sequence[Any], wanted: Sequence[Any], seed: int, student: int
    ) -> tuple[str, str]:
        """Return the name of the wrong answer that gives these answers, and how it differs, or "".

        It must match in all cases, or else in all cases without NaN and infinity, because a second
        mistake may affect those.
        """
        cases = self.numbered_cases(seed, student)
        theirs = {
            name: [function(**case) for case in self.numbered_cases(seed, student)]
            for name, (function, _) in self.wrong.items()
        }
        usual = [at for at, case in enumerate(cases) if all(map(finite, case.values()))]
        for chosen in (list(range(len(cases))), usual if self.compare is None else []):
            for name, made in theirs.items():
                if chosen and self._complaint(answers, made, cases, chosen) is None:
                    seen = self._complaint(made, wanted, cases, chosen)
                    if seen is not None:
                        return name, seen
        return "", ""

    def _failed(self, played: Played, cases: Sequence[Mapping[str, Any]], repeat: str) -> Outcome:
        if played.kind == "unavailable":
            message = f"Nothing was checked: {played.problem}."
            return Outcome(passed=False, kind=played.kind, message=message)
        stop = "" if "\n" in played.problem else "."  # no full stop after a line of code
        parts = [f"Not yet: {played.problem}{stop}"]
        if played.at is not None and played.at < len(cases):
            parts.append(f"That was case {played.at + 1} of {len(cases)}.")
            parts.append(f"{inputs_at(cases[played.at], None)}.")
        kind = played.kind
        absent = re.search(r"NameError: name '(\w+)' is not defined", played.problem)
        if absent and absent[1] in MODULES:
            kind = "refused"
            parts.append(f"The module `{absent[1]}` is not imported: run the lab's import cell.")
        return Outcome(passed=False, kind=kind, message="\n".join(parts), repeat=repeat)


def _name(fn: Callable[..., Any]) -> str:
    return f"`{getattr(fn, '__name__', type(fn).__name__)}`"


def _repeat(seed: int, student: int) -> str:
    drawn = f"{seed}, {student}" if student else f"{seed}"
    return (
        f"To get the same cases again: check(..., seed={seed}). "
        f"To see what they hold: numbered_cases({drawn}) instead of check(...)."
    )


def _callable_complaint(fn: Any, case: Mapping[str, Any]) -> str:
    """Return why `fn` can't be called with the arguments of `case`, or ""."""
    if not callable(fn):
        return (
            f"Not yet: check needs the function itself, got {describe(fn)}; pass its name "
            "without parentheses."
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have no signature
        return ""
    try:
        signature.bind(**case)
    except TypeError as problem:
        return (
            f"Not yet: {_name(fn)} must take the arguments {', '.join(case)} by these names, got "
            f"{signature} ({problem}); copy the first line of the exercise's stub."
        )
    return ""


def student_seed(secret: str, name: str) -> int:
    """Return a student's number, 1 to 2**31 − 1, from the class's secret and the student's name.

    It uses HMAC-SHA256, so nobody can compute the number without the secret. Case, spaces around
    the name and the encoding of accents don't matter.
    Raises ValueError if either is empty.
    """
    plain = unicodedata.normalize("NFKC", name).strip().casefold()
    if not secret or not plain:
        empty = "name" if secret else "secret"
        raise ValueError(
            f"{empty} must hold at least one character, got ''; pass the class's secret and the "
            "student's name"
        )
    digest = hmac.new(secret.encode(), plain.encode(), hashlib.sha256).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (2**31 - 1)
