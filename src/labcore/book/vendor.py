"""Serves what pages load from installed packages, and only on pages that use it."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

__all__ = ["copy_mathjax", "drop_widget_state", "mathjax_files", "trim_markup", "trim_scripts"]

# MathJax's script, its on-demand TeX files and its fonts: 2 MB of the wheel's 34 MB.
MATHJAX_PARTS = ("tex-chtml.js", "input/tex", "output/chtml/fonts/woff-v2")


def mathjax_files() -> dict[str, Path]:
    """The MathJax files that the pages need: path under `_static/mathjax` -> installed file."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "sphinx-mathjax-offline is not installed; run pip install 'labcore[book]'"
        )
    root = Path(next(iter(spec.submodule_search_locations))) / "static" / "mathjax"
    found = {}
    for part in MATHJAX_PARTS:
        path = root / part
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise RuntimeError(
                f"sphinx-mathjax-offline has no {part}; install the version in constraints.txt"
            )
        found.update({file.relative_to(root).as_posix(): file for file in files})
    return found


def copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    """Copies MathJax to `_static`; only pages with mathematics load it."""
    if exception is not None or app.builder.format != "html":
        return
    for name, source in mathjax_files().items():
        target = Path(app.outdir) / "_static" / "mathjax" / name
        if not target.exists() or target.stat().st_size != source.stat().st_size:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def drop_widget_state(app: Sphinx, _doctree: nodes.document) -> None:
    """Drops the state of live widgets (5 MB with a figure), which a static page does not use."""
    data = getattr(app.env, "nb_metadata", {}).get(app.env.docname, {})
    data.get("js_files", {}).pop("ipywidgets_state", None)


# Names, punctuation and spaces of code have the color of its text: a third of a chapter's weight.
PLAIN_CODE = re.compile(r'<span class="(?:n|p|w)">([^<]*)</span>')


def trim_markup(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any
) -> None:
    """Drops markup that no style of the book uses."""
    if "body" in context:
        body = context["body"].replace(" docutils container", " container")
        context["body"] = PLAIN_CODE.sub(r"\1", body)


def trim_scripts(
    app: Sphinx, pagename: str, _template: str, context: dict[str, Any], _doctree: Any
) -> None:
    """Keeps each script of a page once, and MathJax only if the page itself has mathematics.

    Sphinx also loads it on pages that merely link to pages with mathematics.
    """
    mathematics = app.env.domaindata["math"]["has_equations"].get(pagename, False)
    seen, kept = set(), []
    for script in context.get("script_files", []):
        name = str(getattr(script, "filename", script) or "")
        body = getattr(script, "attributes", {}).get("body") or ""
        is_mathjax = "mathjax" in name or body.startswith("window.MathJax")
        if (name, body) not in seen and (mathematics or not is_mathjax):
            seen.add((name, body))
            kept.append(script)
    context["script_files"] = kept
