"""Which file a row of a concatenated corpus came from."""

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
    """Rows of `row_length` characters each, cut from files that stand one behind the other.

    files: their names. starts: where each begins, in characters, rising from 0; what stands
    between two files belongs to the first. length: of the whole text in characters.
    Row r holds the characters r * row_length to (r + 1) * row_length - 1; the rest behind the last
    whole row is in no row.
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
                "starts must rise from 0 and end below length, got "
                f"{self.starts[:5]}... and length {self.length}; leave empty files out"
            )
        if len(self.files) != len(self.starts):
            raise ValueError(
                f"every file needs one start, got {len(self.files)} files and "
                f"{len(self.starts)} starts"
            )

    @classmethod
    def of_sources(cls, text: Text, row_length: int) -> FileRows:
        """The rows of `labcore.data.python_sources`: where its files begin is read off the files.

        Raises ValueError where the text is not that of this Python's files: of another version or
        part, or of docstrings (`python_text`).
        """
        library, start, starts = Path(sysconfig.get_paths()["stdlib"]), 0, []
        for name in text.files:
            source = (library / name).read_text(encoding="utf-8", errors="replace")
            if not text.text.startswith(source, start):
                raise ValueError(
                    f"the text must be that of this Python's source files, got another one for "
                    f"{name}; make it with labcore.data.python_sources in this process"
                )
            starts.append(start)
            start += len(source) + 1
        return cls(
            files=text.files, starts=tuple(starts), length=len(text.text), row_length=row_length
        )

    @property
    def rows(self) -> int:
        """How many whole rows there are."""
        return self.length // self.row_length

    @property
    def first_rows(self) -> tuple[int, ...]:
        """For each file, the row that holds its first character."""
        return tuple(start // self.row_length for start in self.starts)

    def of(self, rows: Iterable[int]) -> tuple[str, ...]:
        """The files that these rows hold characters of, each once, in the order of the text.

        Raises ValueError for a row outside 0..rows - 1.
        """
        found: set[int] = set()
        for row in rows:
            if not 0 <= row < self.rows:
                raise ValueError(f"a row must be one of 0..{self.rows - 1}, got {int(row)}")
            begin, end = int(row) * self.row_length, (int(row) + 1) * self.row_length
            first = bisect.bisect_right(self.starts, begin) - 1
            found.update(range(first, bisect.bisect_left(self.starts, end)))
        return tuple(self.files[i] for i in sorted(found))
