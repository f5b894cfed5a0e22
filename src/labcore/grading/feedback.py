"""nbgrader's feedback page, made readable offline and safe to open.

Whatever a student wrote, the page loads nothing and runs no script: its Content-Security-Policy
forbids both. Formulas and figures, which would need a script, become text.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from labcore.labs.first_cell import is_first_cell
from labcore.labs.source import cell_text, nbgrader_of, sections

__all__ = ["PAGE_HEAD", "finish", "make_readable", "titles"]

FIGURE = "[A figure, which this page cannot show. Run the cell to see it.]"
# MIME type prefixes of outputs that only a script can draw.
DRAWN = ("application/vnd.", "application/javascript", "application/geo")
PAGE_HEAD = (
    '<meta charset="utf-8">\n'
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'\">\n"
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
)
STYLE = """<style>
div.output_area pre, div.output pre, div.input_area pre {
  white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal;
}
div.nbgrader_cell .panel-heading { height: auto; overflow: hidden; }
div.prompt { min-width: 0; }
a.anchor-link { display: none; }
.rendered_html, .panel-heading { overflow-wrap: anywhere; }
@media (max-width: 600px) {
  .container, .panel-body, div#notebook-container { padding-left: 6px; padding-right: 6px; }
}
</style>
"""
# nbgrader's template loads MathJax from another site, and its style a font that does not exist.
FETCHED = re.compile(r"<script\b.*?</script\s*>|@font-face\s*{[^}]*}", re.DOTALL | re.IGNORECASE)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)", re.DOTALL)
# nbgrader's page shows most tags as text, also the tbody that a parser adds to each table.
TABLE = re.compile(r"<(?:table|p)\b", re.IGNORECASE)
FENCED = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r'(<a href="#comment-([^"]*)">Comment)(</a>)')
COMMAND = re.compile(r"\\([A-Za-z]+|.)")
SIGNS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε",
    "eta": "η", "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "omega": "ω", "Delta": "Δ", "Sigma": "Σ",
    "cdot": "·", "times": "×", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠",
    "approx": "≈", "sqrt": "√", "infty": "∞", "pm": "±", "to": "→", "in": "∈", "sum": "Σ",
    "left": "", "right": "", "operatorname": "", "mathrm": "", "text": "", "mathbf": "",
    ",": " ", ";": " ", ":": " ", "!": "", " ": " ", "\\": " ",
}  # fmt: skip


def titles(release: Mapping[str, Any]) -> dict[str, str]:
    """The name that a student knows each graded cell by, by grade_id: the heading above it."""
    cells = release["cells"]
    found = {
        str(nbgrader_of(cell)["grade_id"]): section
        for cell, section in zip(cells, sections(cells), strict=True)
        if nbgrader_of(cell).get("grade")
    }
    times = Counter(found.values())
    return {
        name: f"{section} ({name})" if section and times[section] > 1 else section or name
        for name, section in found.items()
    }


def _formula(tex: str) -> str:
    """TeX as one line of text: Greek letters and symbols, with braces as parentheses."""
    text = re.sub(r"\\frac\s*{([^{}]*)}\s*{([^{}]*)}", r"(\1)/(\2)", tex)
    text = re.sub(r"\\(?:operatorname|mathrm|mathbf|text)\s*{([^{}]*)}", r"\1", text)
    text = re.sub(r"{([^{}])}", r"\1", text)
    text = COMMAND.sub(lambda found: SIGNS.get(found[1], found[1]), text)
    return " ".join(text.replace("{", "(").replace("}", ")").replace("`", "'").split())


def _markdown(text: str, known: bool) -> str:
    """A Markdown cell with its formulas as text; `known` keeps the HTML of the release's cells."""
    parts = FENCED.split(text)
    for place in range(0, len(parts), 2):  # odd parts are code
        part = FORMULA.sub(lambda found: f"`{_formula(found[1] or found[2])}`", parts[place])
        parts[place] = part if known else re.sub(r"<(?=[A-Za-z/!?])", "&lt;", part)
    return "".join(parts)


def _shown(data: Mapping[str, Any]) -> dict[str, Any]:
    """The representations of an output that a page without scripts can show."""
    if any(kind.startswith(DRAWN) for kind in data):
        return {"text/plain": FIGURE}
    shown = dict(data)
    plain = "".join(shown.get("text/plain", "<"))
    if TABLE.search("".join(shown.get("text/html", ""))) and not plain.startswith("<"):
        del shown["text/html"]
    if "text/markdown" in shown and "text/html" not in shown:
        # The page's sanitizer would show HTML tags in the Markdown as text.
        prose = shown.pop("text/markdown")
        if plain.startswith("<"):
            shown["text/plain"] = prose
    return shown


def make_readable(notebook: dict[str, Any], release: Mapping[str, Any]) -> None:
    """Rewrites a graded notebook's prose and outputs, in place, as its page can show them.

    The cell that installs labcore goes: it says nothing about the answers.
    """
    notebook["cells"] = [c for c in notebook["cells"] if not is_first_cell(cell_text(c))]
    known = {cell_text(cell) for cell in release["cells"]}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = cell_text(cell)
            cell["source"] = _markdown(text, text in known)
        for output in cell.get("outputs", ()):
            if "data" in output:
                output["data"] = _shown(output["data"])


def finish(page: str, exercises: Mapping[str, str]) -> str:
    """nbgrader's page with wrapped lines and named exercises, and without scripts.

    exercises: titles by grade_id.
    """
    page = FETCHED.sub("", page)
    for name, title in exercises.items():
        link = f'<a href="#{html.escape(name)}">'
        page = page.replace(f"{link}Test cell</a>", f"{link}{html.escape(title)}</a>")
    page = COMMENT.sub(r"\1 on \2\3", page)
    page = page.replace("<html>", '<html lang="en">', 1)
    page = page.replace("<head>", f"<head>\n{PAGE_HEAD}", 1)
    return page.replace("</head>", f"{STYLE}</head>", 1)
