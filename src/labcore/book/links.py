"""Links terms of the chapters to the glossary, and the glossary and the references back to them.

What such a link leads to shows on hover. `_static/tips.js` holds it, because a page opened from a
folder may not fetch data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes
from pybtex.plugin import find_plugin  # type: ignore[import-untyped]
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from labcore.book.chapter import ChapterMetadata

__all__ = ["Term", "first_uses", "setup", "terms_of"]

SCRIPT = "tips.js"
ASSETS = Path(__file__).parent / "assets"
LINKED = (nodes.reference, addnodes.pending_xref)
APART = (nodes.entry, nodes.footnote, addnodes.glossary)


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the glossary on the page `page`, at `anchor`.

    marked: slugs of chapters, the only ones whose prose means this by the word or, with `excluded`,
    the only ones whose prose does not.
    """

    name: str
    definition: str
    page: str
    anchor: str
    marked: tuple[str, ...] = ()
    excluded: bool = True

    @property
    def use(self) -> str:
        """The id of the link in a chapter."""
        return self.anchor.replace("term-", "use-", 1)

    def meant_in(self, slug: str) -> bool:
        """Whether the prose of a chapter means this by the word."""
        return (slug in self.marked) != self.excluded


@dataclass(frozen=True, slots=True)
class Links:
    """The terms, where they and the references are used, and what shows of them.

    uses: (page, anchor) of a term or a reference -> (page, anchor) of each page's first use.
    tips: texts by the last part of a link's address.
    """

    terms: tuple[Term, ...]
    uses: dict[tuple[str, str], list[tuple[str, str]]]
    tips: dict[str, str]


def terms_of(doctree: nodes.document, page: str) -> Iterator[Term]:
    """The terms of the glossary on a page, each with the slugs after its colon."""
    for item in doctree.findall(nodes.definition_list_item):
        definition = item[-1].deepcopy()
        for formula in list(definition.findall(nodes.math)):
            formula.replace_self(nodes.Text(rf"\({formula.astext()}\)"))
        for term in item.findall(nodes.term):
            for index in term.findall(addnodes.index):
                # Sphinx keeps what stands after " : " as a key of its index.
                mark = index["entries"][0][4] or "not"
                yield Term(
                    name=term.astext().replace("’", "'"),
                    definition=" ".join(definition.astext().split()),
                    page=page,
                    anchor=term["ids"][0],
                    marked=tuple(re.findall(r"\w+", mark.removeprefix("not"))),
                    excluded=mark.startswith("not"),
                )


def _pattern(name: str) -> str:
    """Matches a term in the singular and the plural; without capitals, also with them."""
    stem = re.sub(r"(?<=[a-z][^s])s$|y$", "", name)
    ends = "(?:y|ies)" if name.endswith("y") else "(?:s|es)?"
    words = r"\s+".join(map(re.escape, stem.split()))
    return f"(?i:{words}{ends})" if name.islower() else words + ends


def _prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    """The texts of paragraphs outside of links, tables and outputs; neighbors become one."""
    for paragraph in list(doctree.findall(nodes.paragraph)):
        above: Any = paragraph
        while above and not isinstance(above, APART) and "nb_element" not in above:
            above = above.parent
        if above:
            continue
        for part in list(paragraph.findall(nodes.TextElement)):
            runs = groupby(part.children, lambda child: isinstance(child, nodes.Text))
            part[:] = [
                child
                for is_text, run in runs
                for child in ([nodes.Text("".join(map(str, run)))] if is_text else run)
            ]
        for text in list(paragraph.findall(nodes.Text)):
            inner = text.parent
            if inner is paragraph or (
                isinstance(inner, nodes.emphasis | nodes.strong)
                and not isinstance(inner.parent, LINKED)
            ):
                yield text


def first_uses(
    doctree: nodes.document, terms: Iterable[Term]
) -> Iterator[tuple[nodes.Text, list[tuple[int, int, Term]]]]:
    """Each text of a page's prose that is the first to use a term: (from, to, term) in order."""
    left = {f"t{n}": term for n, term in enumerate(sorted(terms, key=lambda t: -len(t.name)))}
    words = "|".join(f"(?P<{group}>{_pattern(term.name)})" for group, term in left.items())
    anyone = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")
    for text in _prose(doctree):
        found = [
            (*match.span(), left.pop(str(match.lastgroup)))
            for match in anyone.finditer(text.replace("’", "'"))
            if match.lastgroup in left
        ]
        if found:
            yield text, found


def _chapters(env: BuildEnvironment) -> dict[str, str]:
    """Page -> slug of each chapter, in the book's order."""
    found = {page: env.metadata[page].get("labcore_page") for page in env.collect_relations()}
    return {page: one.slug for page, one in found.items() if isinstance(one, ChapterMetadata)}


def _found(app: Sphinx, env: BuildEnvironment) -> Links:
    objects = env.get_domain("std").objects.items()  # type: ignore[attr-defined]
    glossaries = sorted({page for (kind, _), (page, _) in objects if kind == "term"})
    terms = [term for page in glossaries for term in terms_of(env.get_doctree(page), page)]
    uses: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for page, slug in _chapters(env).items():
        meant = [term for term in terms if term.meant_in(slug)]
        for _, found in first_uses(env.get_doctree(page), meant):
            for _, _, term in found:
                uses.setdefault((term.page, term.anchor), []).append((page, term.use))
    tips = {(term.page, term.anchor): term.definition for term in terms}
    cite: Any = env.domains.get("cite")
    if cite:
        plain = find_plugin("pybtex.backends", "plaintext")()
        places = {}
        for one in cite.citations:
            place = places[one.key] = one.bibliography_key.docname, one.citation_id
            tips[place] = one.formatted_entry.text.render(plain).replace("\\url ", "")
        order = {page: number for number, page in enumerate(env.collect_relations())}
        for ref in sorted(cite.citation_refs, key=lambda ref: order.get(ref.docname, len(order))):
            for key in places.keys() & {target.key for target in ref.targets}:
                pages = uses.setdefault(places[key], [])
                if ref.docname not in dict(pages):
                    pages.append((ref.docname, ref.citation_ref_id))
    return Links(
        terms=tuple(terms),
        uses=uses,
        tips={
            f"{app.builder.get_target_uri(page).rpartition('/')[2]}#{anchor}": text
            for (page, anchor), text in tips.items()
        },
    )


def _find(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Finds all links when every page is read; returns the pages on which some have changed."""
    if app.builder.format != "html":
        return []
    old, new = getattr(env, "labcore_links", None), _found(app, env)
    env.labcore_links = new  # type: ignore[attr-defined]
    script = f"window.labcoreTips = {json.dumps(new.tips)};\n"
    target = Path(app.outdir) / "_static" / SCRIPT
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(script + (ASSETS / SCRIPT).read_text(encoding="utf-8"), encoding="utf-8")
    return [] if new == old else sorted({*_chapters(env), *(page for page, _ in new.uses)})


def _insert(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Puts the links into a page before it is written."""
    links = getattr(app.env, "labcore_links", None)
    if links is None:
        return

    def link(place: tuple[str, str], text: str, **attributes: Any) -> nodes.reference:
        uri = f"{app.builder.get_relative_uri(docname, place[0])}#{place[1]}"
        return nodes.reference("", text, internal=True, refuri=uri, **attributes)

    if slug := _chapters(app.env).get(docname):
        meant = [term for term in links.terms if term.meant_in(slug)]
        for text, found in list(first_uses(doctree, meant)):
            parts, done = [], 0
            for start, end, term in found:
                place, mark = (term.page, term.anchor), {"classes": ["labcore-term"]}
                one = link(place, text[start:end], ids=[term.use], **mark)
                parts += [nodes.Text(text[done:start]), one]
                done = end
            text.parent.replace(text, [*parts, nodes.Text(text[done:])])
    for node in list(doctree.findall()):
        if not isinstance(node, nodes.term | nodes.citation):
            continue
        places = [place for key in node["ids"] for place in links.uses.get((docname, key), ())]
        if places:
            shown = [link(place, app.env.titles[place[0]].astext()) for place in places]
            line = nodes.paragraph(classes=["labcore-used"])
            line += nodes.Text("Used in " if isinstance(node, nodes.term) else "Cited in ")
            for number, one in enumerate(shown):
                line += [nodes.Text(" · " if number else ""), one]
            (node.parent[-1] if isinstance(node, nodes.term) else node).append(line)


def _load_on_page(
    app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any
) -> None:
    """Adds the script to a page with a link that it can explain."""
    links = getattr(app.env, "labcore_links", None)
    if links and any(f'{key}"' in context.get("body", "") for key in links.tips):
        app.add_js_file(SCRIPT, loading_method="defer")


def setup(app: Sphinx) -> None:
    """Connects to Sphinx; labcore.book calls it."""
    # After sphinxcontrib.bibtex, which lists the references then.
    app.connect("env-updated", _find, priority=900)
    app.connect("doctree-resolved", _insert)
    app.connect("html-page-context", _load_on_page)
