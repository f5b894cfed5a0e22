"""The teaching guide: its two files against the notebooks, its tables, its pages."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docutils import nodes
from sphinx.addnodes import pending_xref

from labcore import exercises
from labcore.__main__ import parser
from labcore.book.teaching import guide, pages, units
from labcore.book.teaching.graph import graph_figure
from labcore.book.teaching.plans import SYLLABI, read_plan, read_plans
from labcore.book.teaching.themes import read_themes, themes_of
from labcore.book.teaching.units import CHAPTERS, Course, read_course, read_units
from labcore.grading import report as grade_tables
from labcore.grading.intake.submissions import mend
from labcore.labs.releases import release_path
from labcore.labs.source import nbgrader_of
from tests.book import source_checks
from tests.book.mini import mini_book
from tests.book_fixtures import ROOT, Build, build_guide

pytestmark = pytest.mark.long

PAGES = ROOT / "book" / "teaching"
# Its commands have tests of their own, tests/grading/test_cluster_guide.py.
ELSEWHERE = {"grading_at_scale"}


@pytest.fixture(scope="module")
def course() -> Course:
    return read_course(ROOT)


@pytest.fixture
def tables() -> dict[str, Any]:
    return tomllib.loads((ROOT / CHAPTERS).read_text(encoding="utf-8"))


@pytest.fixture
def plans() -> dict[str, Any]:
    return tomllib.loads((ROOT / SYLLABI).read_text(encoding="utf-8"))


def test_every_chapter_of_the_book_is_there_in_its_order(course: Course) -> None:
    order = re.findall(r"file: book/(\w+)$", (ROOT / "_toc.yml").read_text("utf-8"), re.MULTILINE)
    chapters = [name for name in order if (ROOT / "book" / f"{name}.ipynb").is_file()]
    assert list(course) == chapters and set(chapters) == {
        path.stem for path in (ROOT / "book").glob("*.ipynb")
    }


def test_what_a_unit_says_is_what_its_notebooks_say(course: Course) -> None:
    for slug, unit in course.items():
        release = json.loads(release_path(ROOT, slug).read_text(encoding="utf-8"))
        assert sum(task.points for task in unit.tasks.values()) == unit.lab.points > 0
        assert sum(task.minutes for task in unit.tasks.values()) <= unit.lab.minutes
        ids = [item.id for item in exercises.load(slug)]
        assert sorted(f"{slug}.{name}" for name in unit.tasks) == sorted(ids)
        text = "\n".join("".join(cell["source"]) for cell in release["cells"])
        for task in unit.tasks.values():
            assert re.search(rf"^## (\d\. )?{re.escape(task.title)}$", text, re.MULTILINE)
        notebook = json.loads((ROOT / "book" / f"{slug}.ipynb").read_text(encoding="utf-8"))
        prose = [c["source"] for c in notebook["cells"] if c["cell_type"] == "markdown"]
        counted = source_checks.words("\n\n".join("".join(source) for source in prose))
        assert unit.words == counted > 1000


def changed(tables: dict[str, Any], slug: str, **more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(tables), slug: {**copy.deepcopy(tables[slug]), **more}}


CHAPTER_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a chapter too few": (
        lambda t: {slug: one for slug, one in t.items() if slug != "hip"},
        "missing the chapters hip",
    ),
    "a chapter too many": (lambda t: {**t, "rocket": t["hip"]}, "names rocket, which the book"),
    "a need of its own": (
        lambda t: changed(t, "lion", needs=["lion"]),
        "lion: needs 'lion'",
    ),
    "a circle": (
        lambda t: changed(changed(t, "lion", needs=["memory"]), "memory", needs=["lion"]),
        "lion: needs 'memory'",
    ),
    "a need that is no chapter": (
        lambda t: changed(t, "hip", needs=["attention", "cuda"]),
        "hip: needs 'cuda'",
    ),
    "a need that the notebook has": (
        lambda t: changed(t, "medusa", needs=[]),
        "medusa: .* 'the chapter on speculative decoding'",
    ),
    "one chapter in both lists": (
        lambda t: changed(t, "hip", helps=["attention"]),
        "hip: needs and helps both name attention",
    ),
    "a goal that nothing shows": (
        lambda t: changed(t, "lion", shown=[["quiz"], [], ["transfer"], ["drift"]]),
        "lion: nothing shows the goal",
    ),
    "a goal too few": (
        lambda t: changed(t, "lion", shown=t["lion"]["shown"][:-1]),
        "lion: shown has 3 .* 4 objectives",
    ),
    "an exercise that there is not": (
        lambda t: changed(t, "lion", shown=[*t["lion"]["shown"][:-1], ["drift", "roar"]]),
        "lion: shown names roar",
    ),
    "an exercise without a goal": (
        lambda t: changed(t, "lion", shown=[["masked_step"], ["quiz"], ["transfer"], ["stall"]]),
        "lion: shown must name clinic, drift",
    ),
    "an exercise without a question": (
        lambda t: changed(t, "lion", ask={"drift": "?"}),
        "lion: ask must name drift, masked_step, stall, transfer, got drift",
    ),
    "no open question": (
        lambda t: changed(t, "lion", open=[]),
        "lion: it must have at least one open question",
    ),
    "an answer of two lines": (
        lambda t: changed(t, "lion", open=[{**t["lion"]["open"][0], "expects": ["a", "b"]}]),
        "expects must have at least 3 lines",
    ),
    "a decision of two lines": (
        lambda t: changed(t, "lion", decision=["a", "b"]),
        "lion, decision must have at least 3 lines",
    ),
    "an empty line": (
        lambda t: changed(t, "lion", ask={**t["lion"]["ask"], "drift": "  "}),
        "lion, ask must hold lines of text",
    ),
    "a misspelt key": (
        lambda t: changed(t, "lion", need=[]),
        "lion must have the keys .* got .*, need$",
    ),
}


@pytest.mark.parametrize("fault", CHAPTER_FAULTS)
def test_a_fault_in_the_chapters_file_is_named(tables: dict[str, Any], fault: str) -> None:
    plant, sentence = CHAPTER_FAULTS[fault]
    with pytest.raises(ValueError, match=sentence):
        read_units(ROOT, plant(tables))


def test_a_lab_whose_exercise_lost_its_check_is_named() -> None:
    release = json.loads(release_path(ROOT, "lion").read_text(encoding="utf-8"))
    cells = [cell for cell in release["cells"] if cell["id"] != "drift-check"]
    with pytest.raises(ValueError, match=r"lab lion must have .*lion\.drift"):
        units._tasks("lion", cells)


def test_a_lab_without_a_decision_is_named() -> None:
    release = json.loads(release_path(ROOT, "lion").read_text(encoding="utf-8"))
    cells = [cell for cell in release["cells"] if cell["id"] != "decision"]
    with pytest.raises(ValueError, match="lab lion must have a cell with the id decision"):
        units._decision("lion", cells, ["a", "b", "c"])


def test_the_plans_are_a_workshop_five_days_and_thirteen_weeks(course: Course) -> None:
    found = read_plans(ROOT, course)
    lengths = {name: [one.minutes for one in plan.sessions] for name, plan in found.items()}
    assert lengths == {"workshop": [180], "days": [360] * 5, "term": [90] * 13}
    assert sorted(found["term"].chapters) == sorted(course)
    due = [slug for one in found["term"].sessions for slug in one.due]
    assert sorted([*due, *found["term"].last(course)]) == sorted(course)
    # Everything is given once, so the hours are those of the notebooks and of what is said.
    for plan in found.values():
        said = sum(step.minutes for step in plan.steps if step.text or step.question)
        read = sum(course[slug].chapter.minutes for slug in plan.chapters)
        solved = sum(
            course[slug].tasks[name].minutes
            for slug, names in plan.tasks().items()
            for name in names
        )
        assert sum(step.minutes for step in plan.steps) == said + read + solved


def session(plans: dict[str, Any], at: int = 0, **more: Any) -> dict[str, Any]:
    found = copy.deepcopy(plans["days"])
    found["session"][at].update(more)
    return found


PLAN_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "too long": (lambda p: session(p, minutes=349), "350 minutes in class, but at most 349"),
    "too much at home": (
        lambda p: session(p, home=[{"talk": "x", "minutes": 1}]),
        "1 minutes at home, but at most 0",
    ),
    "no such chapter": (
        lambda p: session(p, steps=[{"chapter": "lionn"}]),
        "unknown chapter 'lionn'; choose from lion,",
    ),
    "no such exercise": (
        lambda p: session(p, steps=[{"exercise": "lion.roar"}]),
        "lion has no exercise 'roar'; .*masked_step",
    ),
    "no such question": (
        lambda p: session(p, steps=[{"open": "lion.why", "minutes": 5}]),
        "lion has no open question 'why'",
    ),
    "two things in one step": (
        lambda p: session(p, steps=[{"chapter": "lion", "talk": "x", "minutes": 5}]),
        "step must have exactly one of .* got .*'chapter'",
    ),
    "minutes that the notebook has": (
        lambda p: session(p, steps=[{"chapter": "lion", "minutes": 5}]),
        "remove minutes",
    ),
    "a chapter before its need": (
        lambda p: session(p, steps=[{"chapter": "adamw_epsilon"}], due=[]),
        "adamw_epsilon needs lion",
    ),
    "a lab before its chapter": (
        lambda p: session(p, steps=[{"exercise": "lion.drift"}, {"chapter": "lion"}], due=[]),
        "exercise of lion, whose chapter",
    ),
    "an exercise twice": (
        lambda p: session(p, 4, steps=[{"exercise": "hip.mend"}], due=[]),
        "hip.mend appears twice",
    ),
    "due before it was given": (
        lambda p: session(p, 0, due=["lion", "shuffling"]),
        "shuffling is due, but buffer, resume, correlation, spikes, clinic",
    ),
    "a negative time": (lambda p: session(p, minutes=-5), "minutes must be a valid int, got -5"),
    "a misspelt key": (lambda p: session(p, homework=[]), "remove homework"),
    "nothing": (lambda p: {**p["days"], "session": []}, "days has no sessions"),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_in_a_plan_is_named(course: Course, plans: dict[str, Any], fault: str) -> None:
    plant, sentence = PLAN_FAULTS[fault]
    with pytest.raises(ValueError, match=sentence):
        read_plan("days", plant(plans), course)


@pytest.mark.parametrize(
    ("mistakes", "sentence"),
    [
        (
            ["lion.drift: one step short", "lion.stall: whole gap"],
            "mistakes from at least two labs",
        ),
        ([], "mistakes from at least two labs"),
        (["lion.drift: one step long"], "lion.drift .* 'one step long'; .* no decay"),
        (["lion.clinic: decay in the gradient"], "lion.clinic has no mistake"),
        (["lion.roar: x"], "unknown exercise 'lion.roar'"),
        ([{"lion": 1}], "unknown exercise"),
    ],
)
def test_a_theme_that_no_lab_knows_is_named(
    course: Course, mistakes: list[Any], sentence: str
) -> None:
    table = {"title": "T", "text": "t", "mistakes": mistakes}
    with pytest.raises(ValueError, match=sentence):
        read_themes([table], course)


def test_themes_span_the_labs(course: Course) -> None:
    found = themes_of(ROOT, course)
    assert {one.slug for theme in found for one in theme.mistakes} == set(course)
    with pytest.raises(ValueError, match="theme 1 must have the keys title, text, mistakes"):
        read_themes([{"title": "T"}], course)


def test_the_drawing_has_an_arc_for_each_need_and_all_lead_down(course: Course) -> None:
    svg = graph_figure(course)
    arcs = re.findall(r'class="(\w+)" data-arc="(\w+) (\w+)" d="M\d+ (\d+)C[^"]* (\d+)"', svg)
    wanted = {
        (kind, slug, unit.slug)
        for unit in course.values()
        for kind in ("needs", "helps")
        for slug in getattr(unit, kind)
    }
    assert {arc[:3] for arc in arcs} == wanted and len(arcs) == len(wanted)
    assert all(int(start) < int(end) for *_, start, end in arcs)
    xs = [
        float(x) for path in re.findall(r'd="M([^"]+)"', svg) for x in re.findall(r"C(\d+)", path)
    ]
    assert xs and all(x >= 0 for x in xs), "an arc leaves the picture"


def test_plain_text_stays_plain_in_markdown() -> None:
    assert pages.escape("2 * x_i <= |a| `b_c*` $3") == r"2 \* x\_i \<= \|a\| `b_c*` \$3"
    assert [pages.hours(m) for m in (0, 45, 60, 90)] == ["", "45 min", "1 h", "1 h 30 min"]
    with pytest.raises(ValueError, match="must name one of goals, graph,"):
        pages.parts(ROOT, "syllabus years")


def test_every_known_mistake_of_a_function_is_on_the_page() -> None:
    found = dict(pages.parts(ROOT, "misconceptions"))
    assert len(found) == len(exercises.slugs())
    text = "\n".join(found.values())
    for slug in exercises.slugs():
        for item in exercises.load(slug):
            if isinstance(item, exercises.Clinic):
                symptoms = [fault.symptom for fault in item.faults.values()]
                assert not any(pages.escape(one) in text for one in symptoms)
            else:
                for _, hint in item.wrong.values():
                    assert pages.escape(hint) in text


def released(slug: str) -> dict[str, Any]:
    return dict(json.loads(release_path(ROOT, slug).read_text(encoding="utf-8")))


def cell_of(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    return next(cell for cell in notebook["cells"] if cell["id"] == name)


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ("the text of a task", []),
        ("the points of a cell", ["grading data of drift-test changed, restored"]),
        ("the text of a locked cell", ["locked cell drift-test changed, restored"]),
        ("a cell of code that is not graded", []),
        (
            "a new exercise",
            ["cell drift missing", "cell drift-test missing, put back"],
        ),
    ],
)
def test_an_older_copy_of_a_lab_is_graded_as_the_page_says(change: str, flags: list[str]) -> None:
    now, older = released("lion"), released("lion")
    if change == "the text of a task":
        cell_of(older, "drift-task")["source"] = ["## Drift\n"]
    elif change == "the points of a cell":
        cell_of(older, "drift-test")["metadata"]["nbgrader"]["points"] = 1
    elif change == "a cell of code that is not graded":
        cell_of(older, "transfer-numbers")["source"] = ["print(7)"]
    elif change == "the text of a locked cell":
        cell_of(older, "drift-test")["source"] = ["# Graded.\n"]
    else:
        older["cells"] = [cell for cell in older["cells"] if not cell["id"].startswith("drift")]
    cell_of(older, "stall")["source"] = ["kept = 1\n"]
    mended = mend(older, now)
    assert list(mended.changes) == flags
    texts = ["".join(cell["source"]) for cell in mended.notebook["cells"]]
    assert ("print(7)" in texts) == (change == "a cell of code that is not graded")
    ours = {nbgrader_of(cell).get("grade_id"): cell for cell in mended.notebook["cells"]}
    assert ours["stall"]["source"] == "kept = 1\n"
    assert ours["drift-test"]["source"] == "".join(cell_of(now, "drift-test")["source"])
    assert nbgrader_of(ours["drift-test"])["points"] == 4
    page = (PAGES / "updating.md").read_text(encoding="utf-8")
    (line,) = [one for one in page.splitlines() if one.startswith(f"| {change}")]
    assert ("flag" in line) == bool(flags)


def commands() -> list[tuple[str, list[str]]]:
    """What the pages tell to call of labcore: page and words."""
    return [
        (path.name, shlex.split(line))
        for path in sorted(PAGES.glob("*.md"))
        if path.stem not in ELSEWHERE
        for line in re.findall(
            r"python -m labcore(?:\.exercises)? +([a-z][^\n`]*)", path.read_text("utf-8")
        )
    ]


def test_commands_and_columns_on_the_pages_are_there() -> None:
    assert {words[0] for _, words in commands()} == {
        *("clinic-key", "doctor", "grade", "student-repository")
    }
    for name, words in commands():
        try:
            asked = parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{name}: labcore knows no {' '.join(words)}")
        if due := getattr(asked, "due", None):
            assert grade_tables.parse_due(due).tzinfo
    policies = (PAGES / "policies.md").read_text(encoding="utf-8")
    assert {"handed_in", "late"} <= set(grade_tables.COLUMNS)
    assert all(f"`{name}`" in policies for name in ("handed_in", "late"))
    example = grade_tables.lateness(
        datetime(2026, 3, 3, 3, 5, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)
    )
    assert example == "2 d 3 h 5 min" and f'"{example}"' in policies


class TestBuilt:
    """Links to the course's book are checked where both are built, in test_strict_build.py."""

    def test_the_build_is_clean(self, guide_build: Build) -> None:
        assert guide_build.status == 0, guide_build.log[-4000:]

    def test_what_is_made_is_on_the_pages(self, guide_build: Build, course: Course) -> None:
        def text(name: str) -> str:
            html = (guide_build.html / f"{name}.html").read_text("utf-8")
            return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))

        assert "Needs Lion. Better after" in text("goals")
        assert "In-flight batching" in text("syllabi").partition("a week after the last")[2]
        for task in course["lion"].tasks.values():
            assert task.title in text("timing")
        assert "|blend| &lt;= threshold does not" in text("misconceptions")
        assert "Parts averaged as if they were equal" in text("misconceptions")


def test_a_fault_in_a_file_or_link_fails_the_build_with_its_sentence(tmp_path: Path) -> None:
    folder = mini_book(tmp_path / "source")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/index\n", encoding="utf-8")
    (folder / CHAPTERS).parent.mkdir()
    shutil.copyfile(PAGES / "_config.yml", folder / "book" / "teaching" / "_config.yml")
    for name, text in {
        "_toc.yml": "format: jb-book\nroot: index\n",
        "index.md": "# Goals\n\n{doc}`Tigers </book/tiger>`\n\n```{teaching} goals\n```\n",
        "chapters.toml": "[rocket]\nneeds = []\n",
    }.items():
        (folder / "book" / "teaching" / name).write_text(text, encoding="utf-8")
    build = build_guide(folder, tmp_path / "out")
    assert build.status != 0
    assert f"{CHAPTERS} names rocket" in build.log
    assert "unknown document: '/book/tiger'" in build.log


def link(book: Path, page: str, target: str) -> str | None:
    """Where `{doc}` leads from a page of a book; "" if it leads nowhere and stays text."""
    node = pending_xref("", reftype="doc", refdoc=page, reftarget=target)
    words = nodes.inline(text="words")
    found = guide.find_in_other_book(SimpleNamespace(srcdir=book), None, node, words)  # type: ignore[arg-type]
    return found.get("refuri", "") if found is not None else None


@pytest.mark.parametrize(
    ("book", "page", "target", "address"),
    [
        (PAGES, "goals", "/book/lion", "../book/lion.html"),
        (PAGES, "goals", "/labs/release/lion/lion", "../labs/release/lion/lion.html"),
        (PAGES, "goals", "/book/tiger", None),
        (ROOT, "book/index", "/book/teaching/index", "../teaching/index.html"),
        (ROOT, "book/index", "teaching/goals", "../teaching/goals.html"),
        (ROOT, "labs/release/lion/lion", "/book/teaching/goals", "../../../teaching/goals.html"),
        (ROOT, "book/index", "/book/teaching/tiger", None),
        (ROOT, "book/index", "tiger", None),
    ],
)
def test_a_link_leads_from_book_to_book(
    book: Path, page: str, target: str, address: str | None
) -> None:
    assert link(book, page, target) == address


def test_students_get_no_guide_and_no_link_to_it(tmp_path: Path) -> None:
    assert link(tmp_path, "book/index", "/book/teaching/index") == ""
    assert guide.build(tmp_path, tmp_path / "_build", strict=True) == 0
    assert not (tmp_path / "_build").exists()
