"""takeaway(): the sentence that a reader should keep, in a box."""

from __future__ import annotations

import html
from typing import Any

__all__ = ["Takeaway", "takeaway"]

_STYLE = (
    ".labcore-takeaway{margin:1em 0;padding:.6em 1em;border-radius:4px;font-weight:600;"
    "border:2px solid #0072b2}"
)


def takeaway(text: str) -> Takeaway:
    """Show what to remember of an experiment. End a cell with it. ValueError for an empty text."""
    return Takeaway(text)


class Takeaway:
    """The result of `takeaway`."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text must be a sentence, got {text!r}")
        self.text = " ".join(text.split())

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        markup = (
            f'<aside class="labcore-html labcore-takeaway"><style>{_STYLE}</style>'
            f"{html.escape(self.text)}</aside>"
        )
        return {"text/html": markup, "text/plain": f"Takeaway: {self.text}"}
