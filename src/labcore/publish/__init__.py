"""The book's pages: a Sphinx extension (`labcore.publish`) and what the local server needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry point; the extension is imported only when a book is built."""
    from labcore.publish.extension import connect

    return connect(app)
