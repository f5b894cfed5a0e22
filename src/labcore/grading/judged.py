"""Runs one submission in a sandbox and judges it outside of the sandbox."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labcore.exercises import slugs
from labcore.grading.judging import (
    Ran,
    Sandbox,
    Verdicts,
    answer_names,
    calls_solutions,
    judge,
)
from labcore.grading.references import doubts
from labcore.grading.sandbox import Limits
from labcore.grading.session import DIED, TIMEOUT
from labcore.labs.source import Lab, nbgrader_of

__all__ = ["GradingError", "Judged", "run_and_judge"]


class GradingError(RuntimeError):
    """A notebook could not be graded; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The result for one notebook, as data that a file can hold.

    outputs, counts: outputs and execution count of each cell of the repaired notebook, in order.
    errors: (name, message) by grade_id, for the graded cells that failed; all others passed.
    problem: why none of the notebook could be run, "" if some of it could. stopped: the number of
    cells and functions that ran out of time. died: cells that killed their kernel and were skipped.
    unchecked: graded cells that this machine could not check. concerns: for a person to review.
    """

    outputs: Sequence[Sequence[Mapping[str, Any]]]
    counts: Sequence[int | None]
    errors: Mapping[str, tuple[str, str]]
    problem: str = ""
    stopped: int = 0
    died: int = 0
    unchecked: int = 0
    concerns: Sequence[str] = ()

    def to_json(self) -> str:
        """The result as text."""
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False)
        # A student's output may contain lone surrogates, which UTF-8 cannot encode.
        return text.encode("utf-8", errors="replace").decode()

    @classmethod
    def from_json(cls, text: str) -> Judged:
        """The result from the text of `to_json`."""
        told = json.loads(text)
        told["errors"] = {name: (one, more) for name, (one, more) in told["errors"].items()}
        return cls(**{**told, "concerns": tuple(told["concerns"])})


def _without_graded(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with its graded cells emptied: a student's kernel must not run them."""
    found = copy.deepcopy(dict(notebook))
    for cell in found["cells"]:
        if nbgrader_of(cell).get("grade"):
            cell["source"] = ""
    return found


def _count(ran: Ran, name: str) -> int:
    errors = [[one.get("ename") for one in outputs] for outputs in ran.outputs]
    return sum(name in names for names in errors)


def _numbered(number: int | None, ran: Ran) -> tuple[int, list[str]]:
    """The student number to judge with, and any concern about it."""
    if number is not None:
        return number, []
    if ran.number is not None:
        return ran.number, [f"STUDENT is not a number; graded as {ran.number}, its final value"]
    return 0, ["STUDENT is not a number; graded as 0"]


def run_and_judge(
    lab: Lab,
    notebook: Mapping[str, Any],
    *,
    number: int | None,
    limits: Limits,
    sandboxed: bool = True,
) -> Judged:
    """Runs a repaired notebook (`submissions.mend`) in a sandbox and judges its functions outside.

    number: the student number, None if the notebook does not assign a literal one. sandboxed: False
    runs the student's code with this process's privileges. Nothing that a student wrote makes this
    function raise.
    """
    slug, every = lab.metadata.slug, list(lab.points)
    with Sandbox(limits, sandboxed=sandboxed) as sandbox:
        ran = sandbox.run(_without_graded(notebook), answer_names(lab))
        number, concerns = _numbered(number, ran)
        if ran.problem and not sandbox.told:
            errors = dict.fromkeys(every, ("NotRun", ran.problem))
            verdicts = Verdicts(errors=errors, unchecked=0, timeouts=0)
        else:
            verdicts = judge(lab, sandbox, number=number, chosen=every)
            # Only a lab with exercises in labcore has solutions there to call.
            right = [name for name in every if name not in verdicts.errors and slug in slugs()]
            again = judge(lab, sandbox, number=number, chosen=right, without=slug)
            concerns += [f"{name} {how}" for name, how in calls_solutions(again).items()]
            concerns += [
                f"{name} is a copy of labcore's own solution"
                for name, told in sandbox.told.items()
                if told.get("copied") is True
            ]
            concerns += doubts(notebook, lab.notebook)
        nothing_ran = ran.problem if not sandbox.told else ""
    return Judged(
        outputs=ran.outputs,
        counts=ran.counts,
        errors=verdicts.errors,
        problem=nothing_ran,
        stopped=_count(ran, TIMEOUT) + verdicts.timeouts,
        died=_count(ran, DIED),
        unchecked=verdicts.unchecked,
        concerns=tuple(concerns),
    )
