"""verdicts(): a chapter's claims as cards, each part drawn against its rule."""

from __future__ import annotations

import html
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

from labcore import claims, records
from labcore.checks import one_of
from labcore.claims import Claim, Measured, Part, Verdict
from labcore.ui import intervals
from labcore.ui.hosts import style
from labcore.ui.intervals import Row
from labcore.ui.recordings import provenance

__all__ = ["BADGES", "Verdicts", "badge", "details", "signed", "verdict_class", "verdicts"]

BADGES: dict[str, str] = {
    "holds": "✓",
    "holds in part": "◐",
    "does not hold": "✗",
    "below the noise here": "≈",
    "not testable here": "–",
    "true by construction": "≡",
}
"""A sign for each verdict, so that color alone never tells them apart."""


def verdicts(slug: str, *, live: Mapping[str, Measured] | None = None) -> Verdicts:
    """Show the claims of a chapter: what was measured, against the rule, and the verdict.

    live: numbers measured in this run, by the claim's name, or by "<claim>/<part>" for another part
    than the first. Each is judged by the rule of its part and stands beside the record.
    Raises ValueError for a slug without claims or an unknown name, and ClaimContradictedError as
    `labcore.claims.Claim.judge` does.
    """
    return Verdicts(slug, live or {})


class Verdicts:
    """The result of `verdicts`; end a cell with it to display it."""

    def __init__(self, slug: str, live: Mapping[str, Measured]) -> None:
        found = {
            one.id.partition(".")[2]: one for one in claims.load().values() if one.slug == slug
        }
        if not found:
            raise ValueError(f"slug must have claims in claims.toml, got {slug!r}")
        self.claims = found
        self._live: dict[tuple[str, str], tuple[Measured, Verdict]] = {}
        for key, measured in live.items():
            name, _, part = key.partition("/")
            item = found[one_of("claim", name, found)]
            self._live[item.id, item.part(part).name] = measured, item.judge(measured, part)

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        cards = "".join(
            f'<div class="labcore-claim {verdict_class(_of(item))}" id="verdict-{name}">'
            f"<p><strong>{html.escape(item.statement)}</strong> {badge(_of(item))}</p>"
            f"{details(item, self._live)}</div>"
            for name, item in self.claims.items()
        )
        markup = f'<div class="labcore-html labcore-claims">{style()}{cards}</div>'
        plain = [f"{item.statement} {signed(_of(item))}" for item in self.claims.values()]
        return {"text/html": markup, "text/plain": "\n".join(plain)}


def details(
    item: Claim, live: Mapping[tuple[str, str], tuple[Measured, Verdict]] = MappingProxyType({})
) -> str:
    """Return a claim's parts as HTML: those with a rule drawn against it, the others with reasons.

    live: numbers measured in this run with their verdicts, by (claim's id, part's name).
    """
    tested = [part for part in item.parts if not part.untested]
    drawn = "".join(
        _drawn(item, [*group], live)
        for _, group in groupby(tested, key=lambda part: (_record(item, part).unit, part.rule))
    )
    rest = "".join(
        f"<p>{html.escape(part.name)}: {badge(part.untested)}. {html.escape(part.reason)}</p>"
        for part in item.parts
        if part.untested
    )
    said = "" if item.source == "the article" else f" Source: {item.source}."
    small = [f"{item.quantity[:1].upper()}{item.quantity[1:]}.{said}"]
    small += [item.note] if item.note else []
    small += [provenance(*(_record(item, part) for part in tested))] if tested else []
    notes = "".join(f"<p><small>{html.escape(text)}</small></p>" for text in small)
    return f"{drawn}{rest}{notes}"


def _drawn(
    item: Claim, parts: list[Part], live: Mapping[tuple[str, str], tuple[Measured, Verdict]]
) -> str:
    """Return parts that share unit and rule, and what was measured live, on one axis."""
    rows = []
    for part in parts:
        measured = part.measured(_record(item, part))
        rows.append(Row(name=part.name, measured=measured, verdict=signed(part.judge(measured))))
        if (item.id, part.name) in live:
            here, verdict = live[item.id, part.name]
            rows.append(Row(name="live here", measured=here, kind="live", verdict=signed(verdict)))
    return intervals.drawn(rows, unit=_record(item, parts[0]).unit, rule=parts[0].rule)


def badge(verdict: str) -> str:
    """Return a verdict with its sign as HTML."""
    return f'<span class="labcore-verdict {verdict_class(verdict)}">{signed(verdict)}</span>'


def verdict_class(verdict: str) -> str:
    """Return a verdict's CSS class, which gives its color."""
    return f"verdict-{verdict.replace(' ', '-')}"


def signed(verdict: str) -> str:
    """Return a verdict with its sign. Raises ValueError if there is no such verdict."""
    return f"{BADGES[one_of('verdict', verdict, BADGES)]} {verdict}"


def _of(item: Claim) -> Verdict:
    return item.verdict or claims.judge_records(item)[0]


def _record(item: Claim, part: Part) -> records.Record:
    return records.find(item.slug, part.case, part.quantity)
