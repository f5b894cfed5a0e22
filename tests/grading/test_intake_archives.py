"""Archives that lie, break out, blow up or are damaged: one row each, and nothing let out."""

from __future__ import annotations

import os
import random
import re
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from labcore.grading.intake import collection, files, student
from tests.grading.handed_in import (
    LABS,
    by_student,
    notebook,
    put,
    taken,
    texts,
    tree,
    zip_bytes,
    zipped,
)

SLIPS = [
    "../anna/mini.ipynb",
    "/anna/mini.ipynb",
    "anna/../../mini.ipynb",
    "anna/../bo/mini.ipynb",
    "C:/anna/mini.ipynb",
    "C:mini.ipynb",
    "anna\\mini.ipynb",
    "..\\..\\mini.ipynb",
    "\\\\server\\share\\mini.ipynb",
    "../mini.zip",
]


@pytest.mark.parametrize("slip", SLIPS)
def test_a_path_that_leads_out_is_a_row_and_nothing_is_written(tmp_path: Path, slip: str) -> None:
    here = tmp_path / "deep" / "er"
    here.mkdir(parents=True)
    archive = zipped(here / "x.zip", {slip: notebook("evil"), "bo/mini.ipynb": notebook("b")})
    before = tree(tmp_path)
    found = collection.collect(archive, here / "work", LABS)
    said = texts(found)
    assert said.pop(("bo", "mini")) == "b"
    ((student, _),) = said
    assert student == "" and set(said.values()) == {"its path leads out of the archive"}
    assert [path.name for path in (here / "work").iterdir()] == ["00001-000.ipynb"]
    (here / "work" / "00001-000.ipynb").unlink()
    (here / "work").rmdir()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("slip", SLIPS[:-1])
def test_a_path_that_leads_out_of_a_students_own_archive(tmp_path: Path, slip: str) -> None:
    inner = zip_bytes({slip: notebook("evil"), "lion.ipynb": notebook("fine")})
    (tmp_path / "in").mkdir()
    archive = zipped(tmp_path / "in" / "x.zip", {"anna.zip": inner, "bo/mini.ipynb": notebook()})
    before = tree(tmp_path)
    found = collection.collect(archive, tmp_path / "in" / "work", LABS)
    assert ("anna", "lion") in by_student(found)
    assert [s.problem for s in found if s.lab not in ("lion",) and s.student == "anna"] == [
        "its path leads out of the archive"
    ]
    for path in (tmp_path / "in" / "work").iterdir():
        path.unlink()
    (tmp_path / "in" / "work").rmdir()
    assert tree(tmp_path) == before


def special(name: str, mode: int, content: bytes = b"/etc/passwd") -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info, content


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (stat.S_IFLNK | 0o777, "the file is a link"),
        (stat.S_IFIFO | 0o644, "it is not a regular file"),
        (stat.S_IFCHR | 0o644, "it is not a regular file"),
        (stat.S_IFREG | 0o644, ""),
    ],
)
def test_links_and_devices_are_not_followed(tmp_path: Path, mode: int, problem: str) -> None:
    entries = [special("anna/mini.ipynb", mode), special("bo/mini.ipynb", stat.S_IFREG)]
    archive = zipped(tmp_path / "x.zip", entries)  # type: ignore[arg-type]
    rows = by_student(taken(archive, tmp_path))
    assert rows["anna", "mini"].problem == problem and rows["bo", "mini"].problem == ""
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "work").iterdir())


def patched(archive: Path, name: str, change: Callable[[bytearray, int, int], None]) -> None:
    """Changes the two headers of an entry: change(content, local header, central header)."""
    content = bytearray(archive.read_bytes())
    local = content.index(name.encode()) - 30
    central = content.rindex(name.encode()) - 46
    assert content[local : local + 4] == b"PK\x03\x04"
    assert content[central : central + 4] == b"PK\x01\x02"
    change(content, local, central)
    archive.write_bytes(content)


def encrypt(content: bytearray, local: int, central: int) -> None:
    content[local + 6] |= 1
    content[central + 8] |= 1


def lie_small(content: bytearray, local: int, central: int) -> None:
    content[local + 22 : local + 26] = content[central + 24 : central + 28] = struct.pack("<L", 10)


def lie_large(content: bytearray, local: int, central: int) -> None:
    content[central + 24 : central + 28] = struct.pack("<L", 4_000_000_000)


def flip(content: bytearray, local: int, central: int) -> None:
    content[local + 30 + len("anna/mini.ipynb") + 20] ^= 0xFF


def rename(content: bytearray, local: int, central: int) -> None:
    content[local + 30] = ord("x")


def unknown_method(content: bytearray, local: int, central: int) -> None:
    content[local + 8] = content[central + 10] = 97


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (encrypt, "the file is encrypted"),
        (lie_small, "the file is damaged in the archive"),
        (flip, "the file is damaged in the archive"),
        (rename, "the file is damaged in the archive"),
        (unknown_method, "its compression method is not supported; make an ordinary zip"),
    ],
)
def test_a_damaged_entry_is_that_students_problem(
    tmp_path: Path, change: Callable[[bytearray, int, int], None], problem: str
) -> None:
    content = notebook(" ".join(map(str, range(9000))))
    archive = zipped(
        tmp_path / "x.zip", {"anna/mini.ipynb": content, "bo/mini.ipynb": notebook("b")}
    )
    patched(archive, "anna/mini.ipynb", change)
    assert texts(taken(archive, tmp_path)) == {("anna", "mini"): problem, ("bo", "mini"): "b"}


def test_a_size_that_an_archive_states_too_large_harms_nobody(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "x.zip", {"anna/mini.ipynb": notebook("a")})
    patched(archive, "anna/mini.ipynb", lie_large)
    (one,) = taken(archive, tmp_path)
    assert one.problem in ("", "the file is damaged in the archive")


def test_packings_that_unpack_without_bound_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/mini.ipynb", notebook(), zipfile.ZIP_BZIP2)
        archive.writestr("b/mini.ipynb", notebook(), zipfile.ZIP_LZMA)
        archive.writestr("c/mini.ipynb", notebook(), zipfile.ZIP_STORED)
    problems = [one.problem for one in taken(tmp_path / "x.zip", tmp_path)]
    assert [bool(one) for one in problems] == [True, True, False]


def test_bombs_are_their_students_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "MAX_BYTES", 3_000_000)
    noise = os.urandom(3_000_001)
    many = {f"{number}/mini.ipynb": b"" for number in range(files.MAX_ENTRIES + 1)}
    entries = {
        "ratio/mini.ipynb": b" " * 2_900_000,
        "large/mini.ipynb": noise,
        "many.zip": zip_bytes(many),
        "zipped/mini.zip": zip_bytes({"mini.ipynb": b" " * 2_900_000}),
        "empty.zip": zip_bytes({}),
        "fine/mini.ipynb": notebook("x" * 500_000),
    }
    said = texts(taken(zipped(tmp_path / "x.zip", entries), tmp_path))
    assert said.pop(("fine", "mini")) == "x" * 500_000
    assert said == {
        ("ratio", "mini"): "the file unpacks to more than 200 times its packed size",
        ("large", "mini"): "the file is larger than 3 MB",
        ("many", "'many'"): "archive: it has more than 20000 entries",
        ("zipped", "mini"): "the file unpacks to more than 200 times its packed size",
        ("empty", "'empty'"): "archive: the archive is empty",
    }


def test_one_student_cannot_use_up_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student, "STUDENT_BYTES", 3_000_000)
    monkeypatch.setattr(collection, "TOTAL_BYTES", 12_000_000)
    noise = {f"{n}.ipynb": os.urandom(1_000_000) for n in range(20)}
    archive = zipped(
        tmp_path / "x.zip",
        {**{f"anna/{name}": text for name, text in noise.items()}, "bo/mini.ipynb": notebook("b")},
    )
    rows = by_student(taken(archive, tmp_path))
    assert rows["bo", "mini"].problem == ""
    problems = {one.problem for key, one in rows.items() if key[0] == "anna"}
    assert problems == {"more than 3 MB from one student", "there is no lab with this name"}


def test_an_archive_above_the_limit_in_all_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "TOTAL_BYTES", 2_000_000)
    entries = {f"s{number}/mini.ipynb": os.urandom(500_000) for number in range(5)}
    with pytest.raises(ValueError, match="unpacks to more than"):
        taken(zipped(tmp_path / "x.zip", entries), tmp_path)


def test_a_name_that_is_there_twice_is_not_guessed_between(tmp_path: Path) -> None:
    entries = [("anna/mini.ipynb", notebook("a")), ("anna/mini.ipynb", notebook("b")),
               ("bo/mini.ipynb", notebook("c"))]  # fmt: skip
    assert texts(taken(zipped(tmp_path / "x.zip", entries), tmp_path)) == {
        ("anna", "mini"): "the archive has this name twice",
        ("bo", "mini"): "c",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a readable zip archive"),
        (b"Rar!\x1a\x07\x00" + b"x" * 100, "not a readable zip archive"),
        (zip_bytes({"anna/mini.ipynb": b"x" * 999})[:-40], "not a readable zip archive"),
        (zip_bytes({}), "the archive is empty"),
        (zip_bytes({"readme.txt": "x"}), "has no student's files"),
        (zip_bytes({"anna/": ""}), "has no student's files"),
    ],
    # A zip's bytes hold the time: no name for a test that two processes have to find alike.
    ids=["empty file", "rar", "cut off", "no entries", "no student", "empty folder"],
)
def test_an_archive_that_cannot_be_read_gets_one_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(ValueError, match=said) as problem:
        taken(tmp_path / "x.zip", tmp_path)
    assert "\n" not in str(problem.value) and str(tmp_path / "x.zip") in str(problem.value)


def test_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 3)
    archive = zipped(tmp_path / "x.zip", {f"s{n}/mini.ipynb": notebook() for n in range(4)})
    with pytest.raises(ValueError, match="4 entries, more than 3"):
        taken(archive, tmp_path)


def test_places_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "class", {"anna/mini.ipynb": notebook()})
    put(tmp_path / "full", {"x": "y"})
    for source, work, said in [
        (folder, folder / "work", "is inside"),
        (folder, folder, "is inside"),
        (folder, tmp_path / "full", "is not empty"),
        (folder, tmp_path / "full" / "x", "is not empty"),
        (tmp_path / "none.zip", tmp_path / "w", "does not exist"),
        (tmp_path / "full" / "x", tmp_path / "w", "is not a folder, .zip"),
    ]:
        with pytest.raises(ValueError, match=said):
            collection.collect(source, work, LABS)
    assert (tmp_path / "full" / "x").read_text() == "y"


PIECES = (
    *("anna", "李 雷", "..", ".", "", "mini", "mini.ipynb", "lion-1.ipynb", "x.zip", "a\\b", "C:"),
    *("\x07", "x_1_2_mini.ipynb", "A_1_assignsubmission_file", "=1", "z" * 300, "__MACOSX"),
    *("L_u_attempt_2024-01-01-00-00-00_mini.ipynb", "Jose\u0301", " ", "é"),
)


def test_any_archive_gives_rows_or_one_sentence_and_stays_inside(tmp_path: Path, seed: int) -> None:
    """Archives of names put together at random, half of them with bytes changed or cut off."""
    draw = random.Random(seed)
    here = tmp_path / "here"
    here.mkdir()
    before, rows, refusals = tree(tmp_path), 0, 0
    for number in range(150):
        names = ["/".join(draw.choices(PIECES, k=draw.randint(1, 4))) or "x" for _ in range(6)]
        inner = zip_bytes((name, notebook()) for name in names[:2])
        content = bytearray(zip_bytes((name, draw.choice([inner, notebook()])) for name in names))
        for _ in range(draw.choice([0, 1, 10])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        archive = here / "x.zip"
        archive.write_bytes(content[: draw.choice([None, None, None, -30])])
        work = here / f"work{number}"
        try:
            found = collection.collect(archive, work, LABS)
        except ValueError as problem:
            assert "\n" not in str(problem)
            found, refusals = [], refusals + 1
        rows += len(found)
        for one in found:
            assert one.problem or one.path.parent == work
            assert one.student.isprintable() and "/" not in one.student
            assert one.lab in LABS or one.problem
        for path in work.iterdir():
            assert re.fullmatch(r"[0-9]{5}-[0-9]{3}\.ipynb", path.name)
            path.unlink()
        work.rmdir()
        archive.unlink()
        assert tree(tmp_path) == before
    assert rows > 50 and refusals > 5
