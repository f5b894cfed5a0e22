"""A paged KV cache: a pool of blocks, which requests hold and share.

A request holds whole blocks, scattered over the pool and listed in its block table. It wastes less
than one block, and requests with the same prefix share that prefix's blocks (Kwon et al., 2023,
arXiv 2309.06180).

Letters: R tokens of a step, B rows, T tokens per row, P blocks of `block_size` tokens, H attention
heads, Hkv key and value heads, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from labcore.attention import paged_attention, quantize_kv
from labcore.attention.kv_codes import check_readable
from labcore.checks import one_of, positive_int
from labcore.device import Backend
from labcore.models import Llama, LlamaConfig
from labcore.models.cache import CODES, KV_DTYPES
from labcore.parallel.llama import local_config

__all__ = ["PagedCache", "Segment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The tokens of one request that a step reads.

    blocks: all blocks of the request, in order; () for an idle row, whose token is computed and
    dropped. start: the number of its tokens that the cache already holds. tokens: those to read.
    parents: for a tree of tokens, the token before each, -1 for a child of the prefix; None for a
    chain.
    """

    blocks: Sequence[int]
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None

    @property
    def end(self) -> int:
        """The number of tokens that the cache holds after the step."""
        return self.start + len(self.tokens)


class PagedCache:
    """Keys and values in a pool of blocks, for packed steps and for replayed decode graphs.

    config: describes the heads that this rank holds; `of` derives it from a model. num_blocks: P.
    block_size: tokens per block. rows, max_blocks: the most rows of a decode graph, and the most
    blocks of a row in it.

    backend: of `paged_attention`, on a GPU and in decode graphs.
    dtype: of keys and values, the model's or a narrower one. torch.int8 and torch.float8_e4m3fn
    store codes of `attention.quantize_kv`: tokens become codes as they are written, so whoever
    reads them, in the same step or a later one, reads the same rounded numbers.

    keys, values: [P + 1, block_size, Hkv, D] per layer. Block P receives the tokens of idle rows.
    scales: of codes, for keys and for values, float32 [P + 1, block_size, Hkv] per layer; or empty.
    For decode graphs, the cache is a `KVCache` of `rows` rows, filled by `bind`: lengths, int32
    [rows], and block_table, int32 [rows, max_blocks].
    Raises ValueError or TypeError for invalid arguments.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        rows: int,
        max_blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_size = positive_int("block_size", block_size)
        size = (num_blocks + 1, block_size, config.kv_heads, config.head_size)
        layers = range(config.num_hidden_layers)
        codes = one_of("dtype", dtype, [*KV_DTYPES.values(), torch.float64]) in CODES
        with torch.inference_mode(False):  # or they couldn't be filled outside of it
            self.keys, self.values = (
                tuple(torch.zeros(size, dtype=dtype, device=device) for _ in layers)
                for _ in range(2)
            )
            self.scales = tuple(
                tuple(torch.zeros(size[:3], device=device) for _ in layers if codes)
                for _ in range(2)
            )
            self.lengths = torch.zeros(positive_int("rows", rows), dtype=torch.int32, device=device)
            self.block_table = self.lengths.new_full(
                (rows, positive_int("max_blocks", max_blocks)), num_blocks
            )
        self.device, self.backend = self.lengths.device, backend
        check_readable(self.keys[0])

    @classmethod
    def of(cls, llama: Llama, **options: Any) -> Self:
        """Return a cache for the heads that this rank holds of a whole or sharded model.

        options: as for the class; dtype and device default to the model's.
        """
        weight = llama.embed_tokens.weight
        made = {"dtype": weight.dtype, "device": weight.device, **options}
        return cls(local_config(llama), **made)

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v [R, Hkv, D] to slots, int64 [R]. A slot is block * block_size + offset."""
        for pool, scales, new in ((self.keys, self.scales[0], k), (self.values, self.scales[1], v)):
            blocks = pool[layer]
            if scales:
                new, steps = quantize_kv(new, blocks.dtype)
                scales[layer].flatten(0, 1).index_copy_(0, slots, steps)
            _flat(blocks).index_copy_(0, slots, _bits(new.to(blocks.dtype)))

    def read(
        self, layer: int, q: Tensor, table: Tensor, totals: Tensor, tree: Tensor | None = None
    ) -> Tensor:
        """Attend with q [B, H, T, D] to the blocks in `table` by the paged kernel."""
        pages = self.keys[layer], self.values[layer]
        if not self.scales[0]:
            heads = q.to(pages[0].dtype)
            out = paged_attention(heads, *pages, table, totals, tree=tree, backend=self.backend)
            return out.to(q.dtype)
        keys, values = (scales[layer] for scales in self.scales)
        return paged_attention(
            q,
            *pages,
            table,
            totals,
            key_scales=keys,
            value_scales=values,
            tree=tree,
            backend=self.backend,
        )

    def gather(self, layer: int, source: Tensor | slice, dtype: torch.dtype) -> list[Tensor]:
        """Return the keys and the values in the slots `source`, [slots, Hkv, D] in `dtype`."""
        found = []
        for pool, scales in ((self.keys, self.scales[0]), (self.values, self.scales[1])):
            new = _at(_flat(pool[layer]), source).view(pool[layer].dtype).to(dtype)
            if scales:
                new = new * _at(scales[layer].flatten(0, 1), source).to(dtype)[..., None]
            found.append(new)
        return found

    @property
    def stored(self) -> list[Tensor]:
        """All tensors of the pool: keys, values and scales, [P + 1, block_size, Hkv, ...] each."""
        return [*self.keys, *self.values, *self.scales[0], *self.scales[1]]

    def slots(self, segment: Segment, places: Sequence[int]) -> list[int]:
        """Return the slots of a request's tokens at `places`."""
        size = self.block_size
        blocks = segment.blocks or (self.num_blocks,)
        return [blocks[at // size] * size + at % size for at in places]

    @torch.inference_mode()
    def keep(self, segment: Segment, nodes: Sequence[int]) -> None:
        """Move the tokens at `nodes` of a segment that was read, in that order, to its start."""
        source = self.slots(segment, [segment.start + node for node in nodes])
        into = self.slots(segment, range(segment.start, segment.start + len(nodes)))
        moved, places = (torch.tensor(given, device=self.device) for given in (source, into))
        for blocks in self.stored:
            flat = _flat(blocks)
            flat.index_copy_(0, places, flat.index_select(0, moved))

    def device_table(self, rows: Sequence[Segment], width: int) -> Tensor:
        """Return the block table of `rows`, int32 [B, width], padded with -1."""
        table = np.full((len(rows), width), -1, np.int32)
        for row, segment in enumerate(rows):
            blocks = (segment.blocks or (self.num_blocks,))[:width]
            table[row, : len(blocks)] = blocks
        return self.sent(torch.from_numpy(table))

    def sent(self, staged: Tensor) -> Tensor:
        """Copy a tensor to the cache's device without making the host wait."""
        if self.device.type != "cuda":
            return staged.to(self.device)
        return staged.pin_memory().to(self.device, non_blocking=True)

    # The rows of a decode graph: one token each, every tensor at a fixed address.

    def bind(self, rows: Sequence[Segment]) -> None:
        """Make row b of the next graphed step the request of rows[b]; the other rows are empty."""
        rest = len(self.lengths) - len(rows)
        idle = [Segment(blocks=(), start=0, tokens=())] * rest
        table = self.device_table([*rows, *idle], self.block_table.shape[1])
        self.block_table.copy_(table, non_blocking=True)
        starts = [row.start for row in (*rows, *idle)]
        self.lengths.copy_(self.sent(torch.tensor(starts, dtype=torch.int32)), non_blocking=True)

    def first_rows(self, rows: int) -> Self:
        """Return a view of the first rows, in the same memory."""
        view = copy.copy(self)
        view.lengths, view.block_table = self.lengths[:rows], self.block_table[:rows]
        return view

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Store k, v [B, Hkv, 1, D]; a row whose count is 0 writes to block P."""
        size = self.block_size
        block = self.block_table.gather(1, (self.lengths // size).long()[:, None])[:, 0].long()
        slots = torch.where(counts > 0, block * size + self.lengths % size, self.num_blocks * size)
        self.store(layer, k[:, :, 0], v[:, :, 0], slots)

    def attend(
        self,
        layer: int,
        q: Tensor,
        counts: Tensor,
        tree: Tensor | None,  # noqa: ARG002 - part of the protocol; a graph has none
    ) -> Tensor:
        """Attend with q [B, H, 1, D] to the rows, including what was just written."""
        totals = (self.lengths + counts).clamp(min=1)  # an idle row reads block P
        return self.read(layer, q, self.block_table, totals)

    def advance(self, counts: Tensor) -> None:
        """Count the written tokens: lengths += counts, integers [B]."""
        self.lengths.add_(counts)

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that tell a replayed graph its rows."""
        return {"lengths": self.lengths, "block_table": self.block_table}


def _bits(x: Tensor) -> Tensor:
    """Return x, or the bytes of float8 numbers: torch moves those only as bytes on a CPU."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _flat(blocks: Tensor) -> Tensor:
    """Return the slots of a pool's blocks, [(P + 1) * block_size, ...], in the same memory."""
    return _bits(blocks).flatten(0, 1)


def _at(flat: Tensor, source: Tensor | slice) -> Tensor:
    return flat[source] if isinstance(source, slice) else flat.index_select(0, source)
