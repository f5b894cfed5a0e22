"""A reader's copies of labs under `my/`, beside those of the chapters of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from labcore.course import copies
from labcore.course.build import BookBuild
from tests.labs import mini

CHAPTER, LAB = "book/mini.ipynb", "labs/release/mini/mini.ipynb"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A chapter and a lab of one name, and what else may lie beside the lab."""
    root = mini.checkout(tmp_path)
    release = mini.released(root)
    mini.save({"cells": [mini.code("a", "1")], "metadata": {}}, root / CHAPTER)
    mini.save(release, root / "labs" / "release" / "mini" / "mini.edited-1.ipynb")
    return root


def test_only_chapter_and_release_can_be_copied(checkout: Path) -> None:
    assert list(copies.chapters(checkout)) == [CHAPTER, LAB]
    with pytest.raises(ValueError, match="choose one of"):
        copies.create(checkout, "labs/source/mini/mini.ipynb")


def test_a_lab_and_its_chapter_have_copies_of_their_own(checkout: Path) -> None:
    names = [copies.create(checkout, name).name for name in (LAB, CHAPTER, LAB, CHAPTER)]
    assert names == ["mini-lab.ipynb", "mini.ipynb", "mini-lab.ipynb", "mini.ipynb"]
    assert copies.create(checkout, LAB, fresh=True).name == "mini-lab-2.ipynb"
    assert copies.create(checkout, CHAPTER, fresh=True).name == "mini-2.ipynb"
    for name, newest in ((LAB, "mini-lab-2.ipynb"), (CHAPTER, "mini-2.ipynb")):
        found = copies.newest(checkout, name)
        assert found is not None and (found.path.name, found.changed) == (newest, False)


def test_a_copy_knows_when_its_lab_changed_and_can_be_compared(checkout: Path) -> None:
    copies.create(checkout, LAB)
    mini.cell(notebook := mini.mini_lab(), "more")["source"] = "secret_two = 3"
    mini.save(notebook, mini.source_path(checkout))
    mini.released(checkout)
    found = copies.newest(checkout, LAB)
    assert found is not None and found.changed
    assert "secret_two = 3" in copies.differences(checkout, LAB)


def test_a_new_release_is_a_reason_to_build_the_book_again(checkout: Path) -> None:
    build = BookBuild(checkout)
    before = build.sources()
    assert build.sources() == before
    release = checkout / LAB
    release.write_text(release.read_text("utf-8") + "\n", "utf-8")
    assert build.sources() != before
