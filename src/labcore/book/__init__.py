"""The book: a Sphinx extension (`labcore.book`), its pages, slides and PDF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry point; imports the extension only when a book is built."""
    from labcore.book.extension import connect

    return connect(app)
