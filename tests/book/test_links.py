"""Which words of a page become links to the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docutils.core import publish_doctree

from labcore.book.links import Term, first_uses

BOOK = Path(__file__).parents[2] / "book"
NAMES = (
    "batch",
    "batch size",
    "activations",
    "policy",
    "Little's law",
    "ZeRO",
    "LDS",
    "all-reduce",
)


def linked(text: str) -> list[str]:
    """Each link as "term: the page's words", from reStructuredText."""
    terms = [Term(name, "", "glossary", name) for name in NAMES]
    return [
        f"{term.name}: {words[start:end]}"
        for words, found in first_uses(publish_doctree(text), terms)
        for start, end, term in found
    ]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("A batch, then a batch.", ["batch: batch"]),
        ("Batch\nsizes of a *batch*.", ["batch size: Batch\nsizes", "batch: batch"]),
        ("One activation. Two policies.", ["activations: activation", "policy: policies"]),
        ("**All-reduces**", ["all-reduce: All-reduces"]),
        ("By Little’s law.", ["Little's law: Little’s law"]),
        ("zero, Zero and ZEROS, lds and little's law", []),
        ("minibatch, batches2, batch-wise, pre-batch", []),
        ("Batch\n=====\n\n| batch\n\n::\n\n  batch\n\n``batch`` and `batch <a.html>`__", []),
        ("=====  =====\nbatch  batch\n=====  =====", []),
        ("ZeRO stages.\n\n- LDS of ZeRO", ["ZeRO: ZeRO", "LDS: LDS"]),
    ],
)  # fmt: skip
def test_the_first_use_in_prose_is_linked(text: str, links: list[str]) -> None:
    assert linked(text) == links


def test_a_word_with_two_senses_is_linked_where_it_has_this_one() -> None:
    inside = Term("block", "", "", "", ("inflight",), excluded=False)
    outside = Term("claim", "", "", "", ("hip",), excluded=True)
    assert [one.meant_in(slug) for one in (inside, outside) for slug in ("inflight", "hip")] == [
        True, False, True, False,
    ]  # fmt: skip
    assert Term("batch", "", "", "").meant_in("hip")


def test_the_glossary_names_chapters_that_exist() -> None:
    text = (BOOK / "glossary.md").read_text(encoding="utf-8")
    marks = re.findall(r"^\S.* : (?:not )?(.+)$", text, re.MULTILINE)
    slugs = {slug for mark in marks for slug in mark.split(", ")}
    assert slugs and slugs <= {path.stem for path in BOOK.glob("*.ipynb")}
