"""A KV cache with one contiguous slot per request: the baseline for paging.

Letters: B rows of a forward, T its tokens, H attention heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.models import LlamaConfig
from labcore.serving.cache.binding import Bound
from labcore.serving.cache.gathered import attended, capturing
from labcore.serving.cache.paged import Forward, PagedCache

__all__ = ["SlotCache"]


class SlotCache(PagedCache):
    """One contiguous slot of `capacity` tokens per request: the baseline for paging.

    It is bound like a `PagedCache`: the pool has `slots` blocks of `capacity` tokens, and each row
    has one block. Attention reads the rows in place, without a copy, unless only a few of many
    slots are in use. A slot is zeroed when a new row begins in it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        slots: int,
        capacity: int,
        rows: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            config,
            pages=positive_int("slots", slots),
            page=positive_int("capacity", capacity),
            rows=slots if rows is None else rows,
            max_pages=1,
            dtype=dtype,
            device=device,
            attention="gathered",
        )

    def bind(self, rows: Sequence[Bound], counts: Sequence[int] | None = None) -> None:
        """Bind like a `PagedCache`, and zero each slot in which a new row begins.

        A mask hides what an earlier request left there, but NaN would pass through it.
        """
        if self._whole is not None:
            self._whole.bind(rows, counts)
            return
        super().bind(rows, counts)
        begun = [block for blocks, length in rows if not length for block in blocks]
        for pages in (*self.key_pages, *self.value_pages) if begun else ():
            for slot in begun:
                pages[slot].zero_()

    def mix(self, layer: int, q: Tensor, forward: Forward) -> Tensor:
        """Attend with q [B, Hkv, N, D] to its rows under the mask [B, 1, N or 1, S]."""
        mask = cast(Tensor, forward.mask)
        pages = self.key_pages[layer], self.value_pages[layer]
        keys, values = (stored[:, : forward.reach] for stored in pages)
        known = not (self._host.lent or capturing(q))
        firsts = [(*blocks, self.pages)[0] for blocks in self._host.blocks[: len(q)]]
        low, high = (min(firsts), max(firsts) + 1) if known else (0, self.pages + 1)
        if known and firsts == list(range(low, high)):
            return attended(q, keys[low:high], values[low:high], mask)
        if forward.source is None:
            blocks = self.block_table[:, 0].long()
            forward.source = torch.where(blocks < 0, self.pages, blocks)
        if known and high - low > 2 * len(q):
            k, v = (stored.index_select(0, forward.source) for stored in (keys, values))
            return attended(q, k, v, mask)
        # Moving the few queries is cheaper than copying the many keys.
        into = forward.source - low
        moved, mask = (
            x.new_zeros(high - low, *x.shape[1:]).index_copy_(0, into, x) for x in (q, mask)
        )
        return attended(moved, keys[low:high], values[low:high], mask).index_select(0, into)
