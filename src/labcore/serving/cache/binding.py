"""The host's record of which request each row of a paged cache holds.

Letters: B rows of a forward, R its tokens, P pages of `page` tokens, S tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bound", "Host", "no_room"]

Bound = tuple[Sequence[int], int]  # the blocks of a row, and the tokens they hold


def no_room(row: int, total: int, room: int) -> ValueError:
    """Return the error for a row whose pages are full."""
    return ValueError(
        f"a row must hold at most the {room} tokens that fit its blocks, got {total} in row {row}; "
        "bind the row with more blocks"
    )


@dataclass(slots=True)
class Host:
    """What the host knows about a cache's rows without asking the device.

    A cache and its views share one record.

    blocks: the blocks of each row. table: the same, int64 [rows, max_pages], padded with P.
    rooms: the number of tokens that each row's blocks can hold. longest: upper bounds on the
    lengths; after a bind, the lengths themselves. totals: the lengths after the next forward, if
    bind was given the counts. lent: whether a caller may have filled lengths and table since.
    """

    pages: int
    page: int
    blocks: list[tuple[int, ...]]
    table: np.ndarray
    longest: list[int]
    totals: list[int] | None = None
    lent: bool = False

    @classmethod
    def empty(cls, *, pages: int, page: int, rows: int, max_pages: int) -> Host:
        """Return the record of a cache without requests."""
        table = np.full((rows, max_pages), pages)
        return cls(pages, page, [()] * rows, table, [0] * rows)

    @property
    def rooms(self) -> list[int]:
        """The number of tokens that each row's blocks can hold."""
        return [len(blocks) * self.page for blocks in self.blocks]

    def bind(self, rows: Sequence[Bound], counts: Sequence[int] | None) -> bool:
        """Bind row b to the request rows[b]; return whether the device's table may be stale.

        It may be stale if any row's blocks changed or if the table was lent.

        Raises ValueError, and changes nothing, if the rows don't fit.
        """
        most, max_pages = self.table.shape
        if len(rows) > most:
            raise ValueError(
                f"rows must be at most {most}, got {len(rows)}; make the cache with more rows"
            )
        given = [tuple(blocks) for blocks, _ in rows]
        fresh = [row for row, blocks in enumerate(given) if blocks != self.blocks[row]]
        for row, (blocks, (_, length)) in enumerate(zip(given, rows, strict=True)):
            if len(blocks) > max_pages:
                raise ValueError(
                    f"a row must have at most {max_pages} blocks, got {len(blocks)} in row "
                    f"{row}; make the cache with a larger max_pages"
                )
            if not 0 <= length <= len(blocks) * self.page:
                raise ValueError(
                    f"a row of {len(blocks)} blocks must hold 0 to {len(blocks) * self.page} "
                    f"tokens, got {length} in row {row}; give the row more blocks"
                )
        for row in fresh:
            blocks = given[row]
            if blocks and not 0 <= min(blocks) <= max(blocks) < self.pages:
                raise ValueError(
                    f"blocks must lie between 0 and {self.pages - 1}, got {[*blocks]} in row "
                    f"{row}; take them from a pool with that many blocks"
                )
        rest = most - len(rows)
        totals = None if counts is None else [*self._promised(rows, counts), *([0] * rest)]
        fresh += [row for row in range(len(rows), most) if self.blocks[row]]
        self.blocks = [*given, *([()] * rest)]
        for row in fresh:
            self.table[row] = self.pages
            self.table[row, : len(self.blocks[row])] = self.blocks[row]
        self.longest = [*(length for _, length in rows), *([0] * rest)]
        changed, self.totals, self.lent = bool(fresh) or self.lent, totals, False
        return changed

    def _promised(self, rows: Sequence[Bound], counts: Sequence[int]) -> list[int]:
        """Return the lengths after a forward of `counts` tokens.

        Raises ValueError if the tokens don't fit, or if two rows would write the same page.
        """
        if len(counts) != len(rows):
            raise ValueError(
                f"counts must have one number for each of {len(rows)} rows, got {len(counts)}"
            )
        writers: dict[int, int] = {}
        totals = []
        for row, ((blocks, length), count) in enumerate(zip(rows, counts, strict=True)):
            totals.append(length + count)
            if count < 0 or totals[row] > len(blocks) * self.page:
                raise no_room(row, totals[row], len(blocks) * self.page)
            for block in blocks[length // self.page : -(-totals[row] // self.page)]:
                if count and writers.setdefault(block, row) != row:
                    raise ValueError(
                        f"a block must be written by one row, got block {block} in rows "
                        f"{writers[block]} and {row}; copy it first with copy_page"
                    )
        return totals

    def device_table(self) -> Tensor:
        """Return the table in the device's format: int32 [rows, max_pages], padded with -1."""
        table = np.where(self.table == self.pages, -1, self.table)
        return torch.from_numpy(table.astype(np.int32))

    def written(self, counts: Sequence[int]) -> Tensor:
        """Return the slots of the next counts[b] tokens of each row b, concatenated: int64 [R].

        A slot is block * page + offset. A row without blocks writes into page P.
        """
        slots: list[int] = []
        page = self.page
        for blocks, start, count in zip(self.blocks, self.longest, counts, strict=False):
            if not blocks:
                slots += [self.pages * page] * count
            elif count == 1:
                slots.append(blocks[start // page] * page + start % page)
            else:
                slots += [
                    blocks[at // page] * page + at % page for at in range(start, start + count)
                ]
        return torch.tensor(slots)

    def read(self, totals: Sequence[int], reach: int) -> Tensor:
        """Return the slots of the first totals[b] tokens of each row b: int64 [B * S].

        S is `reach`. The row's first slot pads it to S tokens: another slot may hold NaN, and a
        mask doesn't keep NaN out of a product.
        """
        blocks = self.table[: len(totals), : -(-reach // self.page), None]
        slots = (blocks * self.page + np.arange(self.page)).reshape(len(totals), -1)[:, :reach]
        inside = np.arange(reach) < np.array(totals)[:, None]
        return torch.from_numpy(np.where(inside, slots, slots[:, :1]).reshape(-1))
