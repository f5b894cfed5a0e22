"""A paged KV cache whose rows can change at every step.

A request holds whole pages, scattered over the pool and listed in its block table. It wastes less
than one page, and requests with the same prefix share that prefix's pages (Kwon et al., 2023,
arXiv 2309.06180). Each step binds the rows of its forward to requests.

Letters: B rows of a forward, T its tokens, P pages of `page` tokens, H attention heads, Hkv key
and value heads, G = H / Hkv, D head_dim, S the tokens that the longest row can have.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from labcore.attention import paged_attention
from labcore.checks import one_of, positive_int
from labcore.device import choose_backend
from labcore.models import Llama, LlamaConfig
from labcore.serving.cache.binding import Bound, Host, no_room
from labcore.serving.cache.gathered import (
    additive_mask,
    attended,
    capturing,
    ends_mask,
    fold,
    unfold,
)

__all__ = ["PagedCache"]


@dataclass(slots=True)
class Forward:
    """The state that the layers of one forward share."""

    # The slot of each token: int64 [B * T], or [R] without padding in a hosted forward. A slot is
    # block * page + offset.
    slots: Tensor
    reach: int  # S
    totals: Tensor | None = None  # int32 [B], lengths including the tokens of this forward
    counts: Tensor | None = None  # int32 [B]
    ends: list[int] | None = None  # replaces totals and counts in a hosted forward
    # The slots to read the rows' tokens from: int64 [B * S]; in a SlotCache the rows' slots,
    # int64 [B].
    source: Tensor | None = None
    mask: Tensor | None = None  # [B, 1, G * T, S], or [B, 1, 1, S] for all queries; added to scores


class PagedCache:
    """A `KVCache` whose rows are lists of pages in a shared pool, rebound before each forward.

    config: describes the heads that this rank holds; `of` derives it from a model. pages: P.
    page: tokens per page. rows: maximum rows per forward. max_pages: maximum pages per row.
    dtype: the pages' dtype. attention: "paged" is `labcore.attention.paged_attention`; "gathered"
    copies each row's pages together for torch's attention, reads nothing back to the host, and is
    faster without a GPU; "auto" means "paged" where its kernels run.

    key_pages, value_pages: [P + 1, page, Hkv, D] per layer; page P receives padding and is never
    read for a token. block_table: int32 [rows, max_pages], the pages of each row in order, padded
    with -1. lengths: int32 [rows].

    A row may write only pages that no other row has. If rows share a page, copy it with `copy_page`
    before one of them continues in it. A forward reads only the row's own tokens; nothing that
    others left in a page, not even NaN, can reach it.
    Run prompt chunks and single tokens in two forwards, because padding is computed too.
    Raises ValueError or TypeError for invalid arguments.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        pages: int,
        page: int = 16,
        rows: int,
        max_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        attention: Literal["auto", "paged", "gathered"] = "auto",
    ) -> None:
        self.pages, self.page = positive_int("pages", pages), positive_int("page", page)
        self.max_pages = positive_int("max_pages", max_pages)
        size = (pages + 1, page, config.kv_heads, config.head_size)
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        layers = range(config.num_hidden_layers)
        with torch.inference_mode(False):  # or they could not be filled outside of it
            self.key_pages = tuple(torch.zeros(size, **made) for _ in layers)
            self.value_pages = tuple(torch.zeros(size, **made) for _ in layers)
            self.lengths = torch.zeros(positive_int("rows", rows), dtype=torch.int32, device=device)
            self.block_table = self.lengths.new_full((rows, max_pages), -1)
            self._starts = torch.zeros_like(self.lengths)  # lengths before the last forward
        one_of("attention", attention, ("auto", "paged", "gathered"))
        kernels = choose_backend("auto", self.lengths, op="PagedCache") == "triton"
        fitting = "paged" if kernels and dtype != torch.float64 else "gathered"
        self.attention = fitting if attention == "auto" else attention
        self._host = Host.empty(pages=pages, page=page, rows=rows, max_pages=max_pages)
        self._whole: Self | None = None  # the cache that this one is a view of
        self._width = 0  # T of the last forward
        self._forward: Forward | None = None

    @classmethod
    def of(cls, llama: Llama, **options: Any) -> Self:
        """Return a cache for the heads that this rank holds of a whole or sharded model.

        options: as for the class; dtype and device default to the model's.
        """
        config, weight = llama.config, llama.embed_tokens.weight
        keys = cast(Tensor, llama.get_parameter("layers.0.self_attn.k_proj.weight"))
        kv_heads = keys.shape[0] // config.head_size
        share = replace(
            config,
            num_attention_heads=config.num_attention_heads * kv_heads // config.kv_heads,
            num_key_value_heads=kv_heads,
            head_dim=config.head_size,
        )
        return cls(share, **{"dtype": weight.dtype, "device": weight.device, **options})

    def bind(self, rows: Sequence[Bound], counts: Sequence[int] | None = None) -> None:
        """Bind row b to the request with the pages rows[b][0] and their first rows[b][1] tokens.

        The remaining rows become empty. This takes one copy to the device for the table and one
        for the lengths; the host doesn't wait for either.
        counts: the tokens of each row in the next forward. With them, bind checks the room here
        and the forward doesn't synchronize with the device.
        Raises ValueError, and changes nothing, if there are too many rows or pages, a page is not
        in the pool, a row has more tokens than its pages hold, or two rows would write one page.
        """
        if self._whole is not None:
            self._whole.bind(rows, counts)
            return
        changed = self._host.bind(rows, counts)
        if changed:
            self.block_table.copy_(self._pinned(self._host.device_table()), non_blocking=True)
        lengths = torch.tensor(self._host.longest, dtype=torch.int32)
        self.lengths.copy_(self._pinned(lengths), non_blocking=True)
        self._forward = None

    def _pinned(self, staged: Tensor) -> Tensor:
        """Pin a tensor for an asynchronous copy to a GPU; torch's allocator keeps it until then."""
        return staged.pin_memory() if self.lengths.is_cuda else staged

    def first_rows(self, rows: int) -> Self:
        """Return a view of the first rows, in the same memory, for a forward of these rows.

        A replayed graph doesn't check for room and attends to max_pages of each row.
        """
        if not 1 <= rows <= len(self.lengths):
            raise ValueError(f"rows must lie between 1 and {len(self.lengths)}, got {rows}")
        view = copy.copy(self)
        view.lengths, view._starts = self.lengths[:rows], self._starts[:rows]
        view.block_table = self.block_table[:rows]
        view._whole, view._forward = self._whole or self, None
        return view

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Store k, v [B, Hkv, T, D]; the padding of row b begins at counts[b].

        Raises RuntimeError if k requires gradients, ValueError if a row's pages are full.
        """
        if k.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a cache keeps no gradients; run the forward under torch.no_grad() or "
                "torch.inference_mode(), or without a cache"
            )
        if layer == 0 or self._forward is None:
            self._width = k.shape[2]
            self._forward = Forward(
                slots=self._written(k.shape[2], counts),
                reach=self._reach(k.shape[2], counts),
                totals=(self.lengths + counts).to(torch.int32),
                counts=counts.to(torch.int32),
            )
        k, v = (new.transpose(1, 2).flatten(0, 1) for new in (k, v))  # [B * T, Hkv, D]
        self.store(layer, k, v, self._forward)

    def store(self, layer: int, k: Tensor, v: Tensor, forward: Forward) -> None:
        """Write k, v [R, Hkv, D] to the slots of a forward's R tokens."""
        for pages, new in ((self.key_pages[layer], k), (self.value_pages[layer], v)):
            pages.flatten(0, 1).index_copy_(0, forward.slots, new.to(pages.dtype))

    @property
    def starts(self) -> list[int]:
        """An upper bound on each row's length, without asking the device.

        After a bind these are the lengths themselves.
        """
        return self._host.longest

    def hosted(self, counts: Sequence[int]) -> Forward:
        """Return the next forward for `store` and `mix`, from the host's record alone.

        counts: the counts given to bind, but 1 for idle rows, which write and read page P. The
        rows' tokens are concatenated without padding. The mask is set only if every count is 1.
        """
        host = self._host
        totals = [start + count for start, count in zip(host.longest, counts, strict=False)]
        reach = max(totals)
        forward = Forward(slots=host.written(counts), reach=reach, ends=totals)
        if max(counts) == 1:
            forward.mask = ends_mask(totals, reach)
        return forward

    def _written(self, width: int, counts: Tensor) -> Tensor:
        """Return the slot of each token of a forward: int64 [B * T]. Padding goes to page P."""
        offsets = torch.arange(width, device=self.lengths.device)
        places = self.lengths[:, None] + offsets
        blocks = self.block_table.gather(1, (places // self.page).clamp(max=self.max_pages - 1))
        inside = (offsets < counts[:, None]) & (places < self.max_pages * self.page) & (blocks >= 0)
        slots = blocks.long() * self.page + places % self.page
        return torch.where(inside, slots, self.pages * self.page).flatten()

    def _reach(self, width: int, counts: Tensor) -> int:
        """Return an upper bound on the longest row after this forward.

        Raises ValueError if a row's pages are full. Synchronizes with the device if bind got no
        counts and a row is near its end, or if a caller may have filled the buffers, but never in
        a graph or in a view that a graph uses.
        """
        host, rows = self._host, len(self.lengths)
        if capturing(counts) or (host.lent and self._whole is not None):
            return self.max_pages * self.page
        if host.totals is not None and not host.lent:
            return max(1, *host.totals[:rows])
        totals = [length + width for length in host.longest[:rows]]
        if host.lent or any(total > room for total, room in zip(totals, host.rooms, strict=False)):
            host.longest[:rows] = self.lengths.tolist()
            totals = (self.lengths + counts).tolist()
            rooms = ((self.block_table >= 0).sum(1) * self.page).tolist()
            for row, (total, room) in enumerate(zip(totals, rooms, strict=True)):
                if total > room:
                    raise no_room(row, total, room)
        return max(1, *totals)

    def attend(
        self,
        layer: int,
        q: Tensor,
        counts: Tensor,  # noqa: ARG002 - part of the protocol; write already has them
        tree: Tensor | None,
    ) -> Tensor:
        """Attend with q [B, H, T, D] to the rows, including what was just written.

        Returns [B, H, T, D].
        """
        forward = self._forward
        if forward is None:
            raise RuntimeError("attend must follow write in a forward; call write first")
        if self.attention == "gathered":
            return self._gathered(layer, q, tree, forward)
        tree = None if tree is None else tree.to(torch.int32)
        pages = self.key_pages[layer], self.value_pages[layer]
        out = paged_attention(
            q.to(pages[0].dtype),
            *pages,
            self.block_table,
            cast(Tensor, forward.totals),
            counts=forward.counts,
            tree=tree,
        )
        return out.to(q.dtype)

    def _gathered(self, layer: int, q: Tensor, tree: Tensor | None, forward: Forward) -> Tensor:
        kv_heads = self.key_pages[layer].shape[2]
        if forward.mask is None:
            forward.mask = additive_mask(
                self.lengths,
                tree,
                width=q.shape[2],
                group=q.shape[1] // kv_heads,
                reach=forward.reach,
                dtype=q.dtype,
            )
        return unfold(self.mix(layer, fold(q, kv_heads), forward), q.shape[2])

    def mix(self, layer: int, q: Tensor, forward: Forward) -> Tensor:
        """Attend with q [B, Hkv, N, D] to its rows under the mask [B, 1, N or 1, S]."""
        if forward.source is None:
            ends = forward.ends
            forward.source = (
                self._read(forward) if ends is None else self._host.read(ends, forward.reach)
            )
        shape = (len(q), forward.reach)
        k, v = (
            pages.flatten(0, 1).index_select(0, forward.source).unflatten(0, shape)
            for pages in (self.key_pages[layer], self.value_pages[layer])
        )
        return attended(q, k, v, cast(Tensor, forward.mask))

    def _read(self, forward: Forward) -> Tensor:
        """Return the slot of each token of each row, padded with its first slot: int64 [B * S].

        Another slot may hold NaN, and a mask doesn't keep NaN out of a product.
        """
        places = torch.arange(forward.reach, device=self.lengths.device)
        places = torch.where(places < cast(Tensor, forward.totals)[:, None], places, 0)
        blocks = self.block_table.gather(1, places // self.page).long()
        slots = torch.where(blocks < 0, self.pages, blocks) * self.page + places % self.page
        return slots.flatten()

    def advance(self, counts: Tensor) -> None:
        """Add what was written to the lengths: lengths += counts, integers [B]."""
        self._starts.copy_(self.lengths)
        self.lengths.add_(counts)
        host, rows = self._host, len(self.lengths)
        grown = [length + self._width for length in host.longest[:rows]]
        if host.totals is not None:
            grown = host.totals[:rows]
        host.longest[:rows] = grown
        host.totals, self._forward = None, None

    def truncate(self, lengths: Tensor) -> None:
        """Drop all tokens of row b after its first lengths[b]; a shorter row stays as it is.

        lengths: integers [B]. The row keeps its pages until it is bound again. Raises ValueError
        if the shape is different.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"lengths must have shape {tuple(self.lengths.shape)}, got {tuple(lengths.shape)}"
            )
        kept = lengths.to(self.lengths).clamp(min=0)
        self.lengths.copy_(torch.minimum(self.lengths, kept))

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Keep only the tokens at `slots` of a row's last forward, moved right after the prefix.

        slots: integers [K], positions in that forward (a tree's nodes) in the order to keep them,
        such as an accepted path. The row's length becomes its length before the forward plus K.
        """
        gaps = isinstance(slots, Tensor) or [*slots] != [*range(len(slots))]
        start = self._starts[row].long()
        if gaps:
            places = torch.as_tensor(slots, device=self.lengths.device, dtype=torch.long)
            source = self._slots(row, start + places)
            into = self._slots(row, start + torch.arange(len(slots), device=places.device))
            for pages in (*self.key_pages, *self.value_pages):
                tokens = pages.flatten(0, 1)
                tokens.index_copy_(0, into, tokens.index_select(0, source))
        self.lengths[row] = (start + len(slots)).to(torch.int32)

    def _slots(self, row: int, places: Tensor) -> Tensor:
        """Return the slots of the tokens at the positions `places` of a row: int64 [K]."""
        blocks = self.block_table[row].index_select(0, places // self.page).long()
        return blocks * self.page + places % self.page

    def copy_page(self, source: int, into: int) -> None:
        """Copy a page in all layers, for a row that continues in a page it shares."""
        for block in (source, into):
            if not 0 <= block < self.pages:
                raise ValueError(f"a block must lie between 0 and {self.pages - 1}, got {block}")
        for pages in (*self.key_pages, *self.value_pages):
            pages[into].copy_(pages[source])

    def buffers(self) -> dict[str, Tensor]:
        """Return `lengths` and `block_table`, which a graph's caller fills before a replay.

        Until the rows are bound again, the cache reads both from the device, and views, which
        graphs use, attend to max_pages.
        """
        self._host.lent = True
        return {"lengths": self.lengths, "block_table": self.block_table}

    def take_back(self) -> None:
        """Declare that only replays changed the buffers, which leave the table as it is.

        Lengths may have grown: bind the rows again before the next forward. If the table is then
        the same, it isn't copied again.
        """
        self._host.lent = False
