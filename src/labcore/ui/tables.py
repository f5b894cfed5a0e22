"""table(): rows of text that scroll on a narrow page and that a screen reader can read."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["Table", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = "") -> Table:
    """Make a table of text whose rows begin with their names. End a cell with it to display it.

    columns: the headings. rows: one cell per column, "" for an empty one. note: shown below.
    Raises ValueError for a row of another length.
    """
    return Table(columns, rows, note=note)


class Table:
    """The result of `table`."""

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = ""
    ) -> None:
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row must have {len(columns)} cells, one per column, got {row}")
        self.columns, self.rows, self.note = list(columns), [list(row) for row in rows], note

    def markup(self) -> str:
        """Return the table as HTML."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(
            f'<tr><th scope="row">{html.escape(name)}</th>' + "".join(map(_cell, cells)) + "</tr>"
            for name, *cells in self.rows
        )
        note = f"<p><small>{html.escape(self.note)}</small></p>" if self.note else ""
        return (
            '<div class="labcore-html labcore-table" style="overflow-x:auto" tabindex="0">'
            f'<table class="table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
            f"{note}</div>"
        )

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        plain = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        note = [self.note] if self.note else []
        return {"text/html": self.markup(), "text/plain": "\n".join(plain + note)}


def _cell(text: str) -> str:
    """A short cell, such as a number with its sign and unit, stays on one line of the page."""
    return f"<td{' class=n' * (len(text) <= 14)}>{html.escape(text)}</td>"
