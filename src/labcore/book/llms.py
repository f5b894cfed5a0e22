"""Writes the book for machines: each page as Markdown beside its HTML, and `llms.txt`, their list.

Folded cells are left out, and with them the answers to the questions. See https://llmstxt.org.
"""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx

from labcore.book import contents

__all__ = ["markdown", "write_markdown"]


def markdown(page: Path) -> str:
    """A page's source as Markdown: of a notebook its text and the code that its page shows."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    shown = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            shown.append(source)
        elif source and "hide-input" not in cell["metadata"].get("tags", []):
            shown.append(f"```python\n{source}\n```")
    return "\n\n".join(shown) + "\n"


def write_markdown(app: Sphinx, exception: Exception | None) -> None:
    """Writes the pages and their list once the HTML is there."""
    if exception is not None or app.builder.format != "html":
        return
    root, out = Path(app.srcdir), Path(app.outdir)
    if not (root / "_toc.yml").is_file():  # a book that is not the course's
        return
    lines = [f"# {app.config.project}", ""]
    for part in contents.parts(root):
        lines += ["", f"## {part.caption or 'Start'}", ""]
        for name, _ in part.pages:
            if name not in app.env.all_docs:  # only in a part of the book
                continue
            source = Path(app.env.doc2path(name))
            target = out / f"{name}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(markdown(source), encoding="utf-8")
            lines.append(f"- [{app.env.titles[name].astext()}]({name}.md)")
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
