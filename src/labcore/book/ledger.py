"""The directive `claims-ledger`: a table of every claim in claims.toml with its verdict."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from labcore import claims
from labcore.claims import Claim

__all__ = ["ClaimsLedger"]

# Heading and width, in hundredths, of each column.
COLUMNS = {"Claim": 36, "Chapter": 10, "Evidence": 22, "Measured": 20, "Verdict": 12}


class ClaimsLedger(SphinxDirective):
    """Renders claims.toml; a change to that file makes Sphinx read the page again."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """The table, or a sentence if there are no claims."""
        self.env.note_dependency(str(claims.FILE))
        found = claims.load()
        if not found:
            return [nodes.paragraph(text="No claim has been stated yet.")]
        group = nodes.tgroup("", cols=len(COLUMNS))
        group += [nodes.colspec("", colwidth=width) for width in COLUMNS.values()]
        heading = nodes.row("", *[nodes.entry("", nodes.paragraph(text=name)) for name in COLUMNS])
        rows = [self._row(item) for item in found.values()]
        group += [nodes.thead("", heading), nodes.tbody("", *rows)]
        return [nodes.table("", group, classes=["labcore-ledger"])]

    def _row(self, item: Claim) -> nodes.row:
        statement = nodes.entry(ids=[f"claim-{nodes.make_id(item.id)}"])
        statement += self._markdown(item.statement)
        verdict = item.verdict or "not judged yet"
        badge = nodes.inline(
            text=verdict, classes=["labcore-verdict", f"verdict-{nodes.make_id(verdict)}"]
        )
        cells = (
            statement,
            nodes.entry("", nodes.paragraph("", "", self._chapter(item.slug))),
            nodes.entry("", *self._evidence(item)),
            nodes.entry("", *self._measured(item)),
            nodes.entry("", nodes.paragraph("", "", badge)),
        )
        return nodes.row("", *cells)

    def _markdown(self, text: str) -> list[nodes.Node]:
        holder = nodes.Element()
        self.state.nested_parse(StringList([text], source=str(claims.FILE)), 0, holder)
        return list(holder.children)

    def _chapter(self, slug: str) -> nodes.Node:
        if f"book/{slug}" not in self.env.found_docs:
            return nodes.Text(slug)
        return addnodes.pending_xref(
            "",
            nodes.inline(text=slug, classes=["doc"]),
            refdoc=self.env.docname,
            refdomain="std",
            reftype="doc",
            reftarget=f"/book/{slug}",
            refexplicit=True,
            refwarn=True,
        )

    def _evidence(self, item: Claim) -> list[nodes.Node]:
        if not item.evidence:
            return self._markdown(item.note)
        lines: list[nodes.Node] = [nodes.paragraph(text=item.quantity)]
        for piece in item.evidence:
            rule = f"{piece.case} · {piece.quantity}: holds when {piece.rule}"
            lines.append(nodes.paragraph(text=rule, classes=["labcore-small"]))
        return lines + (self._markdown(item.note) if item.note else [])

    def _measured(self, item: Claim) -> list[nodes.Node]:
        numbers = item.measured.split("; ") if item.measured else ["–"]
        lines: list[nodes.Node] = [nodes.paragraph(text=number) for number in numbers]
        if item.hardware:
            lines.append(nodes.paragraph(text=item.hardware, classes=["labcore-small"]))
        return lines
