"""The file that each row of a concatenated corpus came from."""

from __future__ import annotations

import bisect
import itertools
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from labcore.checks import positive_int
from labcore.data.python import Text

__all__ = ["FileRows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Rows of `row_length` characters each, cut from concatenated files.

    files: their names. starts: where each file begins, in characters, increasing from 0. Text
    between two files belongs to the first. length: the length of the whole text in characters.
    Row r holds the characters r * row_length to (r + 1) * row_length - 1. Characters after the last
    whole row are in no row.
    """

    files: tuple[str, ...]
    starts: tuple[int, ...]
    length: int
    row_length: int

    def __post_init__(self) -> None:
        positive_int("row_length", self.row_length)
        rising = all(a < b for a, b in itertools.pairwise((*self.starts, self.length)))
        if not self.starts or self.starts[0] != 0 or not rising:
            raise ValueError(
                "starts must increase from 0 and end below length, got "
                f"{self.starts[:5]}... and length {self.length}; leave out empty files"
            )
        if len(self.files) != len(self.starts):
            raise ValueError(
                f"every file must have one start, got {len(self.files)} files and "
                f"{len(self.starts)} starts"
            )

    @classmethod
    def of_sources(cls, text: Text, row_length: int) -> FileRows:
        """Make rows of `labcore.data.python_sources`, reading where files begin from the files.

        Raises ValueError if the text is not that of this Python's source files: if it is from
        another version, or consists of docstrings (`python_text`).
        """
        library, start, starts = Path(sysconfig.get_paths()["stdlib"]), 0, []
        for name in text.files:
            source = (library / name).read_text(encoding="utf-8", errors="replace")
            if not text.text.startswith(source, start):
                raise ValueError(
                    f"the text must match this Python's source files, got another text for "
                    f"{name}; make it with labcore.data.python_sources in this process"
                )
            starts.append(start)
            start += len(source) + 1
        return cls(
            files=text.files, starts=tuple(starts), length=len(text.text), row_length=row_length
        )

    @property
    def rows(self) -> int:
        """The number of whole rows."""
        return self.length // self.row_length

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The row that holds each file's first character."""
        return tuple(start // self.row_length for start in self.starts)

    def of(self, rows: Iterable[int]) -> tuple[str, ...]:
        """Return the files that these rows contain parts of, each once, in the order of the text.

        Raises ValueError for a row outside 0..rows - 1.
        """
        found: set[int] = set()
        for row in rows:
            if not 0 <= row < self.rows:
                raise ValueError(f"a row must be in 0..{self.rows - 1}, got {int(row)}")
            begin, end = int(row) * self.row_length, (int(row) + 1) * self.row_length
            first = bisect.bisect_right(self.starts, begin) - 1
            found.update(range(first, bisect.bisect_left(self.starts, end)))
        return tuple(self.files[i] for i in sorted(found))
