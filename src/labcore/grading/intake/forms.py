"""What the names of handed-in files say, as folders, nbgrader and learning systems write them.

Read from names alone; nothing is opened here. The forms:

- Canvas, "Download Submissions", flat: `meieranna_[LATE_]4711_99012_lion-1.ipynb`, that is who,
  the number of the user and of the file; `anon_x7Yq2_...` where names are hidden. The student is
  `meieranna_4711`. A later file has a larger number; Canvas itself adds the -1.
- Moodle, "Download all submissions": `Anna Meier_4711_assignsubmission_file/lion.ipynb`, some
  versions with one more `_`; without folders `Anna Meier_4711_assignsubmission_file_lion.ipynb`.
  The student is `Anna Meier_4711`. Only the last submission is there.
- Blackboard, "Assignment File Download", flat:
  `Lab 1_ameier_attempt_2024-03-01-10-11-12_lion.ipynb`
  beside the receipt `Lab 1_ameier_attempt_2024-03-01-10-11-12.txt`. The student is `ameier`.
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

# A time in UTC, None where it is not known, and what is to be said of that.
Moment = tuple[datetime | None, tuple[str, ...]]

# "my/lion-lab.ipynb" is where "Run this page" puts a reader's copy of the lab lion; Canvas makes
# "lion-1.ipynb" of one that is handed in again, a browser "lion (1).ipynb" of a second download.
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

    file: its name as the student had it, "" for what the learning system wrote. order: the larger
    the later; None where the name says nothing of that. collected: whether nbgrader may have
    put it there, and so the time beside it; in an export that file would be the student's own.
    """

    student: str
    file: str
    order: int | None = None
    handed_in: datetime | None = None
    collected: bool = False
    notes: tuple[str, ...] = ()


def normal(name: str) -> str:
    """A name in the one of Unicode's forms that is written with the fewest signs."""
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
    # Assignments and user names may have a "_"; only a receipt says where the one ends.
    ends = [user for user in receipts if found["before"].endswith("_" + user)]
    student = max(ends, key=len) if ends else found["before"].rpartition("_")[2]
    return Place(
        student=student,
        file=found["file"] or "",
        order=int(found["time"].replace("-", "")),
        handed_in=moment,
        notes=("the time is that of Blackboard's server, taken as UTC",),
    )


def receipt(name: str, text: str) -> str:
    """The user name in a receipt of Blackboard, whose first line is "Name: Anna Meier (ameier)"."""
    found = BLACKBOARD.fullmatch(name)
    first = RECEIPT.match(text)
    return first["user"] if found and found["file"] is None and first else ""


def lone(name: str, receipts: Sequence[str] = ()) -> Place | None:
    """Who handed in a file that lies in no folder; None where no learning system named it.

    receipts: the user names that Blackboard's receipts give.
    """
    name = normal(name)
    if found := MOODLE.fullmatch(name):
        return Place(student=found["student"], file=found["file"] or "")
    return _blackboard(name, receipts) or _canvas(name)


def of_moodle(name: str) -> bool:
    """Whether Moodle named a student's folder so."""
    return bool(MOODLE.fullmatch(normal(name)))


def in_folder(parts: Sequence[str]) -> Place:
    """Who handed in a file that lies in a student's folder, the first of the parts."""
    found = MOODLE.fullmatch(normal(parts[0]))
    student = found["student"] if found else parts[0]
    return Place(student=student, file="/".join(parts[1:]), collected=not found)


def _labcore(content: bytes) -> dict[str, Any]:
    """What labcore has in a notebook's metadata; {} where it is none or has nothing."""
    try:
        found = json.loads(content)["metadata"]["labcore"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def is_chapter(content: bytes) -> bool:
    """Whether a notebook is a page of the book, which has the name of its lab."""
    meta = _labcore(content)
    return "objectives" in meta and meta.get("kind") != "lab"


def lab_of(
    stem: str, labs: Container[str], read: Callable[[], bytes]
) -> tuple[str, tuple[str, ...]]:
    """The lab that a file's name means, else the one that its metadata names; and notes on that.

    stem: the file's name without .ipynb, which comes back where neither means a lab. read: gives
    the content, called only where the name means none.
    """
    for name in (stem, COPY.sub("", stem)):
        if name in labs:
            return name, ()
    meta = _labcore(read())
    named = meta.get("slug")
    if isinstance(named, str) and named in labs and meta.get("kind") == "lab":
        return named, (f"{stem + '.ipynb'!a} is the lab {named} by its metadata",)
    return stem, ()


def stamped(content: bytes) -> Moment:
    """The moment in nbgrader's timestamp.txt, in UTC, as "2015-02-02 15:58:23.948203 UTC".

    Another zone than UTC is read as an offset, "+0100". None and a note where it is no moment.
    """
    date, _, zone = content.decode("utf-8", errors="replace").strip().rpartition(" ")
    try:
        moment = datetime.fromisoformat(date + ("+00:00" if zone in ("UTC", "GMT") else zone))
        if moment.tzinfo:
            return moment.astimezone(UTC), ()
    except (ValueError, OverflowError):
        pass
    return None, (f"{STAMP} holds no time in UTC, so when it was handed in is not known",)


def several(names: Sequence[str]) -> str:
    """The problem of more than one notebook for one lab."""
    return f"{len(names)} notebooks for one lab ({', '.join(names)}); leave one"
