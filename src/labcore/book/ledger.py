"""Directives that show claims.toml: all claims, their totals, and a few as cards.

`claims-ledger` is the list with its filters, `claims-totals` one line, and `claims-cards` shows the
claims that its lines name: what is claimed, what was measured, and the verdict.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import get_args

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from labcore import claims, records
from labcore.book import contents
from labcore.claims import Claim, Verdict
from labcore.ui import cards, intervals

__all__ = ["ClaimsCards", "ClaimsLedger", "ClaimsTotals"]

NOTHING = '<p class="nothing">No claim of this chapter has this verdict.</p>'


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
            f'<div class="labcore-ledger"><style>{_filters(by_slug)}</style>'
            f"{_totals(every)}{_choice(titles)}{NOTHING}{body}</div>"
        )
        return _raw(markup)

    def _title(self, slug: str) -> str:
        return contents.title(Path(self.env.srcdir) / "book" / slug)

    def _chapter(self, slug: str, title: str, found: list[Claim]) -> str:
        page = f"book/{slug}"
        link = html.escape(title)
        if page in self.env.found_docs:
            link = f'<a href="{_uri(self, page)}">{link}</a>'
        entries = "".join(
            f'<details class="labcore-claim {cards.verdict_class(str(item.verdict))}" '
            f'id="claim-{nodes.make_id(item.id)}"><summary>'
            f"<span>{html.escape(item.statement)}</span> {cards.badge(str(item.verdict))}</summary>"
            f"{cards.details(item)}</details>"
            for item in found
        )
        return f'<section class="of-{slug}"><h2>{link}</h2>{entries}</section>'


class ClaimsTotals(SphinxDirective):
    """One line: how many claims have each verdict."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """The line, which leads to the ledger."""
        self.env.note_dependency(str(claims.FILE))
        counts = Counter(item.verdict for item in claims.load().values())
        parts = [
            f"{cards.badge(name)} {counts[name]}" for name in get_args(Verdict) if counts[name]
        ]
        return _raw(
            f'<p class="labcore-totals">'
            f'<a href="{_uri(self, "book/claims")}">{counts.total()} claims</a>: '
            f"{', '.join(parts)}</p>"
        )


class ClaimsCards(SphinxDirective):
    """Claims as cards beside each other; a line of the content is "id: what was measured".

    In what was measured, {name of a part} stands for the part's recorded number.
    """

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The cards. Raises ValueError for an id without a claim and a name without a part."""
        self.env.note_dependency(str(claims.FILE))
        lines = (line.partition(": ") for line in self.content)
        shown = "".join(self._card(claims.claim(name), told) for name, _, told in lines)
        return _raw(f'<div class="labcore-beliefs">{shown}</div>')

    def _card(self, item: Claim, told: str) -> str:
        badge = cards.badge(str(item.verdict))
        address = f"{_uri(self, f'book/{item.slug}')}#verdict-{item.id.partition('.')[2]}"
        return (
            f'<div class="labcore-claim {cards.verdict_class(str(item.verdict))}">'
            f"<p><small>The claim</small><br>{html.escape(item.statement)}</p>"
            f"<p><small>Measured</small><br>{with_numbers(item, told)}</p>"
            f'<p><small>Verdict</small><br><a href="{address}">{badge}</a></p></div>'
        )


def with_numbers(item: Claim, told: str) -> str:
    """The text as HTML, with the recorded number of a claim's part for each {name of the part}.

    Raises ValueError for a name that no part with a rule has, and for a text without a number.
    """
    if "{" not in told:
        raise ValueError(f"a card must say what was measured for {item.id}, with a {{part}}")

    def recorded(found: re.Match[str]) -> str:
        part = item.part(html.unescape(found[1]))
        measured = part.measured(records.find(item.slug, part.case, part.quantity))
        unsure = part.judge(measured) == "below the noise here"
        return f"<strong>{intervals.number(measured.mean)}</strong>" + (
            f" (too close to call; the rule says {part.rule})" if unsure else ""
        )

    return re.sub(r"\{(.+?)\}", recorded, html.escape(told))


def _uri(directive: SphinxDirective, page: str) -> str:
    env = directive.env
    return env.app.builder.get_relative_uri(env.docname, page)


def _raw(markup: str) -> list[nodes.Node]:
    return [nodes.raw("", markup, format="html")]


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


def _filters(by_slug: Mapping[str, Sequence[Claim]]) -> str:
    """CSS that hides what the choices leave out, and NOTHING where they leave something."""
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
        for slug in by_slug
    ]
    empty = [
        f".labcore-ledger:has(option[value={slug}]:checked):has(input[value={name}]:checked)>.nothing"
        for slug, found in by_slug.items()
        for name in set(chosen) - {cards.verdict_class(str(one.verdict)) for one in found}
    ]
    shown = f"{','.join(sorted(empty))}{{display:block}}" if empty else ""
    return f"{','.join(['.labcore-ledger>.nothing', *hide])}{{display:none}}{shown}"
