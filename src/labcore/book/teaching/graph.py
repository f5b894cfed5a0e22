"""Draws the chapters as a column, with an arc from each to those that build on it, as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator

from labcore.book.teaching.units import Course

__all__ = ["graph_figure"]

WIDTH, ROW, TOP = 360, 34, 12
DOT, LABEL = 128, 142  # x of the dots, and of the names to the right of them
STYLE = (
    ".labcore-graph{max-width:26rem;margin:0 auto}"
    ".labcore-graph svg{width:100%;height:auto;color:var(--pst-color-text-base)}"
    ".labcore-graph text{fill:currentColor;font-size:15px}"
    ".labcore-graph figcaption{color:var(--pst-color-text-muted);opacity:1;font-weight:400}"
    ".labcore-graph circle{fill:currentColor}"
    ".labcore-graph path{fill:none;stroke:var(--labcore-accent);stroke-width:2}"
    ".labcore-graph .helps{stroke-dasharray:4 4;stroke:var(--pst-color-text-muted);"
    "stroke-width:1.5}"
)


def _arcs(course: Course, rows: dict[str, int]) -> Iterator[str]:
    for unit in course.values():
        for kind, slugs in (("helps", unit.helps), ("needs", unit.needs)):
            for slug in slugs:
                start, end = rows[slug], rows[unit.slug]
                # Longer arcs reach further to the left.
                reach = 14 + (DOT - 22) * (end - start) / (max(rows.values()) - min(rows.values()))
                bend = DOT - 6 - reach * 4 / 3
                yield (
                    f'<path class="{kind}" data-arc="{slug} {unit.slug}" '
                    f'd="M{DOT - 6} {start + 3}C{bend:.0f} {start + 3} {bend:.0f} {end - 3} '
                    f'{DOT - 6} {end - 3}"/>'
                )


def graph_figure(course: Course) -> str:
    """The drawing as HTML: one row per chapter in the book's order, so all arcs lead down.

    A solid arc leads from a chapter to one that needs it, a dashed arc to one that is better read
    after it. The picture has no links; the page says the same in words below it.
    """
    rows = {slug: TOP + ROW // 2 + ROW * place for place, slug in enumerate(course)}
    height = 2 * TOP + ROW * len(rows)
    names = "".join(
        f'<circle cx="{DOT}" cy="{rows[slug]}" r="4"/>'
        f'<text x="{LABEL}" y="{rows[slug] + 5}">{html.escape(unit.short)}</text>'
        for slug, unit in course.items()
    )
    said = "; ".join(
        f"{unit.short} needs {', '.join(course[slug].short for slug in unit.needs)}"
        for unit in course.values()
        if unit.needs
    )
    return (
        f'<figure class="labcore-graph labcore-html"><style>{STYLE}</style>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(said)}">{"".join(_arcs(course, rows))}{names}</svg>'
        "<figcaption>Solid: needed by. Dashed: better read before.</figcaption></figure>"
    )
