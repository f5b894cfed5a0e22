"""What the server is made of: copies that are never overwritten, a build that may fail."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from labcore.course import copies, pages
from labcore.course.build import BookBuild, Progress
from tests.book_fixtures import ROOT
from tests.course.course_server import add_guide, make_checkout, notebook

CHAPTER = "book/lion.ipynb"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


@pytest.mark.parametrize("text", ["", "not a notebook", "[]", '{"cells": 3}', notebook("mine")])
def test_whatever_stands_at_the_copy_s_place_stays(root: Path, text: str) -> None:
    mine = root / "my" / "lion.ipynb"
    mine.parent.mkdir()
    mine.write_text(text, "utf-8")
    assert copies.create(root, CHAPTER) == mine
    fresh = copies.create(root, CHAPTER, fresh=True)
    assert fresh.name == "lion-2.ipynb"
    assert mine.read_text("utf-8") == text


def test_highest_numbered_copy_counts_and_new_copies_fill_gaps(root: Path) -> None:
    for name in ("lion.ipynb", "lion-3.ipynb", "lion-x.ipynb", "lioness.ipynb"):
        (root / "my").mkdir(exist_ok=True)
        (root / "my" / name).write_text(notebook("x = 1", "x + 1"), "utf-8")
    newest = copies.newest(root, CHAPTER)
    assert newest is not None and newest.path.name == "lion-3.ipynb"
    assert not newest.changed  # made by hand, and yet the same cells
    assert copies.create(root, CHAPTER, fresh=True).name == "lion-2.ipynb"


def test_outputs_and_ids_are_no_change(root: Path) -> None:
    copies.create(root, CHAPTER)
    chapter = json.loads((root / CHAPTER).read_text("utf-8"))
    chapter["cells"][1]["execution_count"] = 7
    chapter["cells"][1]["id"] = "another"
    (root / CHAPTER).write_text(json.dumps(chapter), "utf-8")
    newest = copies.newest(root, CHAPTER)
    assert newest is not None and not newest.changed


def test_a_damaged_copy_is_said_not_shown_as_a_difference(root: Path) -> None:
    copies.create(root, CHAPTER).write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"lion\.ipynb .* not a readable notebook"):
        copies.differences(root, CHAPTER)


def test_added_and_removed_cells_are_named(root: Path) -> None:
    copies.create(root, CHAPTER)
    (root / CHAPTER).write_text(notebook("import os", "x = 1"), "utf-8")
    shown = copies.differences(root, CHAPTER)
    assert "cell 2 of the chapter (code)" in shown and "<ins>+ import os</ins>" in shown
    assert "cell 3 of yours (code)" in shown and "<del>- x + 1</del>" in shown


def finished(build: BookBuild) -> Progress:
    deadline = time.monotonic() + 120
    while (progress := build.progress()).state == "building" and time.monotonic() < deadline:
        time.sleep(0.05)
    return progress


def fake(root: Path, code: str) -> BookBuild:
    """A build that is these lines of Python."""
    make = "import pathlib; p = pathlib.Path('_build/html'); p.mkdir(parents=True, exist_ok=True)\n"
    return BookBuild(root, [sys.executable, "-c", make + code])


def test_a_failed_first_build_shows_its_last_lines(root: Path) -> None:
    build = fake(
        root, "import sys; print('reading sources... [ 50%] book/index'); sys.exit('<why>')"
    )
    assert build.start()
    progress = finished(build)
    assert (progress.state, progress.available) == ("failed", False)
    assert (progress.page, progress.pages) == (1, 2)
    page = pages.page_of_progress(progress, "/", build.log)
    assert "could not be built" in page
    assert "&lt;why&gt;" in page
    assert 'http-equiv="refresh"' not in page


def test_the_pages_of_both_books_count(root: Path) -> None:
    add_guide(root)
    assert fake(root, "").progress().pages == 3


def test_a_build_without_a_book_is_a_failure(root: Path) -> None:
    build = fake(root, "print('done')")
    build.start()
    assert finished(build).state == "failed"


def test_the_book_is_built_again_only_when_a_source_changed(root: Path) -> None:
    write = "(p / 'index.html').write_text('x')"
    build = fake(root, write)
    assert build.start()
    assert finished(build) == Progress(state="ready", available=True, page=0, pages=2, lines=())
    assert not fake(root, write).start()
    (root / "src" / "labcore" / "new.py").write_text("x = 1\n", "utf-8")
    again = fake(root, write)
    assert again.start()
    assert finished(again).state == "ready"


def test_a_failed_rebuild_keeps_the_book_and_is_tried_again(root: Path) -> None:
    good = fake(root, "(p / 'index.html').write_text('x')")
    good.start()
    finished(good)
    (root / "book" / "index.md").write_text("# New\n", "utf-8")
    bad = fake(root, "raise SystemExit(1)")
    bad.start()
    progress = finished(bad)
    assert (progress.state, progress.available) == ("failed", True)
    again = fake(root, "pass")
    assert again.start()
    finished(again)


def test_a_stopped_build_is_gone(root: Path) -> None:
    build = fake(root, "import time; time.sleep(600)")
    build.start()
    assert build.progress().state == "building"
    build.stop()
    assert finished(build).state == "failed"


def test_a_page_without_a_body_still_gets_the_script() -> None:
    assert pages.inject("<p>x", "/", None).endswith("defer></script>")


def test_copy_shows_citations_and_book_links_as_plain_text(root: Path) -> None:
    chapter = json.loads((root / CHAPTER).read_text("utf-8"))
    text = "{cite:t}`chen2023lion` and {cite}`a2020b, other`; {doc}`the ledger <claims>`, {doc}`x`."
    cell = {"cell_type": "markdown", "id": "roles", "metadata": {}, "source": [text]}
    chapter["cells"].append(cell)
    (root / CHAPTER).write_text(json.dumps(chapter), "utf-8")
    copy = json.loads(copies.create(root, CHAPTER).read_text("utf-8"))
    assert "".join(copy["cells"][-1]["source"]) == ("Chen 2023 and [A 2020; other]; the ledger, x.")
    newest = copies.newest(root, CHAPTER)
    assert newest is not None and not newest.changed
    assert "identical" in copies.differences(root, CHAPTER)
    assert "<h2>" not in copies.differences(root, CHAPTER)


def test_a_copy_begins_with_what_the_page_shows_below_the_title(root: Path) -> None:
    chapter = ROOT / "book" / "lion.ipynb"
    (root / "book" / "lion.ipynb").write_bytes(chapter.read_bytes())
    copy = json.loads(copies.create(root, "book/lion.ipynb").read_text("utf-8"))
    title, _, rest = "".join(copy["cells"][0]["source"]).partition("\n\n")
    about = json.loads(chapter.read_text("utf-8"))["metadata"]["labcore"]
    assert title.startswith("# Lion") and rest.startswith(f"*{about['minutes']} minutes; ")
    assert all(f"\n- {aim}\n" in rest for aim in about["objectives"])
    assert copies.newest(root, "book/lion.ipynb").changed is False
