"""The course's server in a browser: a reader runs a page, and later sees that it changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from labcore.exercises.progress import Task
from tests.course.course_server import TOKEN, Course, make_checkout, notebook, running_course

pytestmark = pytest.mark.long

CHAPTER = "book/lion.ipynb"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    root = make_checkout(tmp_path_factory.mktemp("course") / "checkout")
    with running_course(root) as running:
        yield running


def test_reader_goes_from_progress_to_copy_to_differences(course: Course, watch: Any) -> None:
    """One way through, as a reader goes it: each step needs the one before."""
    watched = watch()
    page = watched.page
    start = f"http://127.0.0.1:{course.port}"
    page.goto(f"{start}/book/?token={TOKEN}")
    page.wait_for_selector("article h1", timeout=300_000)  # the progress turned into the book
    page.goto(f"{start}/book/book/lion.html")

    with page.context.expect_page() as opened:
        page.get_by_role("button", name="Run this page").click()
    lab = opened.value
    lab.wait_for_selector(".jp-Notebook .jp-CodeCell")
    assert lab.url.endswith("/lab/tree/my/lion.ipynb")
    mine = course.root / "my" / "lion.ipynb"
    page.get_by_text("opens your copy, my/lion.ipynb").wait_for()

    (course.root / CHAPTER).write_text(notebook("x = 1", "x + 2"), "utf-8")
    before = json.loads(mine.read_text("utf-8"))["cells"]
    page.reload()
    page.get_by_text("This chapter changed after your copy my/lion.ipynb was made").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("button", name="See the differences").click()
    opened.value.get_by_text("+ x + 2").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("button", name="Make a fresh copy beside it").click()
    opened.value.wait_for_url("**/lab/tree/my/lion-2.ipynb")
    assert Path(course.root, "my", "lion-2.ipynb").is_file()
    assert json.loads(mine.read_text("utf-8"))["cells"] == before

    kept = course.root / "my" / "progress" / "lion.json"
    kept.parent.mkdir()
    row = Task(name="transfer", points=2, passed=True, attempts=3)
    kept.write_text(json.dumps([asdict(row)]), "utf-8")
    page.reload()
    page.get_by_text("Your copy of the lab: 1 of 1 tasks, 2 of 2 points").wait_for()
    assert watched.strangers == []


def test_a_page_in_a_folder_has_no_button(course: Course, watch: Any) -> None:
    course.wait_for_book()
    watched = watch()
    watched.page.goto((course.root / "_build/html/book/lion.html").as_uri())
    assert watched.page.get_by_role("button", name="Run this page").count() == 0
    assert watched.page.get_by_text("Lion").count() > 0
