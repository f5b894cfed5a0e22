"""One student's part of a class's submissions: saves the notebooks and chooses one per lab."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from labcore.grading.intake.files import STUDENT_BYTES, Budget, Entry, Refused, nested
from labcore.grading.intake.forms import (
    STAMP,
    STAMP_BYTES,
    Place,
    is_chapter,
    lab_of,
    normal,
    several,
    stamped,
)
from labcore.grading.intake.submissions import MAX_BYTES, Submission
from labcore.labs.students import name_problem

__all__ = ["ARCHIVE", "NOTEBOOK", "Student"]

NOTEBOOK, ARCHIVE = ".ipynb", ".zip"
Stamps = Mapping[tuple[str, ...], Entry]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Notebook:
    """One notebook that a student handed in. path: where it was saved, None if it was refused."""

    name: str
    lab: str
    order: int | None
    path: Path | None = None
    chapter: bool = False
    problem: str = ""
    handed_in: datetime | None = None
    notes: tuple[str, ...] = ()


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Student:
    """Turns what one student handed in into submissions.

    number: the student's position, used in file names. strangers: whether a notebook that belongs
    to no lab gets a row too.
    """

    name: str
    number: int
    source: Path
    work: Path
    labs: Container[str]
    total: Budget
    strangers: bool = True
    _files: Iterator[int] = field(default_factory=itertools.count)
    _own: Budget = field(
        default_factory=lambda: Budget(
            STUDENT_BYTES, Refused(f"more than {STUDENT_BYTES // 1_000_000} MB from one student")
        )
    )

    def submissions(self, handed: Sequence[tuple[Place, Entry]]) -> Iterator[Submission]:
        """A submission for each lab, and one for each problem."""
        if refused := self.refused():
            yield refused
            return
        notebooks = list(self._notebooks(handed))
        known = [one for one in notebooks if one.lab in self.labs]
        if not known and not (notebooks and self.strangers):
            names = ", ".join(ascii(entry.parts[-1]) for _, entry in handed[:3])
            yield self.problem(f"no lab notebook was handed in ({names})")
        taken = notebooks if self.strangers else known
        for lab in sorted({one.lab for one in taken}):
            yield self._chosen(lab, [one for one in taken if one.lab == lab])

    def refused(self) -> Submission | None:
        """The single submission of a student with an invalid name; None if the name is valid."""
        problem = name_problem(normal(self.name))
        whole = Submission(student=ascii(self.name), lab="", path=self.source, problem=problem)
        return whole if problem else None

    def problem(self, problem: str) -> Submission:
        """A submission without a lab that cannot be graded."""
        return Submission(student=self.name, lab="", path=self.source, problem=problem)

    def _notebooks(self, handed: Sequence[tuple[Place, Entry]]) -> Iterator[_Notebook]:
        """The notebooks, including those in archives, and an entry for each unreadable archive."""
        stamps = {
            entry.parts[:-1]: entry
            for place, entry in handed
            if place.collected and entry.parts[-1] == STAMP and not entry.refused
        }
        for place, entry in handed:
            if entry.suffix == NOTEBOOK:
                yield self._notebook(place, entry, stamps)
            elif entry.suffix == ARCHIVE:
                try:
                    content = self._read(entry, STUDENT_BYTES)
                    inner = [one for one in nested(content, self.total) if not one.hidden]
                except Refused as problem:
                    lab, _ = lab_of(Path(place.file).stem, self.labs, bytes)
                    yield _Notebook(
                        name=place.file, lab=lab, order=place.order, problem=f"archive: {problem}"
                    )
                    continue
                for one in (one for one in inner if one.suffix == NOTEBOOK):
                    file = "/".join(one.parts)
                    yield self._notebook(replace(place, file=file), one, {})

    def _read(self, entry: Entry, limit: int) -> bytes:
        self._own.take(0)
        if entry.unsafe:
            raise Refused("its path leads out of the archive")
        if entry.refused:
            raise Refused(entry.refused)
        content = entry.read(limit)
        self._own.take(len(content))
        return content

    def _notebook(
        self, place: Place, entry: Entry, stamps: Mapping[tuple[str, ...], Entry]
    ) -> _Notebook:
        """Saves a notebook, unless it is refused."""
        content, problem, path = b"", "", None
        try:
            content = self._read(entry, MAX_BYTES)
            path = self.work / f"{self.number:05}-{next(self._files):03}{NOTEBOOK}"
            with path.open("xb") as file:
                file.write(content)
        except Refused as refused:
            problem = str(refused)
        moment, said = place.handed_in, place.notes
        if stamp := stamps.get(entry.parts[:-1]):
            with suppress(Refused):
                moment, said = stamped(stamp.read(STAMP_BYTES))
        lab, notes = lab_of(Path(place.file).stem, self.labs, lambda: content)
        return _Notebook(
            name=_shown(place.file),
            lab=lab,
            order=place.order,
            path=path,
            chapter=is_chapter(content),
            problem=problem,
            handed_in=moment,
            notes=(*said, *entry.notes, *notes),
        )

    def _chosen(self, lab: str, found: Sequence[_Notebook]) -> Submission:
        """The one notebook that counts for a lab, or why none does."""
        found = [one for one in found if not one.chapter] or found
        last = max(found, key=lambda one: -1 if one.order is None else one.order)
        problem, notes = last.problem, last.notes
        if lab not in self.labs:
            lab, problem = ascii(lab), problem or "there is no lab with this name"
        elif len(found) > 1:
            rivals = [one for one in found if one.order in (last.order, None)]
            if len(rivals) > 1:
                problem = problem or several([one.name for one in rivals])
            else:
                notes += (f"handed in {len(found)} times; the last one counts ({last.name})",)
        return Submission(
            student=self.name,
            lab=lab,
            path=last.path or self.source,
            problem=problem,
            handed_in=last.handed_in,
            notes=notes,
        )
