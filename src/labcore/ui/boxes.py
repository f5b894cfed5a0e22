"""takeaway(): the sentence that a reader should keep, in a box."""

from __future__ import annotations

import html
from typing import Any

from labcore.ui.hosts import style

__all__ = ["Takeaway", "takeaway"]


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
            f'<aside class="labcore-html labcore-takeaway">{style()}'
            f"{html.escape(self.text)}</aside>"
        )
        return {"text/html": markup, "text/plain": f"Takeaway: {self.text}"}
