"""recorded(): a recorded measurement with its interval, its peers and its provenance."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from labcore import records
from labcore.claims import Measured, Scale
from labcore.records import Record
from labcore.ui import intervals
from labcore.ui.hosts import style
from labcore.ui.intervals import Row

__all__ = ["Recorded", "recorded"]


def recorded(
    slug: str,
    case: str,
    quantities: str | Iterable[str] | Mapping[str, str],
    *,
    ours: str = "labcore",
    names: Mapping[str, str] | None = None,
    peers: bool = True,
    unit: str | None = None,
    scale: Scale = "linear",
) -> Recorded:
    """Show what a benchmark recorded: a row per quantity and per peer, on one axis.

    quantities: one quantity, several, or what to call each: {name: quantity}. ours: the name of our
    own number where peers stand beside it. names: other names for quantities and peers; "" leaves
    one out. peers: whether to show them. unit: in words, in place of the record's own. scale: "log"
    for ratios, as in `Measured.of`.
    Raises KeyError for what has no record, and ValueError if the units differ.
    """
    wanted = [quantities] if isinstance(quantities, str) else quantities
    named = dict(wanted) if isinstance(wanted, Mapping) else {one: one for one in wanted}
    found = {name: records.find(slug, case, quantity) for name, quantity in named.items()}
    return Recorded(found, ours=ours, names=names or {}, peers=peers, unit=unit, scale=scale)


class Recorded:
    """The result of `recorded`; end a cell with it to display it. rows: what it shows."""

    def __init__(
        self,
        found: Mapping[str, Record],
        *,
        ours: str,
        names: Mapping[str, str],
        peers: bool,
        unit: str | None,
        scale: Scale,
    ) -> None:
        units = {record.unit for record in found.values()}
        if len(units) != 1:
            raise ValueError(f"quantities must share one unit, got {sorted(units)}")
        self.unit = units.pop() if unit is None else unit
        self.records = tuple(found.values())
        self.rows: list[Row] = []
        for name, record in found.items():
            others = record.peers if peers else {}
            called = names.get(name, name)
            own = ours if others and len(found) == 1 else f"{called}, {ours}" if others else called
            if called:
                self.rows.append(Row(name=own, measured=Measured.recorded(record, scale=scale)))
            self.rows += [
                Row(
                    name=shown if len(found) == 1 else f"{called}, {shown}",
                    measured=Measured.of(samples, scale=scale),
                    kind="predicted" if peer == "predicted" else "peer",
                )
                for peer, samples in others.items()
                if (shown := names.get(peer, peer))
            ]

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        note = provenance(*self.records)
        markup = (
            f'<div class="labcore-html labcore-recorded">{style()}'
            f"{intervals.drawn(self.rows, unit=self.unit)}"
            f"<p><small>{html.escape(note)}</small></p></div>"
        )
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{row.name:{width}}  {intervals.in_words(row.measured, self.unit)}"
            for row in self.rows
        ]
        return {"text/html": markup, "text/plain": "\n".join([*lines, note])}


def provenance(*found: Record) -> str:
    """Say in a sentence where and when records were measured, and if the code has changed since."""
    text = f"{records.provenance(*found)}."
    return text[:1].upper() + text[1:]
