"""What a class hands in as git repositories: read, and never run."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from labcore.grading.intake import collection, repositories, student
from tests.grading.handed_in import (
    LABS,
    by_student,
    notebook,
    put,
    taken,
    texts,
    tree,
)

DAY = "2024-03-01T10:11:12+02:00"
WHO = {
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_AUTHOR_DATE": DAY,
    "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_COMMITTER_DATE": DAY,
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "init.defaultBranch=main", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | WHO, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def repository(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    put(folder, files)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=x")
    return folder


@pytest.fixture
def file_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repositories, "PROTOCOLS", ("https", "ssh", "file"))


def listed(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.usefixtures("file_allowed")
def test_notebooks_come_out_of_repositories(tmp_path: Path) -> None:
    anna = repository(
        tmp_path / "an-na李",
        {
            "labs/release/mini/mini.ipynb": notebook("a"),
            "book/mini.ipynb": notebook("page", slug="mini", objectives=["x"]),
            "scratch 李.ipynb": notebook("s"),
            "lion/mine.ipynb": notebook("b", slug="lion", kind="lab"),
        },
    )
    bo = repository(tmp_path / "bo", {"mini.ipynb": notebook("old")})
    git(bo, "checkout", "--quiet", "-b", "handed/in-1")
    put(bo, {"mini.ipynb": notebook("branch")})
    git(bo, "commit", "--quiet", "--all", "--message=y")
    git(bo, "checkout", "--quiet", "main")
    before = tree(tmp_path)
    rows = listed(
        tmp_path / "list.csv",
        "# the class of 2024",
        "URL; student ;branch",
        "",
        f"file://{anna};李 雷;",
        f"file://{bo};bo;handed/in-1",
    )
    found = by_student(taken(rows, tmp_path))
    assert texts(found.values()) == {
        ("李 雷", "mini"): "a",
        ("李 雷", "lion"): "b",
        ("bo", "mini"): "branch",
    }
    commit = git(anna, "rev-parse", "--short", "HEAD")
    one = found["李 雷", "mini"]
    assert one.handed_in == datetime(2024, 3, 1, 8, 11, 12, tzinfo=UTC)
    assert one.notes == (f"the time is from commit {commit}; its author can set it",)
    assert all(path.suffix == ".ipynb" for path in (tmp_path / "work").iterdir())
    rows.unlink()
    for path in (tmp_path / "work").iterdir():
        path.unlink()
    (tmp_path / "work").rmdir()
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("file_allowed")
def test_what_a_repository_sets_up_never_runs(tmp_path: Path) -> None:
    """Hooks, filters, links, submodules and attributes all need a work tree, which there is not."""
    mark = tmp_path / "ran"
    files = {
        ".gitattributes": "* filter=evil diff=evil text=auto eol=crlf\n",
        ".gitmodules": f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch {mark}"\n',
        ".lfsconfig": f"[lfs]\n\turl = file://{mark}\n",
        "mini.ipynb": notebook("a"),
    }
    anna = repository(tmp_path / "anna", files)
    (anna / "lion.ipynb").symlink_to("/etc/passwd")
    git(anna, "add", "lion.ipynb")
    head = git(anna, "rev-parse", "HEAD")
    git(anna, "update-index", "--add", "--cacheinfo", f"160000,{head},x")
    git(anna, "update-index", "--add", "--cacheinfo", f"160000,{head},in_flight_batching.ipynb")
    git(anna, "commit", "--quiet", "--message=y")
    for hook in ("post-checkout", "post-update", "reference-transaction", "fsmonitor"):
        path = anna / ".git" / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {mark}\n")
        path.chmod(0o755)
    found = taken(listed(tmp_path / "list.txt", f"anna,file://{anna}"), tmp_path)
    assert texts(found) == {("anna", "mini"): "a", ("anna", "lion"): "the file is a link"}
    assert not mark.exists()


@pytest.mark.parametrize(
    "address",
    [
        "ext::sh -c 'touch {mark}'",
        "ext::sh% -c% touch% {mark}",
        "--upload-pack=touch {mark}",
        "-utouch",
        "{plain}",
        "file://{plain}",
        "../anna",
        "http://example.org/x.git",
        "git://example.org/x.git",
        "ssh://-oProxyCommand=touch%20{mark}/x",
        "-oProxyCommand=touch@host:x",
        "a@-oProxyCommand=x:y",
        "fd::17/x",
        "a@ext::sh",
        "https://example.org/x .git",
    ],
)
def test_other_ways_to_name_a_repository_are_refused(tmp_path: Path, address: str) -> None:
    mark = tmp_path / "ran"
    plain = repository(tmp_path / "anna", {"mini.ipynb": notebook("a")})
    row = f'anna,"{address.format(mark=mark, plain=plain)}"'
    (one,) = taken(listed(tmp_path / "list.txt", row), tmp_path)
    assert one.problem == "its address must begin with https:// or ssh://"
    assert not mark.exists()


@pytest.mark.usefixtures("file_allowed")
def test_a_repository_that_fails_is_that_students_problem(tmp_path: Path) -> None:
    bo = repository(tmp_path / "bo", {"mini.ipynb": notebook("b"), "large.bin": os.urandom(999)})
    repository(tmp_path / "none", {"readme.md": "x", "notes.ipynb": notebook()})
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    rows = listed(
        tmp_path / "list.txt",
        "away,https://me:se@cret@127.0.0.1:1/x.git",
        f"bo,file://{bo}",
        f"cy,file://{bo},no-such-branch",
        f"di,file://{bo},--upload-pack=x",
        f"ed,file://{tmp_path}/empty",
        f"flo,file://{tmp_path}/none",
        f"../gil,file://{bo}",
        f"=1+1,file://{tmp_path}/nowhere",
    )
    said = texts(taken(rows, tmp_path))
    assert "127.0.0.1" in said["away", ""] and "cret" not in said["away", ""]
    assert said.pop(("away", "")).startswith("git: fatal:")
    assert said.pop(("cy", "")).startswith("git: fatal: Remote branch no-such-branch not found")
    assert said == {
        ("bo", "mini"): "b",
        ("di", ""): "'--upload-pack=x' is not a branch name",
        ("ed", ""): "the repository has no commit",
        ("flo", ""): "no lab notebook was handed in ('notes.ipynb')",
        ("'../gil'", ""): "its name has a character that a file name should not have",
        ("'=1+1'", ""): (
            "its name must begin with a letter or digit and end without a dot or space"
        ),
    }


@pytest.mark.usefixtures("file_allowed")
def test_repositories_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = repository(
        tmp_path / "large", {"x.bin": os.urandom(4_000_000), "mini.ipynb": notebook("a")}
    )
    monkeypatch.setattr(repositories, "REPOSITORY_BYTES", 2_000_000)
    (one,) = taken(listed(tmp_path / "a.txt", f"anna,file://{large}"), tmp_path)
    assert one.problem == "it is larger than 2 MB"
    assert not any((tmp_path / "work").iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(repositories, "PROTOCOLS", ("file",))
    monkeypatch.setattr(student, "MAX_BYTES", 1_000_000)
    bo = repository(tmp_path / "bo", {"mini.ipynb": b" " * 1_000_001, "lion.ipynb": notebook("b")})
    found = collection.collect(listed(tmp_path / "a.txt", f"bo,file://{bo}"), tmp_path / "b", LABS)
    assert texts(found) == {("bo", "mini"): "the file is larger than 1 MB", ("bo", "lion"): "b"}


def test_a_repository_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that git started: the program that holds the connection ends, too."""
    monkeypatch.setattr(repositories, "SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        address = f"https://127.0.0.1:{server.getsockname()[1]}/x.git"
        (one,) = taken(listed(tmp_path / "a.txt", f"anna,{address}"), tmp_path)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            while connection.recv(4096):
                pass
    assert one.problem == "git took longer than 2 s"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names no repository"),
        (b"# nobody\n\n", "names no repository"),
        (b"student,url\n", "names no repository"),
        (b"# x\nanna https://example.org/x\n", "line 2 of .* must be <student>,<address>"),
        (b"student;url\nanna;\n", "line 2 of .* must be <student>;<address>"),
        (b"anna,https://example.org/" + b"x" * 3000, "line 1 of .* has more than"),
        ("李,https://example.org/x".encode("gbk"), "is not in UTF-8"),
    ],
)
def test_a_list_that_is_none_gets_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "list.csv").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        taken(tmp_path / "list.csv", tmp_path)


def test_without_git_a_list_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="git is missing"):
        taken(listed(tmp_path / "a.txt", "anna,https://example.org/x.git"), tmp_path)


def test_a_students_repositories_are_one_students(tmp_path: Path, file_allowed: None) -> None:
    one = repository(tmp_path / "one", {"mini.ipynb": notebook("a")})
    two = repository(tmp_path / "two", {"x/mini.ipynb": notebook("b"), "lion.ipynb": notebook("c")})
    rows = listed(
        tmp_path / "a.txt", f"anna,file://{one}", f"anna,file://{two}", "anna,x", "anna,y"
    )
    assert texts(taken(rows, tmp_path)) == {
        ("anna", "mini"): "2 notebooks for one lab (mini.ipynb, x/mini.ipynb); keep one",
        ("anna", "lion"): "c",
        ("anna", ""): "its address must begin with https:// or ssh://",
    }
