"""Keys and values in pages of one pool, for rows that change at every step.

A request holds whole pages, scattered over the pool and listed by its block table, so that what
it leaves unused is less than one page, and requests of one beginning share its pages (Kwon et al.,
2023, arXiv 2309.06180). Rows of a forward are bound to requests step by step.

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
    """What the layers of one forward share."""

    # Where each token goes: int64 [B * T], or [R] without padding, of a hosted one. A slot is
    # page * block + place.
    slots: Tensor
    reach: int  # S
    totals: Tensor | None = None  # int32 [B], lengths with the tokens of this forward
    counts: Tensor | None = None  # int32 [B]
    ends: list[int] | None = None  # of a hosted one, in place of totals and counts
    # Where the rows' tokens are read: int64 [B * S]; of a SlotCache the rows' slots, int64 [B].
    source: Tensor | None = None
    mask: Tensor | None = None  # [B, 1, G * T, S], or [B, 1, 1, S] for all queries; added to scores


class PagedCache:
    """A `KVCache` whose rows are lists of pages of a shared pool, rebound before each forward.

    config: of the heads that this rank holds; `of` finds them. pages: P; page: tokens of one.
    rows: the most rows of a forward. max_pages: the most pages of a row. dtype: of the pages.
    attention: "paged" is `labcore.attention.paged_attention`; "gathered" copies each row's pages
    together for torch's attention, asks the host nothing and is faster without a GPU; "auto" is
    paged where its kernels run.

    key_pages, value_pages: [P + 1, page, Hkv, D] a layer; page P takes padding and is never read
    for a token. block_table: int32 [rows, max_pages], the pages of each row in order, -1 behind
    them. lengths: int32 [rows].

    A row writes only pages that no other row has: whoever shares pages copies the last one with
    `copy_page` before a row goes on in it. A forward reads nothing but the row's own tokens, so
    that what others left in a page, NaN too, cannot reach it.
    Chunks of prompts and single tokens are two forwards: padding is computed too.
    Raises ValueError or TypeError for arguments that do not fit.
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
        with torch.inference_mode(False):  # so that they can be filled outside of it too
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
        """A cache for the heads that this rank holds of a model, whole or divided.

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
        """Make row b the request with the pages rows[b][0] and their first rows[b][1] tokens.

        Rows not named become empty. One copy to the device for the table and one for the lengths;
        nothing waits for it.
        counts: the tokens of each row in the next forward, and only then: what they need is
        looked after here, and the forward asks the device nothing.
        Raises ValueError, and changes nothing, for too many rows or pages, pages that are none,
        more tokens than pages hold, and two rows that would write one page.
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
        """In memory that a GPU copies without waiting; torch's allocator keeps it until then."""
        return staged.pin_memory() if self.lengths.is_cuda else staged

    def first_rows(self, rows: int) -> Self:
        """The same cache seen as its first rows, in the same memory: what a forward of them takes.

        A replayed graph checks no room, and attends up to max_pages of each row.
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

        Raises RuntimeError when k carries gradients, ValueError when a row's pages are full.
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
        """Put k, v [R, Hkv, D] into the slots of a forward's R tokens."""
        for pages, new in ((self.key_pages[layer], k), (self.value_pages[layer], v)):
            pages.flatten(0, 1).index_copy_(0, forward.slots, new.to(pages.dtype))

    @property
    def starts(self) -> list[int]:
        """Of all rows the most tokens they can have, without asking the device.

        After a bind these are the lengths themselves.
        """
        return self._host.longest

    def hosted(self, counts: Sequence[int]) -> Forward:
        """The next forward, by what bind was told, for `store` and `mix`: the device does nothing.

        counts: as bind was told, but 1 of rows that rest; these write and read page P. Without a
        mask; tokens one row behind the other, without padding.
        """
        host = self._host
        totals = [start + count for start, count in zip(host.longest, counts, strict=False)]
        reach = max(totals)
        forward = Forward(slots=host.written(counts), reach=reach, ends=totals)
        if max(counts) == 1:
            forward.mask = ends_mask(totals, reach)
        return forward

    def _written(self, width: int, counts: Tensor) -> Tensor:
        """The slot of each token of a forward, that of padding in page P: int64 [B * T]."""
        offsets = torch.arange(width, device=self.lengths.device)
        places = self.lengths[:, None] + offsets
        blocks = self.block_table.gather(1, (places // self.page).clamp(max=self.max_pages - 1))
        inside = (offsets < counts[:, None]) & (places < self.max_pages * self.page) & (blocks >= 0)
        slots = blocks.long() * self.page + places % self.page
        return torch.where(inside, slots, self.pages * self.page).flatten()

    def _reach(self, width: int, counts: Tensor) -> int:
        """Tokens of the longest row after this forward, at most; raises where pages are full.

        Asks the device where bind was not told the counts and a row comes near its end, and where
        a caller may have filled the buffers; never in a graph or a view that a graph uses.
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
        counts: Tensor,  # noqa: ARG002 - the protocol's; write has them already
        tree: Tensor | None,
    ) -> Tensor:
        """Attention of q [B, H, T, D] over the row and what was just written; [B, H, T, D]."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("attend must follow write in a forward, got no write; write first")
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
        """Attention of q [B, Hkv, N, D] over its rows, by the mask [B, 1, N or 1, S]."""
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
        """The slot of each token of each row; behind its end, its first: int64 [B * S].

        What stands in another slot may be NaN, which no mask keeps out of a product.
        """
        places = torch.arange(forward.reach, device=self.lengths.device)
        places = torch.where(places < cast(Tensor, forward.totals)[:, None], places, 0)
        blocks = self.block_table.gather(1, places // self.page).long()
        slots = torch.where(blocks < 0, self.pages, blocks) * self.page + places % self.page
        return slots.flatten()

    def advance(self, counts: Tensor) -> None:
        """Count what was written: lengths += counts, integers [B]."""
        self._starts.copy_(self.lengths)
        self.lengths.add_(counts)
        host, rows = self._host, len(self.lengths)
        grown = [length + self._width for length in host.longest[:rows]]
        if host.totals is not None:
            grown = host.totals[:rows]
        host.longest[:rows] = grown
        host.totals, self._forward = None, None

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens of row b after its first lengths[b]; a shorter row stays.

        lengths: integers [B]. The pages stay the row's until it is bound anew. Raises ValueError
        for another shape.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"lengths must have shape {tuple(self.lengths.shape)}, got {tuple(lengths.shape)}"
            )
        kept = lengths.to(self.lengths).clamp(min=0)
        self.lengths.copy_(torch.minimum(self.lengths, kept))

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Of a row's tokens in the last forward keep those at `slots`, moved behind the prefix.

        slots: integers [K], places in that forward (a tree's nodes), in the order to be kept:
        an accepted path. The row's length becomes that before the forward plus K.
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
        """Where the tokens at `places`, int64 [K], of a row lie: int64 [K]."""
        blocks = self.block_table[row].index_select(0, places // self.page).long()
        return blocks * self.page + places % self.page

    def copy_page(self, source: int, into: int) -> None:
        """Copy a page of all layers: what a row does before it goes on in a shared page."""
        for block in (source, into):
            if not 0 <= block < self.pages:
                raise ValueError(f"a block must lie between 0 and {self.pages - 1}, got {block}")
        for pages in (*self.key_pages, *self.value_pages):
            pages[into].copy_(pages[source])

    def buffers(self) -> dict[str, Tensor]:
        """`lengths` and `block_table`: what a graph's caller fills before a replay.

        Until rows are bound anew, what they hold is then asked of the device, and views, which
        graphs use, attend up to max_pages.
        """
        self._host.lent = True
        return {"lengths": self.lengths, "block_table": self.block_table}

    def take_back(self) -> None:
        """Say that nobody filled the buffers but replays, which leave the table as it is.

        Lengths may have grown: rows must be bound anew before the next forward, and a table that
        is then the same is not copied again.
        """
        self._host.lent = False
