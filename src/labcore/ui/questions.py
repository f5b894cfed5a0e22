"""quiz(): multiple-choice questions that work on a page and in a notebook, without a kernel."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Question", "Quiz", "quiz"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its options, the index of the right one, and why it's right.

    Raises ValueError for fewer than two options, a repeated one, an index out of range, or an empty
    text or why.
    """

    text: str
    options: Sequence[str]
    answer: int
    why: str

    def __post_init__(self) -> None:
        if not self.text.strip() or not self.why.strip():
            raise ValueError(
                "Question: text and why must not be empty; say why the answer is right"
            )
        if isinstance(self.options, str) or len(self.options) < 2:
            raise ValueError(f"Question: needs at least two options, got {self.options!r}")
        if len(set(self.options)) != len(self.options):
            raise ValueError(f"Question: options must differ, got {self.options!r}")
        if isinstance(self.answer, bool) or not isinstance(self.answer, int):
            raise TypeError(f"Question: answer must be an option's index, got {self.answer!r}")
        if not 0 <= self.answer < len(self.options):
            raise ValueError(
                f"Question: answer must be an index from 0 to {len(self.options) - 1}, "
                f"got {self.answer}"
            )


def quiz(questions: Sequence[Question]) -> Quiz:
    """Make a quiz to end a chapter with. Raises ValueError without questions.

    Raises TypeError for anything but a Question.
    """
    return Quiz(questions)


# If the script doesn't run (no JavaScript, an untrusted notebook), the fold-outs show the answers.
_SCRIPT = """(function(){document.querySelectorAll('[data-quiz="%s"]:not([data-ready])').forEach(
function(q){q.dataset.ready="1";q.querySelectorAll("fieldset").forEach(function(f){
f.addEventListener("change",function(e){var right=e.target.value===f.dataset.answer;
f.querySelector("[role=status]").textContent=right?"Right.":"Not this one: think again.";
if(right)f.querySelector("details").open=true;var all=q.querySelectorAll("fieldset"),n=0;
all.forEach(function(g){var c=g.querySelector(":checked");n+=c&&c.value===g.dataset.answer?1:0;});
q.querySelector(".score").textContent=n+" of "+all.length+" right.";});});});})();"""

_STYLE = (
    ".labcore-quiz fieldset{border:0;padding:0;margin:0 0 1.25rem}"
    ".labcore-quiz legend{font-size:1em;font-weight:600;margin-bottom:.25rem;float:none}"
    ".labcore-quiz label{display:block;padding:.2rem 0;cursor:pointer}"
    ".labcore-quiz [role=status]{min-height:1.4em;margin:.1rem 0}"
)


class Quiz:
    """The result of `quiz`; end a cell with it to display it."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = tuple(questions)
        if not self.questions:
            raise ValueError("quiz needs at least one Question, got none")
        for question in self.questions:
            if not isinstance(question, Question):
                raise TypeError(f"quiz takes Question objects, got {question!r}")

    def markup(self) -> str:
        """Return HTML of the questions; each answer is below its question, folded."""
        uid = hashlib.sha256(repr(self.questions).encode()).hexdigest()[:10]
        blocks = "".join(
            self._block(f"q{uid}-{number}", number, question)
            for number, question in enumerate(self.questions)
        )
        return (
            f'<div class="labcore-html labcore-quiz" data-quiz="{uid}">'
            f"<style>{_STYLE}</style>{blocks}"
            f'<p class="score" role="status"></p></div><script>{_SCRIPT % uid}</script>'
        )

    def _block(self, uid: str, number: int, question: Question) -> str:
        options = "".join(
            f'<label><input type="radio" name="{uid}" value="{i}"> {html.escape(option)}</label>'
            for i, option in enumerate(question.options)
        )
        answer = html.escape(question.options[question.answer])
        return (
            f'<fieldset data-answer="{question.answer}"><legend>{number + 1}. '
            f'{html.escape(question.text)}</legend>{options}<div role="status"></div>'
            f"<details><summary>Answer to question {number + 1}</summary>"
            f"<p><strong>{answer}</strong> {html.escape(question.why)}</p></details></fieldset>"
        )

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        lines = []
        for number, question in enumerate(self.questions, start=1):
            lines.append(f"{number}. {question.text}")
            lines += [f"   ( ) {option}" for option in question.options]
        return {"text/html": self.markup(), "text/plain": "\n".join(lines)}
