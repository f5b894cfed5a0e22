"""What the names of submitted files say, as folders, nbgrader and learning systems write them.

Only names are read; no file is opened here. The forms:

- Canvas, "Download Submissions", flat: `meieranna_[LATE_]4711_99012_lion-1.ipynb`, which is the
  name, the user's number and the file's number; `anon_x7Yq2_...` if names are hidden. The student
  is `meieranna_4711`. A later file has a larger number. Canvas itself adds the -1.
- Moodle, "Download all submissions": `Anna Meier_4711_assignsubmission_file/lion.ipynb`, in some
  versions with another `_`; without folders `Anna Meier_4711_assignsubmission_file_lion.ipynb`.
  The student is `Anna Meier_4711`. Only the last submission is included.
- Blackboard, "Assignment File Download", flat:
  `Lab 1_ameier_attempt_2024-03-01-10-11-12_lion.ipynb`
  with the receipt `Lab 1_ameier_attempt_2024-03-01-10-11-12.txt`. The student is `ameier`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "STAMP",
    "STAMP_BYTES",
    "Moment",
    "Place",
    "in_folder",
    "is_chapter",
    "lab_of",
    "lone",
    "normal",
    "of_moodle",
    "receipt",
    "several",
    "stamped",
]

# A time in UTC, None if unknown, and notes about it.
Moment = tuple[datetime | None, tuple[str, ...]]

# "Run this page" saves a reader's copy of the lab lion as "my/lion-lab.ipynb". Canvas renames a
# second submission to "lion-1.ipynb"; a browser, a second download to "lion (1).ipynb".
COPY = re.compile(r"(-lab)?(-[0-9]+)?( ?\([0-9]+\))?$")
STAMP = "timestamp.txt"
STAMP_BYTES = 200
MOODLE = re.compile(r"(?P<student>.+_[0-9]+)_assignsubmission_[a-z]+(?:_(?P<file>.*))?")
CANVAS = re.compile(
    r"(?:(?:LATE_)?(?P<anonymous>anon_[A-Za-z0-9]+)|(?P<name>\w+?)_(?:LATE_)?(?P<id>[0-9]+))"
    r"_(?:(?P<number>[0-9]{1,18})_(?P<file>.+)|(?P<page>(?:text|link)\.html))"
)
LATE = re.compile(r"(^|_)LATE_(anon_[A-Za-z0-9]+_|[0-9]+_)")
BLACKBOARD = re.compile(
    r"(?P<before>.+)_attempt_(?P<time>[0-9]{4}(?:-[0-9]{2}){5})(?:_(?P<file>.+)|\.txt)"
)
RECEIPT = re.compile(r"\ufeff?[^:\n]+:[^\n]*\((?P<user>[^()\s]+)\)\s*(\n|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Who handed in a file, and what else its name says.

    file: the student's own name for it, "" for a file that the learning system wrote. order: larger
    is later; None if the name does not say. collected: whether nbgrader may have put it there, and
    so the timestamp next to it; in an export, the timestamp would be the student's own file.
    """

    student: str
    file: str
    order: int | None = None
    handed_in: datetime | None = None
    collected: bool = False
    notes: tuple[str, ...] = ()


def normal(name: str) -> str:
    """A name in Unicode's composed form (NFC)."""
    return unicodedata.normalize("NFC", name)


def _canvas(name: str) -> Place | None:
    found = CANVAS.fullmatch(name)
    if not found:
        return None
    student = found["anonymous"] or f"{found['name']}_{found['id']}"
    order = int(found["number"]) if found["number"] else None
    before = name[: found.start("number")] if found["number"] else name
    notes = ("Canvas marked it late",) if LATE.search(before) else ()
    return Place(student=student, file=found["file"] or "", order=order, notes=notes)


def _blackboard(name: str, receipts: Sequence[str]) -> Place | None:
    found = BLACKBOARD.fullmatch(name)
    if not found:
        return None
    try:
        moment = datetime.strptime(found["time"], "%Y-%m-%d-%H-%M-%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    # Either name may contain "_"; only a receipt tells where the user name begins.
    ends = [user for user in receipts if found["before"].endswith("_" + user)]
    student = max(ends, key=len) if ends else found["before"].rpartition("_")[2]
    return Place(
        student=student,
        file=found["file"] or "",
        order=int(found["time"].replace("-", "")),
        handed_in=moment,
        notes=("the time is from Blackboard's server, read as UTC",),
    )


def receipt(name: str, text: str) -> str:
    """The user name in a Blackboard receipt, whose first line is "Name: Anna Meier (ameier)"."""
    found = BLACKBOARD.fullmatch(name)
    first = RECEIPT.match(text)
    return first["user"] if found and found["file"] is None and first else ""


def lone(name: str, receipts: Sequence[str] = ()) -> Place | None:
    """Who handed in a file outside of any folder; None if no learning system named it.

    receipts: the user names in Blackboard's receipts.
    """
    name = normal(name)
    if found := MOODLE.fullmatch(name):
        return Place(student=found["student"], file=found["file"] or "")
    return _blackboard(name, receipts) or _canvas(name)


def of_moodle(name: str) -> bool:
    """Whether Moodle gave a student's folder this name."""
    return bool(MOODLE.fullmatch(normal(name)))


def in_folder(parts: Sequence[str]) -> Place:
    """Who handed in a file in a student's folder, which is the first of `parts`."""
    found = MOODLE.fullmatch(normal(parts[0]))
    student = found["student"] if found else parts[0]
    return Place(student=student, file="/".join(parts[1:]), collected=not found)


def _labcore(content: bytes) -> dict[str, Any]:
    """labcore's metadata in a notebook; {} if there is none or this is not a notebook."""
    try:
        found = json.loads(content)["metadata"]["labcore"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def is_chapter(content: bytes) -> bool:
    """Whether a notebook is a chapter of the book, which has the same name as its lab."""
    meta = _labcore(content)
    return "objectives" in meta and meta.get("kind") != "lab"


def lab_of(
    stem: str, labs: Container[str], read: Callable[[], bytes]
) -> tuple[str, tuple[str, ...]]:
    """The lab that a file's name or else its metadata identifies, and notes on that.

    stem: the file's name without .ipynb; returned unchanged if neither identifies a lab. read:
    returns the content; called only if the name does not suffice.
    """
    for name in (stem, COPY.sub("", stem)):
        if name in labs:
            return name, ()
    meta = _labcore(read())
    named = meta.get("slug")
    if isinstance(named, str) and named in labs and meta.get("kind") == "lab":
        return named, (f"{stem + '.ipynb'!a} is the lab {named}, according to its metadata",)
    return stem, ()


def stamped(content: bytes) -> Moment:
    """The time in nbgrader's timestamp.txt, such as "2015-02-02 15:58:23.948203 UTC", in UTC.

    A zone other than UTC or GMT is read as an offset, "+0100". None and a note for other text.
    """
    date, _, zone = content.decode("utf-8", errors="replace").strip().rpartition(" ")
    try:
        moment = datetime.fromisoformat(date + ("+00:00" if zone in ("UTC", "GMT") else zone))
        if moment.tzinfo:
            return moment.astimezone(UTC), ()
    except (ValueError, OverflowError):
        pass
    return None, (f"{STAMP} has no readable time, so the time of submission is unknown",)


def several(names: Sequence[str]) -> str:
    """The problem of having more than one notebook for one lab."""
    return f"{len(names)} notebooks for one lab ({', '.join(names)}); keep one"
