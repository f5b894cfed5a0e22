"""The footer of each page, and the page that opens first from a folder or a server."""

from __future__ import annotations

import html
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from sphinx.application import Sphinx

from labcore.book import runs

__all__ = ["add_foot", "build_line", "commit", "name_roles", "report_link", "write_index"]

TEMPLATES = Path(__file__).parent / "templates"
SHOWN = ("labcore", "torch", "triton", "jupyter-book")

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={target}">
<title>{title}</title>
</head>
<body><main><h1>{title}</h1><p><a href="{target}">Open the book</a></p></main></body>
</html>
"""


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit(folder: Path) -> str:
    """The short commit hash of the checkout at folder; "" without git.

    " + changes" is appended if there are uncommitted changes.
    """
    name = _git(folder, "rev-parse", "--short", "HEAD")
    if not name:
        return ""
    return f"{name} + changes" if _git(folder, "status", "--porcelain") else name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_line(folder: Path) -> str:
    """What the pages were made from: the commit, if known, and the relevant versions."""
    name = commit(folder)
    parts = [f"commit {name}" if name else "commit unknown"]
    parts += [f"{package} {found}" for package in SHOWN if (found := _version(package))]
    return " · ".join(parts)


def report_link(address: str, pagename: str, build: str) -> str | None:
    """The link for reporting an error on this page, prefilled; None without an address."""
    if not address:
        return None
    title = quote(f"Error on the page {pagename}", safe="")
    body = quote(f"Page: {pagename}\nBuilt from: {build}\n\nWhat is wrong:\n", safe="")
    if "gitlab" in (urlsplit(address).hostname or ""):
        return f"{address}/-/issues/new?issue[title]={title}&issue[description]={body}"
    return f"{address}/issues/new?title={title}&body={body}"


def add_foot(
    app: Sphinx, pagename: str, _template: str, context: dict[str, Any], _doctree: Any
) -> None:
    """Sets what the template `labcore-foot.html` shows."""
    build = app.config.labcore_build
    context["labcore_foot"] = {
        "build": build,
        "run": runs.run_line(app.env, pagename),
        "report": report_link(app.config.html_theme_options["repository_url"], pagename, build),
        "copyright": app.config.copyright,
        "author": app.config.author,
    }


def name_roles(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any
) -> None:
    """Fixes what docutils and the theme get wrong for screen readers.

    Entries in the list of references become list items, and the sidebar's expand buttons get a
    name.
    """
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')
    plain = context.get("generate_toctree_html")
    if plain is None:
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        for mark in made.find_all("summary") if hasattr(made, "find_all") else ():
            mark["aria-label"] = "Pages below this one"
        return made

    context["generate_toctree_html"] = named


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Writes the top-level `index.html`, which redirects to the book's first page."""
    root = app.config.root_doc
    if exception is not None or app.builder.format != "html" or root == "index":
        return
    text = INDEX.format(
        target=html.escape(f"{root}.html"), title=html.escape(app.config.html_title)
    )
    (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")
