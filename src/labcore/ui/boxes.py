"""takeaway(): the sentence that a reader should keep, in a box."""

from __future__ import annotations

import html
from typing import Any

from labcore.ui.hosts import style
from labcore.ui.prediction import Prediction

__all__ = ["Takeaway", "takeaway"]


def takeaway(text: str, *, after: Prediction | None = None) -> Takeaway:
    """Show what to remember of an experiment. End a cell with it. ValueError for an empty text.

    after: a prediction whose answer the text gives away. Without a guess it is folded.
    """
    return Takeaway(text, after)


class Takeaway:
    """The result of `takeaway`."""

    def __init__(self, text: str, after: Prediction | None = None) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text must be a sentence, got {text!r}")
        self.text = " ".join(text.split())
        self._folded = after is not None and after.guess is None

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        shown = html.escape(self.text)
        if self._folded:
            shown = f"<details><summary>After your guess: the takeaway</summary>{shown}</details>"
        markup = f'<aside class="labcore-html labcore-takeaway">{style()}{shown}</aside>'
        return {"text/html": markup, "text/plain": f"Takeaway: {self.text}"}
