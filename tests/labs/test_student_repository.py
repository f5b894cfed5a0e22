"""The repository for students: what it holds, what it refuses to hold, and its updates."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from labcore.labs import leaks, releases, student_repository, variants
from labcore.labs.source import HIDDEN, SOLUTION, cell_text, code_tree, regions
from tests.labs import mini

ROOT = Path(__file__).resolve().parents[2]
# Quotes, a letter beyond ASCII: a notebook keeps both as escapes.
HIDDEN_LINE = 'assert square(-3) == 9, "größer, \\t hidden"'
SOLUTION_LINE = "return secret_two * x"
PRIVATE = "tests/labs/test_answers.py"


def git(folder: Path, *arguments: str, data: str = "") -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for who in ("AUTHOR", "COMMITTER"):
        plain |= {f"GIT_{who}_NAME": "Private Person", f"GIT_{who}_EMAIL": "private@example.org"}
        plain[f"GIT_{who}_DATE"] = "1700000000 +0300"
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, input=data, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(root: Path, message: str = "work on the hidden tests") -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "--allow-empty", "-m", message)


def add(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


FILES = {
    "_toc.yml": "root: book/index\nchapters:\n  - file: book/page\n    sections:\n"
    "      - file: labs/release/mini/mini\n",
    "book/teaching/answers.md": "# What a full answer has\n",
    "_config.yml": "title: A small course\n",
    ".gitignore": "my/\n_build/\n*.dat\n",
    "src/labcore/tracked all the same.dat": "numbers",
    "book/index.md": "# Index\n",
    "book/page.ipynb": '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "book/notes for teachers.md": "not in the table of contents\n",
    "src/labcore/__init__.py": '"""The package."""\n',
    "src/labcore/empty.py": "",
    "LICENSE": "BSD\n",
    "README.md": "for instructors\n",
    "grades.csv": "Ada,5\n",
    PRIVATE: f"{HIDDEN_LINE}\n",
    "tests/__init__.py": "",
}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A small course in git, its one lab released, two commits."""

    def awkward(notebook: mini.Notebook) -> None:
        test = mini.cell(notebook, "square-test")
        old = "assert square(-3) == 9, 'hidden square'"
        test["source"] = test["source"].replace(old, HIDDEN_LINE)
        assert HIDDEN_LINE in test["source"]

    root = mini.checkout(tmp_path / "the course", awkward)
    for path, text in FILES.items():
        add(root, path, text)
    mini.released(root)
    git(root, "init", "-q")
    git(root, "add", "--force", "src/labcore")
    commit(root)
    commit(root, "more")
    return root


def test_it_holds_what_is_on_the_list_in_one_commit_of_nobody(course: Path, tmp_path: Path) -> None:
    out = tmp_path / "not/there yet/for students"
    (said,) = student_repository.write(course, out)
    assert str(out) in said and "made" in said
    listed = git(out, "ls-files").splitlines()
    assert sorted(listed) == [
        ".gitignore", "AGENTS.md", "LICENSE", "README.md", "_config.yml", "_toc.yml",
        "book/index.md",
        "book/page.ipynb", "labs/release/mini/mini.ipynb", "src/labcore/__init__.py",
        "src/labcore/empty.py", "src/labcore/tracked all the same.dat",
    ]  # fmt: skip
    for path in listed:
        if path not in ("AGENTS.md", "README.md"):
            assert (out / path).read_bytes() == (course / path).read_bytes()
    assert "for instructors" not in (out / "README.md").read_text("utf-8")
    assert "[größer](labs/release/mini/mini.ipynb) | 10 |" in (out / "README.md").read_text("utf-8")
    assert git(out, "status", "--porcelain") == ""
    who = "The labcore authors <labcore@localhost> 1700000000"
    told = git(out, "log", "--format=%an <%ae> %at;%cn <%ce> %ct;%s;%P").strip()
    assert told == f"{who};{who};The course as of 2023-11-14;"
    assert list(out.parent.iterdir()) == [out]
    assert not (out / ".git/hooks").exists()


def test_same_commit_gives_the_same_commit_anywhere(course: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(course), "a clone")
    heads = set()
    for root, out in ((course, "one"), (course, "an/other"), (tmp_path / "a clone", "three")):
        student_repository.write(root, tmp_path / out)
        heads.add(git(tmp_path / out, "rev-parse", "HEAD"))
    assert len(heads) == 1


def everything_else(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if ".git" not in path.parts}


LEAKS = {
    "hidden test in a page": ("book/index.md", HIDDEN_LINE, "hidden test of mini"),
    "hidden test in the package": ("src/labcore/new.py", f"    {HIDDEN_LINE}", "hidden test"),
    "hidden test in the licence": ("LICENSE", f"word{HIDDEN_LINE}word", "hidden test"),
    "hidden test in a chapter": (
        "book/page.ipynb",
        json.dumps({"cells": [{"source": [f"{HIDDEN_LINE}\n", "x"]}]}),
        "hidden test",
    ),
    "hidden test in a string of a page": (
        "book/page.ipynb",
        json.dumps({"cells": [{"source": f"x\n    {HIDDEN_LINE}\ny"}]}),
        "hidden test",
    ),
    "solution in a page": ("book/index.md", f"> {SOLUTION_LINE}", "solution of mini"),
    "a private file under a public name": (
        "book/_assets/figure.svg", FILES["grades.csv"], "grades.csv"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "text", "what"), LEAKS.values(), ids=LEAKS)
def test_what_would_leak_is_refused_and_nothing_is_left_behind(
    course: Path, tmp_path: Path, path: str, text: str, what: str
) -> None:
    add(course, path, text)
    commit(course)
    before = everything_else(tmp_path)
    with pytest.raises(ValueError, match="nothing was written") as caught:
        student_repository.write(course, tmp_path / "new/out")
    assert what in str(caught.value) and path in str(caught.value)
    assert everything_else(tmp_path) == before


def test_a_release_with_an_answer_in_it_is_refused(course: Path, tmp_path: Path) -> None:
    path = releases.release_path(course, "mini")
    notebook = mini.read(path)
    mini.cell(notebook, "double")["source"] = [f"def double(x):\n    {SOLUTION_LINE}"]
    mini.save(notebook, path)
    commit(course)
    with pytest.raises(ValueError, match="mini.ipynb has a solution .*: return secret_two"):
        student_repository.write(course, tmp_path / "out")


def test_package_may_hold_solutions_and_shared_hidden_test_lines(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(course, "src/labcore/answers.py", f"def double(x):\n    {SOLUTION_LINE}\n")
    commit(course)
    student_repository.write(course, tmp_path / "one")
    add(course, "src/labcore/answers.py", f"{HIDDEN_LINE}\n")
    commit(course)
    with pytest.raises(ValueError, match="hidden test"):
        student_repository.write(course, tmp_path / "two")
    add(tmp_path, "shared.txt", f"{HIDDEN_LINE}\n")
    monkeypatch.setattr(leaks, "SHARED", tmp_path / "shared.txt")
    shutil.copy(course / PRIVATE, course / "tests/other.py")  # its bytes are in the package now
    (course / PRIVATE).unlink()
    add(course, "tests/other.py", "something else\n")
    commit(course)
    student_repository.write(course, tmp_path / "two")


@pytest.mark.parametrize("public", ["book/index.md", "src/labcore/new.py"])
def test_the_classs_secret_and_key_stay_here(course: Path, tmp_path: Path, public: str) -> None:
    add(tmp_path, "roster.csv", "student\n李 雷\n")
    variants.write(course, tmp_path / "roster.csv", course / variants.SECRET, course / variants.OUT)
    for private in (variants.SECRET, variants.KEY):
        line = (course / private).read_text("utf-8").splitlines()[-1] + " and more words"
        (course / variants.KEY).write_text(line, "utf-8") if private == variants.KEY else None
        add(course, public, f"see {line}")
        commit(course)
        with pytest.raises(ValueError, match=f"{public} has a line of {private}"):
            student_repository.write(course, tmp_path / "out")


def test_only_committed_states_of_public_files_are_taken(course: Path, tmp_path: Path) -> None:
    add(course, PRIVATE, "changed")
    add(course, "src/labcore/not added.py", "new = 1")
    student_repository.write(course, tmp_path / "one")
    assert not (tmp_path / "one/src/labcore/not added.py").exists()
    for stage in (False, True):
        add(course, "book/index.md", "# Changed")
        if stage:
            git(course, "add", "book/index.md")
        with pytest.raises(ValueError, match=r"commit or undo your changes first: book/index\.md"):
            student_repository.write(course, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_untracked_pages_links_and_non_checkouts_are_refused(course: Path, tmp_path: Path) -> None:
    git(course, "rm", "-q", "--cached", "book/page.ipynb")
    git(course, "commit", "-q", "-m", "x")
    with pytest.raises(ValueError, match="_toc.yml names files not tracked by git: book/page"):
        student_repository.write(course, tmp_path / "out")
    (course / "src/labcore/link.py").symlink_to(course / PRIVATE)
    commit(course)
    with pytest.raises(ValueError, match=r"regular files, not src/labcore/link\.py"):
        student_repository.write(course, tmp_path / "out")
    with pytest.raises(ValueError, match="is not a checkout of the course"):
        student_repository.write(tmp_path, tmp_path / "out")


def test_a_folder_with_anything_else_in_it_is_refused_as_it_is(
    course: Path, tmp_path: Path
) -> None:
    add(tmp_path, "full/thesis.txt", "mine")
    add(tmp_path, "file", "mine")
    add(tmp_path, "own/x.txt", "mine")
    git(tmp_path / "own", "init", "-q")
    commit(tmp_path / "own")
    for name, words in (
        ("full", "is not an earlier output"),
        ("file", "is not a folder"),
        ("own", "commits that this command did not make"),
        ("the course", "commits that this command did not make"),
    ):
        before = everything_else(tmp_path)
        with pytest.raises(ValueError, match=words):
            student_repository.write(course, tmp_path / name)
        assert everything_else(tmp_path) == before


def test_empty_folders_and_empty_repositories_are_accepted(course: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    git(tmp_path, "init", "-q", "--initial-branch=trunk", "new")
    git(tmp_path / "new", "remote", "add", "origin", "https://example.org/course.git")
    student_repository.write(course, tmp_path / "empty")
    student_repository.write(course, tmp_path / "new")
    for name in ("empty", "new"):
        assert git(tmp_path / name, "status", "--porcelain") == ""
    heads = {git(tmp_path / name, "rev-parse", "HEAD") for name in ("empty", "new")}
    assert len(heads) == 1 and "example.org" in git(tmp_path / "new", "remote", "-v")
    assert git(tmp_path / "new", "branch", "--show-current").strip() == "trunk"


def released_anew(course: Path, value: str) -> None:
    """Another release of the lab, committed."""
    notebook = mini.read(mini.source_path(course))
    mini.cell(notebook, "more")["source"] = f"secret_two = {value}"
    mini.save(notebook, mini.source_path(course))
    releases.write(course)
    git(course, "rm", "-q", "--ignore-unmatch", "src/labcore/empty.py")
    commit(course)


def test_an_update_is_a_commit_on_top_that_students_pull(course: Path, tmp_path: Path) -> None:
    out, student = tmp_path / "out", tmp_path / "a student's"
    student_repository.write(course, out)
    git(tmp_path, "clone", "-q", str(out), str(student))
    git(out, "remote", "add", "origin", "https://example.org/course.git")
    add(out, "_build/big.bin", "the instructor's")
    add(student, "my/mini-lab.ipynb", "the student's")
    first = git(out, "rev-parse", "HEAD")
    (said,) = student_repository.write(course, out)
    assert "unchanged" in said and git(out, "rev-parse", "HEAD") == first
    released_anew(course, "1 + 1")
    (said,) = student_repository.write(course, out)
    assert "a commit added" in said and git(out, "rev-parse", "HEAD~1") == first
    assert git(out, "rev-list", "--count", "HEAD").strip() == "2"
    assert git(out, "status", "--porcelain") == ""
    assert "example.org" in git(out, "remote", "-v") and (out / "_build/big.bin").is_file()
    git(student, "pull", "-q", "--ff-only")
    path = releases.release_path(student, "mini")
    assert path.read_bytes() == releases.release_path(course, "mini").read_bytes()
    assert not (student / "src/labcore/empty.py").exists()
    assert (student / "my/mini-lab.ipynb").read_text("utf-8") == "the student's"
    add(out, "book/index.md", "# The instructor's own change")
    released_anew(course, "2 * 1")
    with pytest.raises(ValueError, match="has changed or new files"):
        student_repository.write(course, out)
    assert (out / "book/index.md").read_text("utf-8") == "# The instructor's own change"


@pytest.mark.parametrize("text", [f"x {HIDDEN_LINE}", FILES["grades.csv"]], ids=["line", "file"])
def test_what_no_commit_reaches_is_searched_too(course: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    student_repository.write(course, out)
    name = git(out, "hash-object", "-w", "--stdin", data=text).strip()
    released_anew(course, "1 + 1")
    head = git(out, "rev-parse", "HEAD")
    with pytest.raises(ValueError, match=f"blob {name[:12]}"):
        student_repository.write(course, out)
    assert git(out, "rev-parse", "HEAD") == head and git(out, "status", "--porcelain") == ""


def test_an_earlier_commit_with_a_source_in_it_is_found(course: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    student_repository.write(course, out)
    message = git(out, "log", "-1", "--format=%B")
    add(out, "labs/source/mini/mini.ipynb", "{}")
    commit(out, message)
    git(out, "rm", "-q", "-r", "labs/source")
    commit(out, message)
    with pytest.raises(ValueError, match="labs/source/mini/mini.ipynb is in a commit"):
        student_repository.write(course, out)


# The course itself.


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The students' repository of this checkout as it stands, committed or not."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    root = tmp_path_factory.mktemp("course")
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in filter(None, listed.split("\0")):
        if (ROOT / path).is_file():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, root / path)
    git(root, "init", "-q")
    commit(root)
    out = tmp_path_factory.mktemp("public") / "out"
    student_repository.write(root, out)
    return out


def lines_of(kind: str) -> set[str]:
    """The long lines of all labs' regions of a kind."""
    found = set()
    for path in releases.source_paths(ROOT).values():
        for cell in mini.read(path)["cells"]:
            for region in regions(cell_text(cell), kind):
                found |= {line.strip() for line in region.split("\n")}
    return {line for line in found if len(line) >= 20}


def lines_in(text: str) -> Iterator[str]:
    """The lines of a file, of a notebook's cells too."""
    yield from map(str.strip, text.split("\n"))
    try:
        cells: Any = json.loads(text)["cells"]
    except (ValueError, KeyError, TypeError):
        return
    for cell in cells:
        yield from map(str.strip, cell_text(cell).split("\n"))


def test_no_file_and_no_object_of_the_courses_has_a_hidden_test(public: Path) -> None:
    shared = set(leaks.SHARED.read_text("utf-8").splitlines())
    hidden = lines_of(HIDDEN) - shared
    solutions = lines_of(SOLUTION)
    assert len(hidden) > 1000 and len(solutions) > 300
    files = [path for path in public.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) > 300
    for path in files:
        name = path.relative_to(public).as_posix()
        lines = set(lines_in(path.read_text("utf-8", errors="replace")))
        assert not lines & hidden, name
        assert name.startswith("src/labcore/") or not lines & solutions, name
    command = ["git", "-C", str(public), "cat-file", "--batch-all-objects", "--batch"]
    objects = subprocess.run(command, capture_output=True, check=True).stdout
    assert not {line.strip() for line in objects.decode(errors="replace").split("\n")} & hidden
    assert b"labs/source/lion" not in b"".join(
        path.read_bytes() for path in files if path.suffix in (".md", ".ipynb")
    )


def test_the_courses_table_of_contents_is_whole(public: Path) -> None:
    toc = (public / "_toc.yml").read_text("utf-8")
    assert toc == (ROOT / "_toc.yml").read_text("utf-8")
    assert not (public / "book/teaching").exists()
    pages = [line.split("file:")[1].strip() for line in toc.splitlines() if "file:" in line]
    assert len(pages) > 24
    for page in [*pages, yaml.safe_load(toc)["root"]]:
        assert any((public / f"{page}{ending}").is_file() for ending in (".md", ".ipynb")), page
    assert all(
        slug in (public / "README.md").read_text("utf-8") for slug in releases.source_paths(ROOT)
    )


def test_labs_import_only_from_the_repositorys_own_package(public: Path) -> None:
    imports = set()
    for path in sorted((public / "labs/release").rglob("*.ipynb")):
        for cell in mini.read(path)["cells"]:
            if cell["cell_type"] == "code" and cell["id"] != "setup":
                for one in ast.walk(code_tree(cell_text(cell))):
                    if isinstance(one, ast.Import | ast.ImportFrom):
                        imports.add(ast.unparse(one))
    ours = sorted(one for one in imports if "labcore" in one)
    assert len(ours) > 12
    code = [*sorted(imports), "import sys, labcore", "print(labcore.__path__[0])"]
    code.append("print(*{m.__file__ for n, m in sys.modules.items() if n.startswith('labcore.')})")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=public,
        env=os.environ | {"PYTHONPATH": str(public / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(public / "src/labcore")) for path in done.stdout.split())


def test_what_the_set_up_reads_is_there(public: Path) -> None:
    read = re.findall(r'"(scripts/[\w.]+)"', (public / "scripts/setup.py").read_text("utf-8"))
    assert read and [name for name in read if not (public / name).is_file()] == []
