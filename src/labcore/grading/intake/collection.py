"""Collects a class's submissions from a folder, an archive or a list of git addresses.

Nothing is run. Only notebooks are written, in a separate folder under numbers: no name that a
student chose becomes a path.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from labcore.grading.intake.files import (
    TOTAL_BYTES,
    Budget,
    Entry,
    Refused,
    folder_entries,
    opened,
    zip_entries,
)
from labcore.grading.intake.forms import Place, in_folder, lone, normal, of_moodle, receipt
from labcore.grading.intake.repositories import cloned, read_list
from labcore.grading.intake.student import ARCHIVE, NOTEBOOK, Student
from labcore.grading.intake.submissions import Submission, find

__all__ = ["collect"]

RECEIPT_BYTES = 100_000
CLONES = 4


def _unwrapped(entries: Sequence[Entry], labs: Container[str]) -> list[Entry]:
    """The entries without the single folder that may wrap them all.

    In "anna/lion/lion.ipynb", "anna" is not such a folder but a student's: it contains a lab's.
    """
    handed = [one for one in entries if one.suffix in (NOTEBOOK, ARCHIVE)]
    tops = {one.parts[0] for one in handed}
    top = next(iter(tops), "")
    if len(tops) != 1 or of_moodle(top) or any(len(one.parts) == 1 for one in handed):
        return list(entries)
    flat = [one for one in handed if len(one.parts) == 2]
    deep = [one for one in handed if len(one.parts) > 2]
    archives = [one for one in flat if one.suffix == ARCHIVE]
    wraps = (
        any(lone(one.parts[1]) for one in flat)
        or any(one.parts[1] not in labs for one in deep)
        or len(archives) > 1
    )
    if not wraps:
        return list(entries)
    return [
        replace(one, parts=one.parts[1:]) if one.parts[0] == top and len(one.parts) > 1 else one
        for one in entries
    ]


def _receipts(entries: Iterable[Entry]) -> list[str]:
    """The user names in Blackboard's receipts."""
    found = set()
    for one in entries:
        if len(one.parts) == 1 and one.suffix == ".txt" and not one.refused:
            with suppress(Refused):
                text = one.read(RECEIPT_BYTES).decode("utf-8", errors="replace")
                found.add(receipt(one.parts[0], text))
    return sorted(found - {""})


def _exported(
    entries: Iterable[Entry], source: Path, work: Path, labs: Container[str], total: Budget
) -> list[Submission]:
    """The submissions in the files of an export. Raises ValueError if there are none."""
    found: list[Submission] = []
    students: dict[str, list[tuple[Place, Entry]]] = {}
    safe = []
    for entry in sorted(entries, key=lambda one: one.parts):
        if entry.unsafe and entry.suffix in (NOTEBOOK, ARCHIVE):
            problem = "its path leads out of the archive"
            name = ascii("/".join(entry.parts))
            found.append(Submission(student="", lab=name, path=source, problem=problem))
        elif not (entry.unsafe or entry.hidden):
            safe.append(entry)
    safe = _unwrapped(safe, labs)
    receipts = _receipts(safe)
    for entry in safe:
        name = entry.parts[-1]
        place = in_folder(entry.parts) if len(entry.parts) > 1 else lone(name, receipts)
        if place is None and entry.suffix == ARCHIVE:
            place = Place(student=Path(name).stem, file=name)
        if place:
            students.setdefault(place.student, []).append((place, entry))
        elif entry.suffix == NOTEBOOK:
            problem = "it is not in a student's folder"
            lab = ascii(Path(name).stem)
            found.append(Submission(student="", lab=lab, path=source, problem=problem))
    for number, (name, handed) in enumerate(sorted(students.items()), 1):
        student = Student(
            name=name, number=number, source=source, work=work, labs=labs, total=total
        )
        found += student.submissions(handed)
    if not found:
        raise ValueError(f"{source} has no student's files; put <student>/<slug>.ipynb there")
    return found


def _is_export(folder: Path) -> bool:
    """Whether a folder is an unpacked export or contains archives; `find` reads neither."""
    tops = any(
        of_moodle(path.name) or (path.suffix.lower() == NOTEBOOK and lone(path.name))
        for path in folder.iterdir()
    )
    below = (path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(depth))
    return tops or any(path.suffix.lower() == ARCHIVE for path in below)


def _cloned(source: Path, work: Path, labs: Container[str], total: Budget) -> list[Submission]:
    """The submissions in the repositories of a list; a few are cloned at a time."""
    rows = read_list(source)
    if not shutil.which("git"):
        raise ValueError(f"{source} is a list of repositories, but git is missing; install git")

    def of_student(numbered: tuple[int, str]) -> list[Submission]:
        number, name = numbered
        student = Student(
            name=name,
            number=number,
            source=source,
            work=work,
            labs=labs,
            total=total,
            strangers=False,
        )
        if refused := student.refused():
            return [refused]
        with ExitStack() as clones:
            handed: list[tuple[Place, Entry]] = []
            problems: list[str] = []
            for row in (row for row in rows if row.student == name):
                try:
                    handed += clones.enter_context(cloned(row, work))
                except Refused as problem:
                    problems.append(str(problem))
            found = list(student.submissions(handed)) if handed or not problems else []
            return [*found, *map(student.problem, dict.fromkeys(problems))]

    with ThreadPoolExecutor(max_workers=CLONES) as pool:
        names = sorted({row.student for row in rows})
        return list(itertools.chain.from_iterable(pool.map(of_student, enumerate(names, 1))))


def _distinct(found: Iterable[Submission]) -> Iterator[Submission]:
    """Renames students whose names a file system may confuse: the second becomes "anna (2)"."""
    found = list(found)
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in sorted({one.student for one in found}):
        new, number = normal(name), 1
        while new.casefold() in taken:
            number += 1
            new = f"{normal(name)} ({number})"
        names[name] = taken[new.casefold()] = new
    for one in found:
        new, plain = names[one.student], normal(one.student)
        notes = one.notes
        if new != plain:
            other = taken[plain.casefold()]
            notes += (f"called {plain} in the submission; renamed because {other} exists too",)
        yield replace(one, student=new, notes=notes)


def collect(source: Path, work: Path, labs: Container[str]) -> list[Submission]:
    """The submissions in source; the notebooks of an archive or a list are written to work.

    source: only read. It is one of
    - a folder as for `submissions.find`, or of archives, or an unpacked export,
    - a `.zip` of students' folders, of one archive per student, or as Canvas, Moodle and
      Blackboard export it (`forms`); one wrapping folder is allowed,
    - a `.txt` or `.csv` of git addresses (`repositories`).
    work: a new or empty folder for the numbered notebooks. labs: the slugs that exist.
    A fault in one student's files becomes the problem of that submission. Raises ValueError if
    source cannot be used at all.
    """
    here, there = work.resolve(), source.resolve()
    if here == there or there in here.parents:
        raise ValueError(f"{work} is inside {source}; choose another folder to unpack into")
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise ValueError(f"{work} is not empty; choose a new folder to unpack into")
    if not source.exists():
        raise ValueError(f"{source} does not exist; name a folder, a .zip, a .txt or a .csv")
    work.mkdir(parents=True, exist_ok=True)
    gigabytes = TOTAL_BYTES // 1_000_000_000
    total = Budget(
        TOTAL_BYTES, ValueError(f"{source} unpacks to more than {gigabytes} GB; split it up")
    )
    kind = source.suffix.lower()
    if source.is_dir():
        if _is_export(source):
            found = _exported(folder_entries(source, total), source, work, labs, total)
        else:
            found = find(source, labs)
    elif kind == ARCHIVE:
        with source.open("rb") as file:
            try:
                archive = opened(file)
            except ValueError as error:
                raise ValueError(f"{source}: {error}; download it again") from error
            found = _exported(zip_entries(archive, total), source, work, labs, total)
    elif kind in (".txt", ".csv"):
        found = _cloned(source, work, labs, total)
    else:
        raise ValueError(f"{source} is not a folder, .zip, .txt or .csv; name one of these")
    return list(_distinct(found))
