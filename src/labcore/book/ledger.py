"""The directive `claims-ledger`: every claim in claims.toml with its verdict, to be filtered."""

from __future__ import annotations

import html
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import get_args

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from labcore import claims
from labcore.book import contents
from labcore.claims import Claim, Verdict
from labcore.ui import cards

__all__ = ["ClaimsLedger"]


class ClaimsLedger(SphinxDirective):
    """Renders claims.toml; a change to that file makes Sphinx read the page again."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """The totals, which filter, and the claims by chapter."""
        self.env.note_dependency(str(claims.FILE))
        by_slug = {
            slug: [*found] for slug, found in groupby(claims.load().values(), lambda one: one.slug)
        }
        if not by_slug:
            return [nodes.paragraph(text="No claim has been stated yet.")]
        titles = {slug: self._title(slug) for slug in by_slug}
        body = "".join(self._chapter(slug, titles[slug], found) for slug, found in by_slug.items())
        every = [item for found in by_slug.values() for item in found]
        markup = (
            f'<div class="labcore-ledger"><style>{cards.STYLE}{_filters(titles)}</style>'
            f"{_totals(every)}{_choice(titles)}{body}</div>"
        )
        return [nodes.raw("", markup, format="html")]

    def _title(self, slug: str) -> str:
        return contents.title(Path(self.env.srcdir) / "book" / slug)

    def _chapter(self, slug: str, title: str, found: list[Claim]) -> str:
        page = f"book/{slug}"
        link = html.escape(title)
        if page in self.env.found_docs:
            address = self.env.app.builder.get_relative_uri(self.env.docname, page)
            link = f'<a href="{address}">{link}</a>'
        entries = "".join(
            f'<details class="labcore-claim {cards.verdict_class(str(item.verdict))}" '
            f'id="claim-{nodes.make_id(item.id)}"><summary>{html.escape(item.statement)} '
            f"{cards.badge(str(item.verdict))}</summary>{cards.details(item)}</details>"
            for item in found
        )
        return f'<section class="of-{slug}"><h2>{link}</h2>{entries}</section>'


def _totals(every: list[Claim]) -> str:
    """How many claims have each verdict; choosing one hides the others, without JavaScript."""
    counts = Counter(item.verdict for item in every)
    rows = [("all", f"all {len(every)}")]
    rows += [
        (cards.verdict_class(name), f"{cards.badge(name)} {counts[name]}")
        for name in get_args(Verdict)
        if counts[name]
    ]
    radios = "".join(
        f'<label><input type="radio" name="verdict" value="{value}" autocomplete="off"'
        f"{' checked' if value == 'all' else ''}> {text}</label>"
        for value, text in rows
    )
    return f"<fieldset><legend>Verdict</legend>{radios}</fieldset>"


def _choice(titles: dict[str, str]) -> str:
    options = "".join(
        f'<option value="{slug}">{html.escape(title)}</option>' for slug, title in titles.items()
    )
    return (
        '<p><label>Chapter <select autocomplete="off"><option value="all">all chapters</option>'
        f"{options}</select></label></p>"
    )


def _filters(titles: dict[str, str]) -> str:
    """CSS that hides what the choices leave out."""
    chosen = [cards.verdict_class(name) for name in get_args(Verdict)]
    hide = [
        f".labcore-ledger:has(input[value={name}]:checked) details:not(.{name})" for name in chosen
    ]
    hide += [
        f".labcore-ledger:has(input[value={name}]:checked) section:not(:has(details.{name}))"
        for name in chosen
    ]
    hide += [
        f".labcore-ledger:has(option[value={slug}]:checked) section:not(.of-{slug})"
        for slug in titles
    ]
    return f"{','.join(hide)}{{display:none}}"
