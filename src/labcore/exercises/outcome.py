"""The result of a check: what it says, as text, as a card and as an error in a graded cell."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from labcore.exercises.wording import in_lines

__all__ = ["CheckFailedError", "NotCheckedError", "Outcome"]

# What a card says of each kind, and its color; words and color say the same.
CARDS = {
    "right": ("✓ Right", "#009e73"),
    "known mistake": ("✗ A usual mistake", "#d55e00"),
    "wrong": ("✗ Not yet", "#d55e00"),
    "in place": ("✗ Almost", "#e69f00"),
    "missing": ("○ Not begun", "#808080"),
    "refused": ("○ Not judged, not counted as an attempt", "#808080"),
    "unavailable": ("○ Not checked", "#808080"),
    "timeout": ("! It took too long", "#cc79a7"),
    "memory": ("! It took too much memory", "#cc79a7"),
    "exit": ("! It ended its process", "#cc79a7"),
    "error": ("! An error", "#cc79a7"),
}


class CheckFailedError(AssertionError):
    """A graded cell's check did not pass; the message is the outcome's."""


class NotCheckedError(CheckFailedError):
    """A graded cell's check could not run on this machine, regardless of the answer."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Outcome:
    """The result of a check, true if it passed. Its repr is the message and `repeat`, in lines.

    kind: "right", "known mistake", "wrong" (unlike every known mistake), "in place" (right, except
    that it changed its arguments), "error", "missing" (the stub), "refused" (an answer of the wrong
    form), "timeout", "memory", "exit" or "unavailable" (this machine can't check: it can't start a
    process, or has no compiler).
    mistake: the name of the recognized mistake, or "".
    message: what the student reads.
    repeat: how to get the same cases again.
    task: the exercise and its points in words, if the outcome is of a visible check.
    """

    passed: bool
    kind: str
    mistake: str = ""
    message: str
    repeat: str = ""
    task: str = ""

    def require(self) -> None:
        """Raise CheckFailedError with the message unless the check passed; for graded cells.

        Raises NotCheckedError if this machine can't check, so that grading can tell the two apart.
        The error leaves out `repeat`, because readers of a graded cell's message have neither its
        cases nor its reference.
        """
        if not self.passed:
            failure = NotCheckedError if self.kind == "unavailable" else CheckFailedError
            raise failure(in_lines(self.message))

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return in_lines(self._text)

    @property
    def _text(self) -> str:
        return "\n".join(part for part in (self.message, self.repeat) if part)

    def _repr_html_(self) -> str:
        title, color = CARDS.get(self.kind, CARDS["error"])
        head = " · ".join(part for part in (title, self.task) if part)
        # Lines and indentation matter: a message may quote code.
        style = "white-space:pre-wrap;word-break:normal;background:none;margin:.3em 0"
        told = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(self._text))
        body = f'<pre style="{style}">{told}</pre>'
        return (
            f'<div style="border:1px solid #8888;border-left:6px solid {color};'
            f'border-radius:4px;padding:.5em 1em"><b>{head}</b>'
            f"{body}</div>"
        )
