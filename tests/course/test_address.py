"""The repository's address: one place, and every other place agrees with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labcore.course import address
from labcore.labs import releases
from labcore.labs.first_cell import first_cell

ROOT = Path(__file__).resolve().parents[2]
GITHUB = "https://github.com/someone/some-course"
LABS = [
    path.relative_to(ROOT)
    for folder in ("source", "release")
    for path in sorted((ROOT / "labs" / folder).glob("*/*.ipynb"))
    if path.stem == path.parent.name
]
ELSEWHERE = "https://code.example.org/group/sub/course"


def notebook(source: str) -> str:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    text = {
        "cells": [{"cell_type": "markdown", "source": ["# Größe"]}, cell | {"source": [source]}]
    }
    return json.dumps(text, indent=1, ensure_ascii=False) + "\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the real places, with a notebook beside those of the book, and the labs."""
    for name in ("_config.yml", "README.md", "CITATION.cff", "environment.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "book").mkdir()
    for path in [*(ROOT / "book").glob("*.ipynb"), ROOT / "book/index.md"]:
        shutil.copy(path, tmp_path / "book" / path.name)
    (tmp_path / "book" / "more.ipynb").write_text(notebook(first_cell("")), "utf-8")
    for path in LABS:
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / path, tmp_path / path)
    address.write(tmp_path, "")
    return tmp_path


def setup_cell(text: str) -> str:
    cells = json.loads(text)["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))


def contents(folder: Path) -> dict[str, str]:
    """Texts by name; a page of the book and its lab share one, so a lab has its path."""
    return {
        p.name
        if p.parent in (folder, folder / "book")
        else str(p.relative_to(folder)): p.read_text("utf-8")
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_the_checkout_agrees_with_its_own_configuration() -> None:
    lines, agree = address.report(ROOT)
    assert agree, "\n".join(lines)


def test_without_an_address_none_is_invented(checkout: Path) -> None:
    assert address.read(checkout) == ""
    assert address.check(checkout) == []
    for name, text in contents(checkout).items():
        if name == "_config.yml":  # its launch hosts are left out while there is no address
            continue
        own = setup_cell(text) if name.endswith(".ipynb") else text
        for word in ("github.com/", "colab.research", "mybinder", "github.io"):
            assert word not in own, f"{name} names {word}"
    assert "REPOSITORY needs" in contents(checkout)["more.ipynb"]


def test_an_address_is_written_everywhere_and_taken_away_again(checkout: Path) -> None:
    before = contents(checkout)
    changed = {path.name for path in address.write(checkout, GITHUB + ".git")}
    assert {"_config.yml", "README.md", "CITATION.cff", "environment.yml", "more.ipynb"} <= changed
    after = contents(checkout)
    assert address.read(checkout) == GITHUB
    assert address.check(checkout) == []
    assert f"git clone {GITHUB} course" in after["README.md"]
    assert f"git clone {GITHUB} course" in after["index.md"]
    assert "https://someone.github.io/some-course/" in after["README.md"]
    assert "https://codespaces.new/someone/some-course)" in after["README.md"]
    assert f'repository-code: "{GITHUB}"' in after["CITATION.cff"]
    assert "https://mybinder.org/v2/gh/someone/some-course/" in after["environment.yml"]
    for name in after:
        if name.endswith(".ipynb"):
            assert f'REPOSITORY = \\"{GITHUB}\\"' in after[name]
    address.write(checkout, "")
    assert contents(checkout) == before


def test_writing_twice_changes_nothing(checkout: Path) -> None:
    address.write(checkout, GITHUB)
    assert address.write(checkout, GITHUB) == []


def test_labs_take_the_address_too_and_none_counts_as_edited(checkout: Path) -> None:
    assert LABS
    before = {path: (checkout / path).read_bytes() for path in LABS}
    stale = releases.stale(checkout)
    changed = set(address.write(checkout, GITHUB))
    assert {checkout / path for path in LABS} <= changed
    assert releases.stale(checkout) == stale
    assert [made.kept for made in releases.write(checkout)] == [None] * len({p.stem for p in LABS})
    assert releases.stale(checkout) == []
    address.write(checkout, "")
    assert releases.stale(checkout) == []
    sources = [path for path in LABS if path.parts[1] == "source"]
    assert all((checkout / path).read_bytes() == before[path] for path in sources)


def test_a_copy_of_an_edited_release_is_left_alone(checkout: Path) -> None:
    release = checkout / next(path for path in LABS if path.parts[1] == "release")
    mine = release.with_name(f"{release.stem}.edited-1.ipynb")
    mine.write_text("mine")
    assert mine not in address.write(checkout, GITHUB)
    assert mine.read_text() == "mine"


def test_another_host_gets_no_links_of_github(checkout: Path) -> None:
    address.write(checkout, ELSEWHERE)
    assert address.check(checkout) == []
    text = contents(checkout)
    assert f"git clone {ELSEWHERE}" in text["README.md"]
    assert "github.io" not in text["README.md"]
    assert "# Binder" not in text["environment.yml"]
    assert address.pages_address(ELSEWHERE) is None


def test_a_place_that_was_forgotten_is_named(checkout: Path) -> None:
    address.write(checkout, GITHUB)
    citation = checkout / "CITATION.cff"
    citation.write_text(citation.read_text("utf-8").replace("someone", "nobody"), "utf-8")
    lines, agree = address.report(checkout)
    assert not agree
    assert address.check(checkout) == [citation]
    assert any("CITATION.cff" in line for line in lines)


def test_a_notebook_without_the_setup_cell_stops_everything(checkout: Path) -> None:
    (checkout / "book" / "own.ipynb").write_text(notebook("import torch"), "utf-8")
    before = contents(checkout)
    with pytest.raises(ValueError, match=r"own\.ipynb: .* must be the set-up cell"):
        address.write(checkout, GITHUB)
    assert contents(checkout) == before


@pytest.mark.parametrize(
    "wrong",
    ["github.com/a/b", "http://github.com/a/b", "https://github.com/a", "https://github.com/a/b c",
     'https://github.com/a/b"', "https://github.com/a/b\nurl: x", "git@github.com:a/b"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_a_sentence(checkout: Path, wrong: str) -> None:
    before = contents(checkout)
    with pytest.raises(ValueError, match="https://<host>/<owner>/<name>"):
        address.write(checkout, wrong)
    assert contents(checkout) == before


def test_a_configuration_without_the_line_says_what_to_add(checkout: Path) -> None:
    (checkout / "_config.yml").write_text("title: x\n", "utf-8")
    with pytest.raises(ValueError, match="`url:` under `repository:`"):
        address.write(checkout, GITHUB)


def test_the_command_shows_sets_and_refuses(checkout: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "labcore", "address", *words]
        return subprocess.run(call, cwd=checkout, capture_output=True, text=True)

    shown = command()
    assert shown.returncode == 0
    assert "none yet" in shown.stdout
    assert "written: README.md" in command(GITHUB).stdout
    assert GITHUB in command().stdout
    refused = command("nonsense")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
