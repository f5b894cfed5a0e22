"""The form of a chapter's and a lab's page: title, header from the metadata, folded code."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from labcore.course.address import parse_address
from labcore.labs.source import TIERS, LabMetadata, parse_lab_metadata

__all__ = [
    "ChapterMetadata",
    "collect",
    "drop_marks",
    "insert_header",
    "join_folds",
    "parse_metadata",
    "split_title",
]

logger = logging.getLogger(__name__)

# progress.js fills and shows it once a guess was made or a question answered.
PROGRESS = (
    '<p class="labcore-progress" hidden><span role="status"></span> '
    "<button>Clear on this machine</button></p>"
)
FORM = {"objectives": list, "prerequisites": list, "minutes": int, "tier": str, "slug": str}


@dataclass(frozen=True, kw_only=True)
class ChapterMetadata:
    """`metadata.labcore` of a chapter's notebook.

    objectives: what a reader can do afterwards. prerequisites: what a reader needs to know; the
    name of another page of the book becomes a link. minutes: reading and running time. tier: a key
    of TIERS. slug: the chapter's name everywhere.
    """

    objectives: tuple[str, ...]
    prerequisites: tuple[str, ...]
    minutes: int
    tier: str
    slug: str


def parse_metadata(notebook: dict[str, Any]) -> ChapterMetadata:
    """The chapter's metadata from a notebook's JSON. Raises ValueError if it is invalid."""
    found = notebook.get("metadata", {}).get("labcore")
    if not isinstance(found, dict):
        raise ValueError(f"metadata.labcore is missing; add it with {', '.join(FORM)}")
    if missing := FORM.keys() - found.keys():
        raise ValueError(f"metadata.labcore is incomplete; add {', '.join(sorted(missing))}")
    if unknown := found.keys() - FORM.keys():
        raise ValueError(
            f"metadata.labcore must not have {', '.join(sorted(unknown))}; "
            f"a chapter has the keys {', '.join(FORM)}"
        )
    for key, kind in FORM.items():
        if not isinstance(found[key], kind) or isinstance(found[key], bool):
            raise ValueError(
                f"metadata.labcore.{key} must be of type {kind.__name__}, got {found[key]!r}"
            )
    for key in ("objectives", "prerequisites"):
        if not all(isinstance(line, str) and line.strip() for line in found[key]):
            raise ValueError(f"metadata.labcore.{key} must hold lines of text, got {found[key]!r}")
    if not found["objectives"]:
        raise ValueError(
            "metadata.labcore.objectives is empty; say what a reader can do afterwards"
        )
    if found["minutes"] < 1:
        raise ValueError(f"metadata.labcore.minutes must be at least 1, got {found['minutes']}")
    if found["tier"] not in TIERS:
        raise ValueError(
            f"metadata.labcore.tier must be one of {', '.join(TIERS)}, got {found['tier']!r}"
        )
    return ChapterMetadata(
        objectives=tuple(found["objectives"]),
        prerequisites=tuple(found["prerequisites"]),
        minutes=found["minutes"],
        tier=found["tier"],
        slug=found["slug"],
    )


def _parse(notebook: dict[str, Any]) -> ChapterMetadata | LabMetadata:
    found = notebook.get("metadata", {}).get("labcore")
    lab = isinstance(found, dict) and "kind" in found
    return parse_lab_metadata(notebook) if lab else parse_metadata(notebook)


def collect(app: Sphinx, _doctree: nodes.document) -> None:
    """Stores a notebook's checked metadata with its page; warns if it is invalid."""
    name = app.env.docname
    path = Path(app.env.doc2path(name))
    if path.suffix != ".ipynb":
        return
    page = app.env.metadata[name]
    page.pop("labcore", None)
    try:
        metadata = _parse(json.loads(path.read_text(encoding="utf-8")))
        if metadata.slug != path.stem:
            raise ValueError(
                f"metadata.labcore.slug must be the file's name, {path.stem!r}, "
                f"got {metadata.slug!r}"
            )
        page["labcore_page"] = metadata
    except ValueError as error:
        logger.warning("%s", error, location=name, type="labcore", subtype="metadata")


def drop_marks(_app: Sphinx, doctree: nodes.document) -> None:
    """Removes nbval's mark, which says nothing to a reader, from the code of a notebook's page."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext().removeprefix("# NBVAL_CHECK_OUTPUT\n")
        if text != block.astext():
            block.rawsource = text
            block[:] = [nodes.Text(text)]


def _parts(cell: nodes.Node) -> dict[str, nodes.Element]:
    """Source and output of a code cell that the page folds; nothing for other nodes."""
    folded = isinstance(cell, nodes.container) and cell.get("hide_mode") == "input"
    return {part["nb_element"]: part for part in cell.children} if folded else {}


def join_folds(_app: Sphinx, doctree: nodes.document) -> None:
    """Puts the code of a folded cell without an output above the code of a folded next cell."""
    for cell in list(doctree.findall(nodes.container)):
        own = _parts(cell)
        above = _parts(cell.next_node(descend=False, siblings=True) or doctree)
        if own.keys() == {"cell_code_source"} and "cell_code_source" in above:
            own["cell_code_source"].extend(above["cell_code_source"].children)
            above["cell_code_source"][:] = own["cell_code_source"].children
            cell.parent.remove(cell)


def split_title(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Makes what follows the colon in the title of a page of the book its subtitle."""
    title = next(iter(doctree.findall(nodes.title)), None)
    if title is None or app.builder.format != "html" or not docname.startswith("book/"):
        return
    subject, colon, rest = title.astext().partition(": ")
    if colon:
        title[:] = [
            nodes.Text(subject),
            nodes.inline("", colon, classes=["labcore-colon"]),
            nodes.inline("", rest[:1].upper() + rest[1:], classes=["labcore-subtitle"]),
        ]


def _inline(text: str) -> str:
    """One line of plain text as HTML; text in backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _page_link(app: Sphinx, docname: str, target: str) -> str | None:
    """A link with the title of another page; None if there is no such page."""
    if target not in app.env.titles:
        return None
    href = app.builder.get_relative_uri(docname, target)
    return f'<a href="{html.escape(href)}">{html.escape(app.env.titles[target].astext())}</a>'


def _prerequisite(app: Sphinx, docname: str, text: str) -> str:
    target = f"{docname.rpartition('/')[0]}/{text}".lstrip("/")
    return _page_link(app, docname, target) or _inline(text)


def _links(app: Sphinx, docname: str, source: str) -> list[str]:
    """Ways to open the notebook: always the file, and launchers if the address is set."""
    up = "../" * docname.count("/")
    links = [f'<a href="{up}_sources/{source}" download>Download the notebook</a>']
    options = app.config.html_theme_options
    address, buttons = parse_address(options["repository_url"]), options["launch_buttons"]
    branch = options.get("repository_branch") or "main"
    if address.startswith("https://github.com/"):
        owner_name = address.removeprefix("https://github.com/")
        if colab := buttons.get("colab_url"):
            href = f"{colab}/github/{owner_name}/blob/{branch}/{source}"
            links.append(f'<a href="{html.escape(href)}">Open in Colab</a>')
        if binder := buttons.get("binderhub_url"):
            href = f"{binder}/v2/gh/{owner_name}/{branch}?urlpath=lab/tree/{source}"
            links.append(f'<a href="{html.escape(href)}">Open in Binder</a>')
    return links


def _about_chapter(app: Sphinx, docname: str, metadata: ChapterMetadata) -> str:
    objectives = "".join(f"<li>{_inline(line)}</li>" for line in metadata.objectives)
    before = ", ".join(_prerequisite(app, docname, text) for text in metadata.prerequisites)
    needs = f"<p>Prerequisites: {before}</p>" if before else ""
    return (
        "<details><summary>What you will be able to do, and what you need</summary>"
        f"<ul>{objectives}</ul>{needs}</details>"
    )


def _about_lab(app: Sphinx, docname: str, metadata: LabMetadata) -> str:
    chapter = _page_link(app, docname, f"book/{metadata.slug}")
    clinics = _page_link(app, docname, "book/clinics")
    lab = f"The lab for the chapter {chapter}. " if chapter else ""
    drawn = f"; the clinic's curves are also on the page {clinics}" if clinics else ""
    return f"<p>{lab}Its figures appear when you run it{drawn}.</p>"


def header(app: Sphinx, docname: str, metadata: ChapterMetadata | LabMetadata) -> str:
    """The HTML below the title of a chapter or a lab.

    The local server puts its button "Run this page" in `#labcore-run`, which otherwise stays
    hidden.
    """
    source = f"{docname}.ipynb"
    facts = [f"{metadata.minutes} minutes", TIERS[metadata.tier]]
    if isinstance(metadata, LabMetadata):
        facts.insert(1, f"{metadata.points:g} points")
        about, progress, slug = _about_lab(app, docname, metadata), "", ""
    else:
        about, progress = _about_chapter(app, docname, metadata), PROGRESS
        slug = f' data-slug="{metadata.slug}"'
    links = "".join(f"<li>{link}</li>" for link in _links(app, docname, source))
    return (
        f'<div class="labcore-chapter"{slug}>'
        f'<p class="labcore-facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</p>'
        f"{about}{progress}"
        f'<div id="labcore-run" hidden data-notebook="{html.escape(source)}"></div>'
        f'<ul class="labcore-links">{links}</ul></div>'
    )


def insert_header(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Puts the header below the title of a chapter's or a lab's page."""
    metadata = app.env.metadata[docname].get("labcore_page")
    title = next(iter(doctree.findall(nodes.title)), None)
    if metadata is None or title is None or app.builder.format != "html":
        return
    section = title.parent
    raw = nodes.raw("", header(app, docname, metadata), format="html")
    section.insert(section.index(title) + 1, raw)
