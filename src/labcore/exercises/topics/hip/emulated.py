"""Exercises that the emulator judges, among them those whose answer is a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.matching import difference
from labcore.exercises.outcome import Outcome
from labcore.exercises.running import play
from labcore.exercises.wording import describe
from labcore.hip import EmulationError, load

__all__ = ["EmulatedExercise", "KernelExercise"]

BUILD_S = 300.0  # for a busy machine; an idle one compiles a kernel in 2 s
LINES = 3  # compiler errors that a message shows

Data = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EmulatedExercise(Exercise):
    """An exercise whose judge needs a C++ compiler.

    ready: raises RuntimeError if something is missing. The outcome is then "unavailable", with the
    error's text.
    """

    ready: Callable[[], object]

    def check(
        self, fn: Callable[..., Any], *, seed: int | None = None, student: int = 0
    ) -> Outcome:
        """Like `Exercise.check`, if the emulator can be built."""
        try:
            self.ready()
        except RuntimeError as problem:
            return _unavailable(str(problem))
        # super() would fail: it refers to the class before the decorator added slots.
        return Exercise.check(self, fn, seed=seed, student=student)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class KernelExercise(EmulatedExercise):
    """An exercise whose functions return the source of a kernel, which the emulator runs.

    data: seed -> the data of each launch.
    launch: (source, wave, data of a launch) -> its results; runs in the worker.
    model: (data of a launch, name of a mistake or "") -> the results of the kernel with that
    mistake, or of the right one. It tells mistakes apart without compiling them.
    wave: lanes per wavefront.
    """

    data: Callable[[int], Sequence[Data]]
    launch: Callable[[str, int, Data], tuple[Tensor, ...]]
    model: Callable[[Data, str], tuple[Tensor, ...]]
    wave: int = 64

    def judge(
        self,
        answers: Sequence[Any],
        *,
        seed: int,
        student: int = 0,
        changed: Sequence[Sequence[str]] = (),
    ) -> Outcome:
        """Judge the only answer, a kernel's source, by what the kernel computes."""
        del student, changed  # one case for all students, and a str cannot change
        (source,) = answers
        if not isinstance(source, str):
            problem = f"the result must be the kernel's source, a str, got {describe(source)}"
            return _refused("wrong", f"Not yet: {problem}.")
        refusal = self._built(source)
        if refusal is not None:
            return refusal
        launches = self.data(seed)
        case = {"launch": self.launch, "source": source, "wave": self.wave, "launches": launches}
        played = play(_run, [case], timeout_s=self.timeout_s)
        if played.kind == "unavailable":
            return _refused(played.kind, f"Nothing was checked: {played.problem}.")
        if played.kind:
            problem = "the kernel ended the process that ran it; look for a pointer or an index "
            problem += "that the emulator does not see"
            if played.kind == "timeout":
                problem = f"the kernel did not end within {self.timeout_s:g} s; look for a loop "
                problem += "whose counter does not get there"
            return _refused(played.kind, f"Not yet: {problem}.", seed)
        found, complaint = played.answers[0]
        if complaint:
            return _refused("wrong", f"Not yet: the emulator stops the kernel.\n{complaint}", seed)
        return self._compared(found, launches, seed)

    def _built(self, source: str) -> Outcome | None:
        """The outcome if the source does not build, or None."""
        played = play(_build, [{"source": source, "wave": self.wave}], timeout_s=BUILD_S)
        complaint = played.problem if played.kind else played.answers[0]
        if not complaint:
            return None
        _, refused, said = complaint.partition("does not compile: ")
        if not refused:
            return _unavailable(complaint)
        errors = [line for line in said.splitlines() if "error" in line][:LINES]
        told = "\n".join(f"    {line}" for line in errors or said.splitlines()[:LINES])
        return _refused("wrong", f"Not yet: the source does not compile.\n{told}")

    def _compared(self, found: Any, launches: Sequence[Data], seed: int) -> Outcome:
        complaint = self._first_difference(found, [self.model(one, "") for one in launches])
        if complaint is None:
            message = f"Right: {len(launches)} launches on {self.wave} lanes (seed {seed})."
            return Outcome(passed=True, kind="right", message=message + self.untested())
        for name, (_, hint) in self.wrong.items():
            if self._first_difference(found, [self.model(one, name) for one in launches]) is None:
                message = f"Not yet. {hint}\n({complaint}.)"
                return _refused("known mistake", message, seed, name)
        return _refused("wrong", f"Not yet: {complaint}.", seed)

    def _first_difference(self, found: Any, wanted: Sequence[tuple[Tensor, ...]]) -> str | None:
        for at, (came, right) in enumerate(zip(found, wanted, strict=True), 1):
            text = difference(came, right, rtol=self.rtol, atol=self.atol, parts=self.returns)
            if text is not None:
                return f"in launch {at} of {len(wanted)}, {text}"
        return None


def _build(source: str, wave: int) -> str:
    """In the worker: build the kernel and return "" or the error."""
    try:
        load(source, wave=wave)
    except RuntimeError as problem:
        return str(problem)
    return ""


def _run(
    launch: Callable[[str, int, Data], tuple[Tensor, ...]],
    source: str,
    wave: int,
    launches: Sequence[Data],
) -> tuple[list[tuple[Tensor, ...]], str]:
    """In the worker: return the results of the launches, and the emulator's complaint."""
    try:
        return [launch(source, wave, one) for one in launches], ""
    except (EmulationError, ValueError) as problem:  # ValueError: the kernel has another name
        return [], str(problem)


def _unavailable(reason: str) -> Outcome:
    return _refused("unavailable", f"Nothing was checked: {reason}.")


def _refused(kind: str, message: str, seed: int | None = None, mistake: str = "") -> Outcome:
    repeat = "" if seed is None else f"The same numbers again: check(..., seed={seed})."
    return Outcome(passed=False, kind=kind, mistake=mistake, message=message, repeat=repeat)
