"""What a class hands in, in folders and as learning systems export it: nothing lost."""

from __future__ import annotations

import struct
import zipfile
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from labcore.grading.intake import collection
from labcore.grading.intake.forms import lone, receipt, stamped
from labcore.grading.intake.submissions import find
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


def test_plain_folder_is_taken_as_is_and_its_dates_say_nothing(tmp_path: Path) -> None:
    folder = put(
        tmp_path / "class",
        {"anna/mini.ipynb": notebook("a"), "李 雷/lion/lion.ipynb": notebook("b")},
    )
    before = tree(folder)
    found = taken(folder, tmp_path)
    assert texts(found) == {("anna", "mini"): "a", ("李 雷", "lion"): "b"}
    assert {one.handed_in for one in found} == {None}
    assert all(folder in one.path.parents for one in found)
    assert tree(folder) == before and not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize("top", ["class", "class/submitted"])
def test_the_exchange_of_nbgrader_tells_when(tmp_path: Path, top: str) -> None:
    put(
        tmp_path / top,
        {
            "anna/mini/mini.ipynb": notebook("a"),
            "anna/mini/timestamp.txt": "2015-02-02 15:58:23.948203 UTC\n",
            "bo/mini/mini.ipynb": notebook("b"),
            "bo/mini/timestamp.txt": "yesterday",
        },
    )
    put(tmp_path / "class", {".nbgrader/x": ""})
    if top.endswith("submitted"):
        put(tmp_path / "class", {"source/mini/mini.ipynb": notebook("the answers")})
    rows = by_student(taken(tmp_path / "class", tmp_path))
    assert rows.keys() == {("anna", "mini"), ("bo", "mini")}
    moment = datetime(2015, 2, 2, 15, 58, 23, 948203, tzinfo=UTC)
    assert rows["anna", "mini"].handed_in == moment and not rows["anna", "mini"].notes
    assert rows["bo", "mini"].handed_in is None
    assert "timestamp.txt has no readable time" in rows["bo", "mini"].notes[0]


def test_a_student_may_be_called_submitted(tmp_path: Path) -> None:
    put(tmp_path, {"submitted/mini/mini.ipynb": notebook("a"), "other/x.ipynb": notebook()})
    assert ("submitted", "mini") in by_student(find(tmp_path, LABS))
    put(tmp_path / "alone", {"submitted/mini.ipynb": notebook("a")})
    assert by_student(find(tmp_path / "alone", LABS)).keys() == {("submitted", "mini")}


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2024-03-01 10:11:12.000001 UTC", 10),
        ("2024-03-01 10:11:12 GMT", 10),
        ("2024-03-01 10:11:12.5 +0200", 8),
        ("2024-03-01 10:11:12 +02:00", 8),
        ("2024-03-01 10:11:12 PST", None),
        ("2024-03-01 10:11:12", None),
        ("2024-13-01 10:11:12 UTC", None),
        ("0001-01-01 00:00:00 +0200", None),
        ("\x00", None),
        ("", None),
    ],
)
def test_a_timestamp_is_a_time_in_utc_or_none_and_a_note(text: str, hour: int | None) -> None:
    moment, notes = stamped(text.encode())
    assert (moment and moment.hour) == hour
    assert bool(notes) == (moment is None)
    assert moment is None or moment.utcoffset() is not None


def test_metadata_names_the_lab_of_a_renamed_file(
    tmp_path: Path,
) -> None:
    folder = put(
        tmp_path / "class",
        {
            "anna/final version.ipynb": notebook("a", slug="mini", kind="lab"),
            "bo/final.ipynb": notebook("b", slug="no such lab", kind="lab"),
            "cy/final.ipynb": notebook("c", slug=["mini"], kind="lab"),
            "di/lion (2).ipynb": notebook("d"),
            "ed/final.ipynb": b"[" * 100_000,
            "flo/final.ipynb": notebook("a chapter", slug="mini"),
        },
    )
    rows = by_student(taken(folder, tmp_path))
    assert texts(rows.values()) == {
        ("anna", "mini"): "a",
        ("di", "lion"): "d",
        **{
            (name, "'final'"): "there is no lab with this name"
            for name in ("bo", "cy", "ed", "flo")
        },
    }
    assert rows["anna", "mini"].notes == (
        "'final version.ipynb' is the lab mini, according to its metadata",
    )
    assert rows["di", "lion"].notes == ()


def test_a_folder_of_archives_and_folders(tmp_path: Path) -> None:
    folder = put(
        tmp_path / "class",
        {
            "anna.zip": zip_bytes({"any/depth/mini.ipynb": notebook("a"), "mini.py": "x"}),
            "bo/lion.ipynb": notebook("b"),
            "cy/work.ZIP": zip_bytes({"lion.ipynb": notebook("c")}),
            "di.zip": b"PK\x03\x04 no more",
            "ed/notes.pdf": "x",
            ".git/objects/pack.zip": "x",
        },
    )
    (folder / "link").symlink_to(folder / "bo")
    (folder / "bo" / "mini.ipynb").symlink_to(folder / "anna.zip")
    said = texts(taken(folder, tmp_path))
    assert said.pop(("di", "'di'")).startswith("archive: it is not a readable zip archive")
    assert said == {
        ("anna", "mini"): "a",
        ("bo", "lion"): "b",
        ("bo", "mini"): "it is a link or not a regular file",
        ("cy", "lion"): "c",
        ("ed", ""): "no lab notebook was handed in ('notes.pdf')",
        ("link", ""): "no lab notebook was handed in ('link')",
    }


# Learning systems

CANVAS = {
    "meieranna_4711_99012_mini.ipynb": notebook("a"),
    "李雷_LATE_12_99013_lion-1.ipynb": notebook("second"),
    "李雷_LATE_12_99001_lion.ipynb": notebook("first"),
    "anon_x7Yq2_31_mini.ipynb": notebook("c"),
    "LATE_anon_b2_32_mini.ipynb": notebook("d"),
    "o_neil2nd_77_5_in_flight_batching-2.ipynb": notebook("e"),
    "textwriter_9_text.html": "<p>",
    "zipper_3_44_all.zip": zip_bytes({"x/lion.ipynb": notebook("f"), "mini.ipynb": notebook("g")}),
}
SAID_OF_CANVAS = {
    ("meieranna_4711", "mini"): "a",
    ("李雷_12", "lion"): "second",
    ("anon_x7Yq2", "mini"): "c",
    ("anon_b2", "mini"): "d",
    ("o_neil2nd_77", "in_flight_batching"): "e",
    ("textwriter_9", ""): "no lab notebook was handed in ('textwriter_9_text.html')",
    ("zipper_3", "lion"): "f",
    ("zipper_3", "mini"): "g",
}


@pytest.mark.parametrize("wrapped", ["", "CS 101 lab_1_2_3 submissions/", "submissions/"])
def test_the_archive_of_canvas(tmp_path: Path, wrapped: str) -> None:
    entries = {wrapped + name: content for name, content in CANVAS.items()}
    rows = by_student(taken(zipped(tmp_path / "submissions.zip", entries), tmp_path))
    assert texts(rows.values()) == SAID_OF_CANVAS
    assert rows["李雷_12", "lion"].notes == (
        "Canvas marked it late",
        "handed in 2 times; the last one counts (lion-1.ipynb)",
    )
    assert rows["anon_b2", "mini"].notes == ("Canvas marked it late",)
    assert rows["meieranna_4711", "mini"].notes == ()
    assert {one.handed_in for one in rows.values()} == {None}


def test_export_unpacked_by_a_browser_is_read_like_its_archive(tmp_path: Path) -> None:
    assert texts(taken(put(tmp_path / "class", CANVAS), tmp_path)) == SAID_OF_CANVAS


MOODLE = {
    "Anna Meier_12_assignsubmission_file/mini.ipynb": notebook("a"),
    "Anna Meier_12_assignsubmission_onlinetext/onlinetext.html": "<p>",
    "Anna Meier_13_assignsubmission_file_/sub/lion.ipynb": notebook("b"),
    "李 雷_14_assignsubmission_file_/lion.ipynb": notebook("c"),
    "Team A-O'Neil, Dr. Bo_15_assignsubmission_file_lion.ipynb": notebook("d"),
    "Participant_16_assignsubmission_onlinetext/onlinetext.html": "<p>",
    "Cy_17_assignsubmission_file/lab.zip": zip_bytes({"mini/mini.ipynb": notebook("e")}),
}
SAID_OF_MOODLE = {
    ("Anna Meier_12", "mini"): "a",
    ("Anna Meier_13", "lion"): "b",
    ("李 雷_14", "lion"): "c",
    ("Team A-O'Neil, Dr. Bo_15", "lion"): "d",
    ("Participant_16", ""): "no lab notebook was handed in ('onlinetext.html')",
    ("Cy_17", "mini"): "e",
}


@pytest.mark.parametrize("wrapped", ["", "course-assignment/"])
def test_the_archive_of_moodle(tmp_path: Path, wrapped: str) -> None:
    entries = {wrapped + name: content for name, content in MOODLE.items()}
    assert texts(taken(zipped(tmp_path / "x.zip", entries), tmp_path)) == SAID_OF_MOODLE


def test_moodle_unpacked_and_one_student_alone(tmp_path: Path) -> None:
    assert texts(taken(put(tmp_path / "class", MOODLE), tmp_path)) == SAID_OF_MOODLE
    name = "Anna Meier_13_assignsubmission_file_/sub/lion.ipynb"
    alone = zipped(tmp_path / "x.zip", {name: MOODLE[name]})
    found = collection.collect(alone, tmp_path / "more", LABS)
    assert texts(found) == {("Anna Meier_13", "lion"): "b"}


def test_the_archive_of_blackboard(tmp_path: Path) -> None:
    first, second = "2024-03-01-10-11-12", "2024-03-02-08-00-00"
    entries = {
        f"Lab_1_ameier_attempt_{first}_mini.ipynb": notebook("first"),
        f"Lab_1_ameier_attempt_{second}_mini.ipynb": notebook("second"),
        f"Lab_1_ameier_attempt_{first}_lion.ipynb": notebook("lion"),
        f"Lab_1_ameier_attempt_{second}.txt": "Name: Anna (x) Meier (ameier)\nAssignment: Lab 1",
        f"Lab_1_li_lei_attempt_{first}_mini.ipynb": notebook("li"),
        f"Lab_1_li_lei_attempt_{first}.txt": "\ufeffNombre: 李 雷 (li_lei)\r\nx: (other)",
        f"Lab_1_bo_attempt_{first}.txt": "Name: Bo (bo)\n",
        "Lab_1_cy_attempt_2024-99-99-10-11-12_mini.ipynb": notebook("no time"),
    }
    rows = by_student(taken(zipped(tmp_path / "gradebook.zip", entries), tmp_path))
    assert texts(rows.values()) == {
        ("", "'Lab_1_cy_attempt_2024-99-99-10-11-12_mini'"): ("it is not in a student's folder"),
        ("ameier", "mini"): "second",
        ("ameier", "lion"): "lion",
        ("li_lei", "mini"): "li",
        ("bo", ""): f"no lab notebook was handed in ('Lab_1_bo_attempt_{first}.txt')",
    }
    assert rows["ameier", "mini"].handed_in == datetime(2024, 3, 2, 8, tzinfo=UTC)
    assert rows["ameier", "lion"].handed_in == datetime(2024, 3, 1, 10, 11, 12, tzinfo=UTC)
    assert rows["ameier", "mini"].notes == (
        "the time is from Blackboard's server, read as UTC",
        "handed in 2 times; the last one counts (mini.ipynb)",
    )


def test_without_a_receipt_the_last_word_is_the_user() -> None:
    name = "Lab_1_li_lei_attempt_2024-03-01-10-11-12_mini.ipynb"
    assert (place := lone(name)) and place.student == "lei"
    assert (place := lone(name, ["li_lei", "lei", "1_li"])) and place.student == "li_lei"
    assert receipt("notes.txt", "Name: Bo (bo)") == ""
    assert receipt("L_b_attempt_2024-03-01-10-11-12.txt", "Hello (bo)\nName: Bo (bo)") == ""


def test_two_files_of_one_attempt_are_not_guessed_between(tmp_path: Path) -> None:
    start = "Lab_anna_attempt_2024-03-01-10-11-12_"
    entries = {start + "mini.ipynb": notebook("a"), start + "mini-1.ipynb": notebook("b")}
    (one,) = taken(zipped(tmp_path / "x.zip", entries), tmp_path)
    assert "2 notebooks for one lab (mini-1.ipynb, mini.ipynb)" in one.problem


# Our own form


@pytest.mark.parametrize("wrapped", ["", "my class/"])
def test_our_own_form_in_an_archive(tmp_path: Path, wrapped: str) -> None:
    entries = {
        "anna/mini.ipynb": notebook("a"),
        "anna/lion/lion.ipynb": notebook("b"),
        "anna/lion/timestamp.txt": "2015-02-02 15:58:23.948203 UTC",
        "李 雷/mini-lab.ipynb": notebook("c"),
        "bo/mini.ipynb": notebook("d"),
        "bo/deep/er/mini-lab-3.ipynb": notebook("e"),
        "cy/other.ipynb": notebook("f"),
        "di/.ipynb_checkpoints/mini-checkpoint.ipynb": notebook("g"),
        "di/mini.ipynb": notebook("h"),
        "__MACOSX/di/._mini.ipynb": "x",
        "=1+1/mini.ipynb": notebook("i"),
    }
    archive = zipped(tmp_path / "x.zip", {wrapped + name: text for name, text in entries.items()})
    rows = by_student(taken(archive, tmp_path))
    assert texts(rows.values()) == {
        ("anna", "mini"): "a",
        ("anna", "lion"): "b",
        ("李 雷", "mini"): "c",
        ("bo", "mini"): "2 notebooks for one lab (deep/er/mini-lab-3.ipynb, mini.ipynb); keep one",
        ("cy", "'other'"): "there is no lab with this name",
        ("di", "mini"): "h",
        ("'=1+1'", ""): "its name must begin with a letter or digit and end without a dot or space",
    }
    assert rows["anna", "lion"].handed_in == datetime(2015, 2, 2, 15, 58, 23, 948203, tzinfo=UTC)
    assert rows["anna", "mini"].handed_in is None


@pytest.mark.parametrize(
    ("names", "students"),
    [
        (["anna/mini/mini.ipynb"], {"anna"}),
        (["anna/mini.ipynb", "anna/lion/lion.ipynb"], {"anna"}),
        (["class/anna/mini/mini.ipynb"], {"anna"}),
        (["class/anna/mini.ipynb", "class/bo/mini.ipynb", "readme.md"], {"anna", "bo"}),
        (["submitted/anna/mini/mini.ipynb"], {"anna"}),
        (["anna/mini.ipynb"], {"anna"}),
    ],
)
def test_one_wrapping_folder_is_told_from_a_student(
    tmp_path: Path, names: list[str], students: set[str]
) -> None:
    found = taken(zipped(tmp_path / "x.zip", {name: notebook() for name in names}), tmp_path)
    assert {one.student for one in found} == students


def test_a_student_cannot_say_when_something_was_handed_in(tmp_path: Path) -> None:
    """In an export a timestamp.txt is a file that the student put there."""
    early = "2001-01-01 00:00:00.0 UTC"
    inner = zip_bytes({"mini/mini.ipynb": notebook(), "mini/timestamp.txt": early})
    entries = {
        "Anna_12_assignsubmission_file/lion.ipynb": notebook("a"),
        "Anna_12_assignsubmission_file/timestamp.txt": early,
        "bo/mini.zip": inner,
        "Lab_cy_attempt_2024-03-01-10-11-12_mini.zip": inner,
    }
    found = by_student(taken(zipped(tmp_path / "x.zip", entries), tmp_path))
    assert {key: one.handed_in and one.handed_in.year for key, one in found.items()} == {
        ("Anna_12", "lion"): None,
        ("bo", "mini"): None,
        ("cy", "mini"): 2024,
    }


def test_an_archive_of_archives(tmp_path: Path) -> None:
    inner = zip_bytes({"mini.ipynb": notebook("a"), "more.zip": zip_bytes({"lion.ipynb": "x"})})
    for wrapped in ("", "class/"):
        entries = {f"{wrapped}anna.zip": inner, f"{wrapped}李 雷.zip": inner}
        archive = zipped(tmp_path / "x.zip", entries)
        found = collection.collect(archive, tmp_path / f"work{len(wrapped)}", LABS)
        assert texts(found) == {("anna", "mini"): "a", ("李 雷", "mini"): "a"}


def test_a_chapter_of_the_book_is_not_its_lab(tmp_path: Path) -> None:
    """Who hands in the whole course has two files of each name."""
    course = {
        "course/book/lion.ipynb": notebook("page", slug="lion", objectives=["x"]),
        "course/labs/release/lion/lion.ipynb": notebook("lab", slug="lion", kind="lab"),
    }
    archive = zipped(tmp_path / "x.zip", {"anna.zip": zip_bytes(course), "bo/lion.ipynb": "{}"})
    assert texts(s for s in taken(archive, tmp_path) if s.student == "anna") == {
        ("anna", "lion"): "lab"
    }


# Names


def test_students_whose_names_collide_as_files_stay_apart(tmp_path: Path) -> None:
    entries = {
        "Anna/mini.ipynb": notebook("a"),
        "anna/mini.ipynb": notebook("b"),
        "Jos\u00e9/mini.ipynb": notebook("c"),
        "Jose\u0301/mini.ipynb": notebook("d"),
    }
    rows = by_student(taken(zipped(tmp_path / "x.zip", entries), tmp_path))
    assert texts(rows.values()) == {
        ("Anna", "mini"): "a",
        ("anna (2)", "mini"): "b",
        ("Jos\u00e9", "mini"): "d",
        ("Jos\u00e9 (2)", "mini"): "c",
    }
    assert rows["anna (2)", "mini"].notes == (
        "called anna in the submission; renamed because Anna exists too",
    )
    assert rows["Anna", "mini"].notes == ()


def raw_name(archive: Path, mark: str, name: bytes) -> None:
    """Puts bytes in the place of an entry's ASCII name of the same length."""
    content = archive.read_bytes()
    assert len(mark) == len(name) and content.count(mark.encode()) == 2
    archive.write_bytes(content.replace(mark.encode(), name))


@pytest.mark.parametrize(
    ("name", "encoding", "said"),
    [
        ("李雷", "utf-8", "utf-8"),
        ("李雷", "gbk", "gbk"),
        ("李喆", "gbk", "gbk"),
        ("Jos\u00e9", "utf-8", "utf-8"),
        ("Müller", "cp437", "cp437"),
        ("Günther Größe", "cp437", "cp437"),
        ("Nuñez", "cp437", "cp437"),
    ],
)
def test_names_in_an_encoding_that_is_not_stated(
    tmp_path: Path, name: str, encoding: str, said: str
) -> None:
    written = name.encode(encoding)
    mark = "M" * len(written)
    archive = zipped(tmp_path / "x.zip", {f"{mark}/mini.ipynb": notebook("a"), "b/mini.ipynb": ""})
    raw_name(archive, f"{mark}/mini.ipynb", written + b"/mini.ipynb")
    rows = by_student(taken(archive, tmp_path))
    assert rows.keys() == {(name, "mini"), ("b", "mini")}
    (note,) = rows[name, "mini"].notes
    assert note.endswith(f"read as {said}") and not rows["b", "mini"].notes


def test_a_stated_name_is_taken(tmp_path: Path) -> None:
    """Info-ZIP and others put the name in UTF-8 beside one in the system's encoding."""
    plain, stated = "M\x84\x84/mini.ipynb", "Mää/mini.ipynb"
    field = b"\x01" + struct.pack("<L", zlib.crc32(plain.encode("latin-1"))) + stated.encode()
    info = zipfile.ZipInfo("Mxx/mini.ipynb")
    info.extra = struct.pack("<HH", 0x7075, len(field)) + field
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, notebook("a"))
        archive.writestr("b/mini.ipynb", b"")
    raw_name(tmp_path / "x.zip", "Mxx/mini.ipynb", plain.encode("latin-1"))
    rows = by_student(taken(tmp_path / "x.zip", tmp_path))
    assert rows["Mää", "mini"].notes == ()
