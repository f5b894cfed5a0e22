"""The page of the clinics shows what a lab shows and no answer; the key has all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from labcore.book import clinics
from tests.book import html_checks
from tests.book.mini import mini_book, notebook
from tests.book_fixtures import ROOT, build_book

pytestmark = pytest.mark.long

SOURCES = {path.stem: path for path in sorted((ROOT / "labs" / "source").glob("*/*.ipynb"))}
FAST = ("lion", "ghost_norm", "attention", "tensor_parallel")


def leaks(text: str, slug: str) -> list[str]:
    """What of a lab's answers, for one of the first students, stands in a text as an answer."""
    ill = clinics.clinic(slug)
    flat = " ".join(text.replace("’", "'").split()).lower()
    # A later sentence of a symptom may be what the lab's own text says about the program.
    found = [
        name
        for name, fault in ill.faults.items()
        if " ".join(fault.symptom.split()).lower()[: len(fault.symptom) // 2] in flat
    ]
    if ill.explanation and " ".join(ill.explanation.split()).lower()[:80] in flat:
        found.append("the explanation")
    for number in range(3):
        for label, name in ill.diagnoses(number).items():
            found += [f"{label}{mark}{name}" for mark in (": ", " is ", '": "') if
                      f"{label}{mark}{name}".lower() in flat]  # fmt: skip
    return found


@pytest.mark.parametrize("slug", FAST)
def test_a_case_is_what_the_lab_shows(slug: str) -> None:
    found = clinics.case(SOURCES[slug])
    ill = clinics.clinic(slug)
    rows = {note["text"] for note in found.figure["layout"]["annotations"]}
    assert {f"<b>{label}</b>" for label in ill.diagnoses()} <= rows
    assert found.names == ill.names
    lab = SOURCES[slug].read_text(encoding="utf-8")
    assert found.title in lab and not found.title[0].isdigit()
    assert "points" not in found.text and "Faults:" not in found.printed
    whole = json.dumps([found.title, found.text, found.figure, found.printed])
    assert leaks(whole, slug) == []


def test_another_number_reorders_the_patients() -> None:
    first, other = (clinics.case(SOURCES["attention"], number).figure for number in (0, 1))
    assert clinics.clinic("attention").diagnoses(0) != clinics.clinic("attention").diagnoses(1)
    assert first["data"] != other["data"]
    curves = [sorted(json.dumps(trace["y"]) for trace in one["data"]) for one in (first, other)]
    assert curves[0] == curves[1]


def test_a_leak_is_seen() -> None:
    """The check of the page can fail: each kind of answer is planted."""
    ill = clinics.clinic("lion")
    label, name = next(iter(ill.diagnoses().items()))
    assert leaks(", ".join(ill.names), "lion") == []
    assert f"{label}: {name}" in leaks(f"{label}: {name}", "lion")
    assert leaks(f"so it is. {ill.faults[name].symptom}", "lion")
    assert leaks(ill.explanation, "lion") == ["the explanation"]


def test_key_names_each_fault_once_with_its_reason() -> None:
    text = clinics.key(7, FAST[:2])
    assert text.startswith("# Clinics: the key for number 7\n")
    for slug in FAST[:2]:
        ill = clinics.clinic(slug)
        part = text.split(f"## {slug}\n")[1].split("\n## ")[0]
        for label, name in ill.diagnoses(7).items():
            assert part.count(f"**{label}: {name}.**") == 1
            assert f"**{label}: {name}.** {ill.reason(name)}" in part
        assert ill.explanation in part


@pytest.mark.parametrize("number", [-1, True, "7", 1.5])
def test_a_number_that_is_none_is_refused(number: object) -> None:
    with pytest.raises((TypeError, ValueError), match="student"):
        clinics.key(number, ["lion"])  # type: ignore[arg-type]


def test_a_lab_that_has_no_clinic_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="matching must define a CLINIC"):
        clinics.key(0, ["matching"])
    lab = json.loads(SOURCES["lion"].read_text(encoding="utf-8"))
    lab["cells"] = [cell for cell in lab["cells"] if ".patients(" not in "".join(cell["source"])]
    (tmp_path / "lion.ipynb").write_text(json.dumps(lab), encoding="utf-8")
    with pytest.raises(ValueError, match="no cell calls CLINIC.patients"):
        clinics.case(tmp_path / "lion.ipynb")


def test_a_reader_of_the_key_may_stop_reading() -> None:
    command = [sys.executable, "-m", "labcore", "clinic-key", "lion"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stdout is not None and asked.stderr is not None
        asked.stdout.close()
        assert asked.stderr.read() == b""
    assert asked.returncode == 0


def test_the_page_holds_the_cases_and_no_answer(tmp_path: Path) -> None:
    folder = mini_book(tmp_path / "source")
    shutil.copy(ROOT / "book" / "clinics.md", folder / "book")
    chapters = []
    for slug in FAST[:2]:
        notebook(folder / "book" / f"{slug}.ipynb", "1")
        for kind in ("source", "release"):
            there = Path("labs") / kind / slug
            (folder / there).mkdir(parents=True)
            shutil.copy(ROOT / there / f"{slug}.ipynb", folder / there)
        lab = {"file": f"labs/release/{slug}/{slug}"}
        chapters.append({"file": f"book/{slug}", "sections": [lab]})
    toc = {"format": "jb-book", "root": "book/index"}
    toc["chapters"] = [{"file": "book/clinics"}, *chapters]  # type: ignore[assignment]
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
    build = build_book(folder, tmp_path / "out")
    page = build.html / "book" / "clinics.html"
    text = page.read_text(encoding="utf-8")
    for slug in FAST[:2]:
        assert f'id="clinic-{slug.replace("_", "-")}"' in text
        assert f"../labs/release/{slug}/{slug}.html" in html_checks.read(page).links
        assert leaks(text, slug) == []
        assert all(name in text for name in clinics.clinic(slug).names)
    drawn = "".join(
        path.read_text("utf-8") for path in (build.html / "_static/explorers").glob("*")
    )
    for slug in FAST[:2]:
        assert all(f"<b>{label}</b>" in drawn for label in clinics.clinic(slug).diagnoses())
        assert leaks(drawn, slug) == []
    # Once for screen readers, once for browsers without JavaScript.
    assert text.count("Curves at the start, each quarter and the end.") == 2 * len(FAST[:2])
    assert [line for line in html_checks.heavy_pages(build.html) if "clinics" in line] == []
    broken = [line for line in build.log.splitlines() if "WARNING" in line and "clinics" in line]
    assert broken == []


@pytest.mark.parametrize("slug", SOURCES)
def test_the_real_page_has_every_lab_and_no_answer(book_html: Path, slug: str) -> None:
    page = book_html / "book" / "clinics.html"
    assert f"clinic-{slug.replace('_', '-')}" in html_checks.read(page).ids
    assert leaks(page.read_text(encoding="utf-8"), slug) == []
    keys = re.findall(r'data-twin="(\w+)"', page.read_text("utf-8"))
    drawn = [book_html / "_static" / "explorers" / f"{key}.js" for key in keys]
    assert len(drawn) == len(SOURCES)
    assert all(leaks(path.read_text("utf-8"), slug) == [] for path in drawn)
