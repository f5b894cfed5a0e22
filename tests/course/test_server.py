"""The course's server: the token, the build's progress, the pages, the reader's copies, its end."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from labcore.course import copies
from labcore.exercises.progress import Task
from tests.course.course_server import (
    Course,
    add_guide,
    make_checkout,
    notebook,
    running_course,
)

pytestmark = pytest.mark.long  # it builds small books

CHAPTER = "book/lion.ipynb"
COPY = "/book/_labcore/copy"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    """One course for the tests that only read; its book was built by the server itself."""
    root = make_checkout(tmp_path_factory.mktemp("course") / "checkout")
    add_guide(root)
    with running_course(root) as running:
        page = running.ask("/book/book/lion.html")
        lab = running.ask("/lab")
        running.wait_for_book()
        running.first = (page, lab)  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def reader(course: Course) -> Iterator[Course]:
    """The same course for one reader in a browser: cookies, an empty `my/`, the first chapter."""
    course.cookies = course.ask("/book/book/lion.html").cookies
    chapter = course.root / CHAPTER
    chapter.write_text(notebook("x = 1", "x + 1"), "utf-8")
    shutil.rmtree(course.root / "my", ignore_errors=True)
    yield course
    course.cookies = {}


def post(reader: Course, *, fresh: bool = False) -> dict[str, str]:
    """What the page's script sends when a reader clicks."""
    body = {"notebook": CHAPTER, "fresh": fresh}
    xsrf = {"X-XSRFToken": reader.cookies["_xsrf"]}
    answer = reader.ask(COPY, body=body, token=False, **xsrf)
    assert answer.status == 200, answer.text
    return dict(json.loads(answer.text))


def state(reader: Course) -> dict[str, object]:
    return dict(json.loads(reader.ask(f"{COPY}?notebook={CHAPTER}", token=False).text))


@pytest.mark.parametrize("path", ["/book/", "/book/book/lion.html", "/book/_static/pygments.css"])
def test_without_the_token_the_book_is_not_shown(course: Course, path: str) -> None:
    answer = course.ask(path, token=False)
    assert answer.status == 302
    assert answer.headers["location"].startswith("/login")
    assert "Lion" not in answer.text


@pytest.mark.parametrize(
    "path", ["progress", "labs", f"copy?notebook={CHAPTER}", "differences?notebook=x"]
)
def test_without_the_token_nothing_answers(course: Course, path: str) -> None:
    assert course.ask(f"/book/_labcore/{path}", token=False).status in (302, 403)


def test_while_the_first_build_runs_its_progress_is_shown(course: Course) -> None:
    page, lab = course.first  # type: ignore[attr-defined]
    assert page.status == 200
    assert "The book is being built" in page.text
    assert 'http-equiv="refresh"' in page.text
    assert 'href="/lab"' in page.text
    assert lab.status == 200


def test_a_built_page_has_the_script_that_runs_it(course: Course) -> None:
    answer = course.ask("/book/book/lion.html")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert f'run.js" data-notebook="{CHAPTER}" defer></script></body>' in answer.text
    assert "data-notebook" not in course.ask("/book/book/index.html").text
    assert "run.js" not in (course.root / "_build/html/book/lion.html").read_text("utf-8")
    assert course.ask("/book/").status == 200
    assert course.ask("/book").headers["location"] == "/book/"


def test_the_second_book_is_served_where_its_links_to_the_first_hold(course: Course) -> None:
    for path in ("/teaching", "/teaching/", "/teaching/index.html?q=1"):
        assert course.ask(path).headers["location"] == path.replace("/teaching", "/book/teaching")
    assert "Mini guide" in course.ask("/book/teaching/").text
    assert course.ask("/book/teaching").headers["location"] == "/book/teaching/"
    assert course.ask("/book/teaching/", token=False).status == 302


def test_files_have_their_types_and_are_asked_for_again(course: Course) -> None:
    style = course.ask("/book/_static/pygments.css")
    assert style.headers["content-type"] == "text/css"
    assert style.headers["cache-control"] == "no-cache"
    script = course.ask("/book/_labcore/run.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert (
        course.ask("/book/_sources/book/lion.ipynb")
        .headers["content-disposition"]
        .startswith("attachment")
    )
    for path in ("/book/_static/pygments.css", "/book/book/lion.html"):
        tag = course.ask(path).headers["etag"]
        assert course.ask(path, **{"If-None-Match": tag}).status == 304
    assert course.ask("/book/nothing.html").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "../../_config.yml",
        "..%2f..%2f_config.yml",
        "book/../../../_config.yml",
        "%2e%2e/%2e%2e/_config.yml",
        "//etc/passwd",
        "%2fetc%2fpasswd",
    ],
)
def test_no_file_outside_the_book_is_sent(course: Course, path: str) -> None:
    answer = course.ask(f"/book/{path}")
    assert answer.status in (403, 404)
    assert "title: Mini" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize("name", ["../../etc/passwd", "my/lion.ipynb", "book/index.md", "", "/x"])
def test_only_a_chapter_is_copied(reader: Course, name: str) -> None:
    xsrf = {"X-XSRFToken": reader.cookies["_xsrf"]}
    answer = reader.ask(COPY, body={"notebook": name}, token=False, **xsrf)
    assert answer.status == 404
    assert "choose one of book/lion.ipynb" in answer.text
    assert not list((reader.root / "my").glob("*"))


def test_another_page_cannot_make_a_copy(reader: Course) -> None:
    """A cookie alone is not enough: the browser sends it for any site's form."""
    for headers in ({}, {"X-XSRFToken": "guessed"}):
        answer = reader.ask(COPY, body={"notebook": CHAPTER}, token=False, **headers)
        assert answer.status == 403
    assert not (reader.root / "my" / "lion.ipynb").exists()


def test_what_was_passed_in_the_labs_is_told(reader: Course) -> None:
    kept = reader.root / "my" / "progress" / "lion.json"
    assert json.loads(reader.ask("/book/_labcore/labs").text) == {}
    kept.parent.mkdir(parents=True)
    rows = [Task(name=str(at), points=3, passed=at == 1, attempts=at) for at in range(2)]
    kept.write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
    said = {"lion": "1 of 2 tasks, 3 of 6 points"}
    assert json.loads(reader.ask("/book/_labcore/labs").text) == said


def test_a_copy_is_made_once_and_never_written_again(reader: Course) -> None:
    assert state(reader) == {"copy": None, "changed": False, "open": None}
    made = post(reader)
    assert made["copy"] == "my/lion.ipynb"
    assert reader.ask(made["open"], token=False).status == 200
    mine = reader.root / "my" / "lion.ipynb"
    cells = json.loads(mine.read_text("utf-8"))["cells"]
    assert ["".join(cell["source"]) for cell in cells] == ["# Lion", "x = 1", "x + 1"]
    assert state(reader)["changed"] is False
    own = mine.read_text("utf-8").replace("x + 1", "my own words")
    mine.write_text(own, "utf-8")
    assert post(reader)["copy"] == "my/lion.ipynb"
    assert mine.read_text("utf-8") == own
    assert state(reader)["changed"] is False  # the reader's changes are no update


def test_a_saved_copy_says_how_its_controls_come_back(course: Course) -> None:
    widget = {"model_id": "1", "version_major": 2, "version_minor": 0}
    kinds = {copies.WIDGET: widget, "text/plain": "A wave."}
    shown = {"output_type": "execute_result", "metadata": {}, "execution_count": 1, "data": kinds}
    content = json.loads(notebook("explore(wave)", "1"))
    plain = shown | {"data": {"text/plain": "1"}}
    content["cells"][1]["outputs"], content["cells"][2]["outputs"] = [shown], [plain]
    body = {"type": "notebook", "content": content}
    saved = course.ask("/api/contents/kept.ipynb", body=body, method="PUT")
    assert saved.status == 201
    cells = json.loads((course.root / "kept.ipynb").read_text("utf-8"))["cells"]
    (first,), (second,) = cells[1]["outputs"], cells[2]["outputs"]
    assert first["data"] == {"text/plain": ["A wave."], "text/html": [copies.GONE]}
    assert second["data"] == {"text/plain": ["1"]}


def test_an_update_offers_mine_the_differences_and_a_fresh_copy(reader: Course) -> None:
    post(reader)
    mine = reader.root / "my" / "lion.ipynb"
    before = mine.read_bytes()
    (reader.root / CHAPTER).write_text(notebook("x = 1", "x + 2 < 3"), "utf-8")
    assert state(reader) == {
        "copy": "my/lion.ipynb",
        "changed": True,
        "open": "/lab/tree/my/lion.ipynb",
    }
    page = reader.ask(f"/book/_labcore/differences?notebook={CHAPTER}", token=False)
    assert page.status == 200
    assert "<del>- x + 1</del>" in page.text
    assert "<ins>+ x + 2 &lt; 3</ins>" in page.text
    assert "2 identical cells" in page.text
    assert post(reader)["copy"] == "my/lion.ipynb"
    assert post(reader, fresh=True)["copy"] == "my/lion-2.ipynb"
    assert mine.read_bytes() == before
    assert "x + 2" in (reader.root / "my" / "lion-2.ipynb").read_text("utf-8")
    assert state(reader)["changed"] is False


def test_differences_without_a_copy_say_what_to_do(reader: Course) -> None:
    page = reader.ask(f"/book/_labcore/differences?notebook={CHAPTER}", token=False)
    assert page.status == 404
    assert "no copy of book/lion.ipynb in my/ yet" in page.text


def test_later_start_shows_book_at_once_and_rebuilds_if_changed(
    tmp_path: Path, course: Course
) -> None:
    root = tmp_path / "again"
    subprocess.run(["cp", "-r", str(course.root), str(root)], check=True)
    with running_course(root) as again:
        assert "Lion" in again.ask("/book/book/lion.html").text
        assert json.loads(again.ask("/book/_labcore/progress").text)["state"] == "ready"
    (root / "book" / "index.md").write_text("# Another title\n", "utf-8")
    with running_course(root) as again:
        page = again.ask("/book/book/lion.html")
        progress = json.loads(again.ask("/book/_labcore/progress").text)
        assert "Lion" in page.text
        assert progress["state"] == "building"
        again.wait_for_book()
        assert "Another title" in again.ask("/book/book/index.html").text


def runs_a_kernel(family: list[psutil.Process]) -> bool:
    """Whether one of these processes is a notebook's kernel: it lives in a session of its own."""
    lines = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return any("ipykernel_launcher" in line for line in lines)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_its_end_leaves_nothing_running(tmp_path: Path, ending: signal.Signals) -> None:
    root = make_checkout(tmp_path / "checkout")
    config = root / "_config.yml"
    config.write_text(config.read_text("utf-8").replace('"off"', "force"), "utf-8")
    (root / CHAPTER).write_text(notebook("import time; time.sleep(600)"), "utf-8")
    with running_course(root) as course:
        deadline = time.monotonic() + 300
        while not runs_a_kernel(family := course.family()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert runs_a_kernel(family), "the build did not come to the notebook"
        course.process.send_signal(ending)
        course.process.communicate(timeout=120)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []


def test_a_port_in_use_is_one_sentence_that_names_the_course(course: Course) -> None:
    call = [sys.executable, "-m", "labcore", "course", "--port", str(course.port), "--no-browser"]
    done = subprocess.run(call, cwd=course.root, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert f"already running on port {course.port}; open http://" in done.stderr
    assert done.stderr.count("\n") == 1
    other = subprocess.run(
        call, cwd=course.root.parent, capture_output=True, text=True, timeout=180
    )
    assert other.returncode == 1
    assert "has no _config.yml" in other.stderr
