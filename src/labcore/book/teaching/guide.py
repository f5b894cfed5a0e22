"""The teaching guide as a book of its own, `book/teaching`, beside the course's book.

Its pages are in `_build/html/teaching`, so that links between the two books are the same in a
folder and on a server. `python -m labcore.book.teaching.guide` builds it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import docname_join

from labcore.book import contents

__all__ = ["build", "find_in_other_book"]

FOLDER = "book/teaching"
PLACE = "teaching"  # its pages' folder among those of the course's book


def build(root: Path, out: Path, *, strict: bool) -> int:
    """Builds the guide of the checkout at root in `html/teaching` of out; returns an exit code.

    strict: whether a warning is an error. A checkout without the guide, as students get it, is
    left alone.
    """
    from jupyter_book.sphinx import build_sphinx

    source, toc = root / FOLDER, root / FOLDER / "_toc.yml"
    if not toc.is_file():
        return 0
    own = yaml.safe_load((source / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    more = {"external_toc_path": str(toc), "latex_individualpages": False, "nitpicky": strict}
    ended = build_sphinx(
        source,
        out / "html" / PLACE,
        doctreedir=out / ".doctrees-teaching",
        noconfig=True,
        path_config=root / "_config.yml",
        confoverrides=own | more,
        warningiserror=strict,
        keep_going=strict,
    )
    return 0 if ended == 0 else 1  # Sphinx's status, or an exception that it has printed


def find_in_other_book(
    app: Sphinx, _env: BuildEnvironment, node: pending_xref, words: nodes.TextElement
) -> nodes.Node | None:
    """Resolves `{doc}` from the guide to the course's book, or from there to the guide.

    In a checkout without the guide, its name gets no link. Returns None, which causes a warning,
    for a page that the other book does not have.
    """
    if node.get("reftype") != "doc":
        return None
    book, page = Path(app.srcdir), docname_join(node["refdoc"], node["reftarget"])
    if book.as_posix().endswith(f"/{FOLDER}"):
        other, way = book.parents[1], ".."
    elif page.startswith(f"{FOLDER}/"):
        other, way, page = book / FOLDER, PLACE, page.removeprefix(f"{FOLDER}/")
    else:
        return None
    if not (other / "_toc.yml").is_file():
        return words
    if all(page != name for part in contents.parts(other) for name, _ in part.pages):
        return None
    up = "../" * node["refdoc"].count("/")
    return nodes.reference("", "", words, refuri=f"{up}{way}/{page}.html", internal=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="build the teaching guide of the checkout here")
    options.add_argument("--out", type=Path, default=Path("_build"))
    options.add_argument("-W", dest="strict", action="store_true", help="warnings are errors")
    asked = options.parse_args()
    sys.exit(build(Path.cwd(), asked.out.absolute(), strict=asked.strict))
