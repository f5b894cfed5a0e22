"""Renders docstrings on the API page; they are plain text with `code`, not reStructuredText."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

__all__ = ["find_at_face", "to_rst", "translate"]

CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
# "lr: …", "state_dtype, eps: …", "Source: …" and "Raises ValueError …" each begin a paragraph.
STARTS = re.compile(r"(?P<names>\w+(?:, \w+){0,5}: )|(?P<verb>(?:Raises|Returns|Source|Args)\b)")
BULLET = re.compile(r"[-*] ")


def _escape(text: str) -> str:
    return re.sub(r"([\\*_|`<>])", r"\\\1", text)


def _inline(text: str) -> str:
    """Text with `code` as reStructuredText that renders exactly as written."""
    out, end = [], 0
    for match in CODE.finditer(text):
        out.append(_escape(text[end : match.start()]))
        # Escaped spaces separate markup from adjacent letters, as in `f`s.
        out.append(rf"\ ``{match[2].strip()}``\ ")
        end = match.end()
    return "".join(out) + _escape(text[end:])


def _blocks(lines: list[str]) -> list[list[str]]:
    """Groups of lines: paragraphs, list items, indented code."""
    blocks: list[list[str]] = []
    fresh = True
    for line in lines:
        if not line.strip():
            fresh = True
            continue
        indented = line.startswith((" ", "\t"))
        follows = blocks and not fresh
        if follows and indented:
            blocks[-1].append(line)
        elif fresh and indented and blocks and blocks[-1][0].startswith(" "):
            blocks[-1] += ["", line]
        elif follows and not STARTS.match(line) and not BULLET.match(line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
        fresh = False
    return blocks


def _named(text: str) -> str:
    """One entry, "lr: the learning rate": the names before the colon are code."""
    match = STARTS.match(text)
    if match is None or match["names"] is None or match["names"][0].isupper():
        return _inline(text)
    names = match["names"].removesuffix(": ").split(", ")
    return f"{', '.join(f'``{name}``' for name in names)}: {_inline(text[match.end() :])}"


def _entries(lines: list[str]) -> list[str]:
    """The lines below "Args:" as a list; a further indented line continues an entry."""
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    entries: list[str] = []
    for line in lines:
        if line[margin] == " " and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    return [f"- {_named(entry)}" for entry in entries]


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText.

    Text in backticks is code, "lr: …" begins an entry, lines below "Args:" form a list, and an
    indented block after an empty line is code. Everything else is literal text.
    """
    out: list[str] = []
    for block in _blocks(lines):
        first = block[0]
        if first.startswith((" ", "\t")):
            out += ["::", "", *[f"    {line}" if line else "" for line in block], ""]
        elif first.endswith(":") and len(block) > 1 and all(x.startswith(" ") for x in block[1:]):
            out += [_inline(first), "", *_entries(block[1:]), ""]
        elif bullet := BULLET.match(first):
            out += [f"- {_inline(' '.join(line.strip() for line in block)[bullet.end() :])}", ""]
        else:
            out += [*_named("\n".join(line.strip() for line in block)).splitlines(), ""]
    return out


def translate(
    _app: Sphinx, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Handles autodoc's event: replaces the docstring's lines in place."""
    lines[:] = to_rst(lines)


def _is_internal(target: str) -> bool:
    """Whether target names something in labcore that exists but is not public."""
    module, _, name = target.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return hasattr(found, name) and name not in getattr(found, "__all__", ())


def find_at_face(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Resolves a reference from a signature to a labcore type.

    A class that its package re-exports links to the package's entry. An internal class gets no
    link. Returns None, which causes a warning, for a name that does not exist.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("labcore."):
        return None
    resolve: Callable[..., nodes.reference | None] = env.domains["py"].resolve_xref
    parts = target.split(".")
    for end in range(len(parts) - 2, 0, -1):
        face = ".".join([*parts[:end], parts[-1]])
        if face in env.domains["py"].objects:
            return resolve(env, node["refdoc"], app.builder, node["reftype"], face, node, contnode)
    return contnode if _is_internal(target) else None
