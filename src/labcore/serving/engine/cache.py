"""A paged KV cache, and the packed layout in which one step writes to it and reads from it.

A request holds whole blocks, scattered over the pool and listed in its block table. It wastes less
than one block, and requests with the same prefix share that prefix's blocks (Kwon et al., 2023,
arXiv 2309.06180). A step's tokens, chunks of prompts and decodes alike, are concatenated: linear
layers see one matrix, and in attention each request sees its own blocks (selective batching: Yu et
al., Orca, OSDI 2022).

Letters: R tokens of a step, B rows of a group, T tokens per row, P blocks of `block_size` tokens,
H attention heads, Hkv key and value heads, G = H / Hkv, D head_dim, S keys of the longest row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.attention import paged_attention, quantize_kv
from labcore.attention.kv_codes import check_readable
from labcore.checks import one_of, positive_int
from labcore.device import Backend
from labcore.models import Llama, LlamaConfig, tree_mask
from labcore.models.cache import CODES, KV_DTYPES
from labcore.parallel.llama import local_config

__all__ = ["PackedStep", "PagedCache", "Segment"]


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


class PackedStep:
    """The tokens of one step, concatenated: a `KVCache` with one row, for one forward.

    Segments with equally many tokens form a group, whose attention is one call. Linear layers see
    no padding. On a CPU a group's keys are padded to its longest context and masked; the GPU's
    kernel reads each row's own keys. A request reads only its own tokens: nothing that others left
    in a block, not even NaN, can reach it.

    tokens, positions: int64 [R], on the cache's device. spans: the place of each segment's tokens
    in them, in the order in which the segments were given.
    Raises ValueError for a segment whose blocks don't hold its tokens, and if two would write to
    one block.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        _check(segments, cache.block_size)
        order = sorted(range(len(segments)), key=lambda one: len(segments[one].tokens))
        packed = [segments[one] for one in order]
        self.spans, begin = [range(0)] * len(segments), 0
        for one, segment in zip(order, packed, strict=True):
            self.spans[one] = range(begin, begin + len(segment.tokens))
            begin += len(segment.tokens)
        positions = [at for one in packed for at in _positions(one)]
        slots = [at for one in packed for at in cache.slots(one, range(one.start, one.end))]
        self.tokens = cache.sent(torch.tensor([token for one in packed for token in one.tokens]))
        self.positions = cache.sent(torch.tensor(positions))
        self.reach = max(positions) + 1
        self._slots = cache.sent(torch.tensor(slots))
        make = _GroupOnGpu if cache.device.type == "cuda" else _GroupOnCpu
        self._groups = [
            make(cache, [*rows]) for _, rows in groupby(packed, lambda one: len(one.tokens))
        ]
        self.lengths = torch.zeros(1, dtype=torch.int32, device=cache.device)  # of the protocol

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:  # noqa: ARG002
        """Store k, v [1, Hkv, R, D]."""
        self.cache.store(layer, k[0].transpose(0, 1), v[0].transpose(0, 1), self._slots)

    def attend(self, layer: int, q: Tensor, counts: Tensor, tree: Tensor | None) -> Tensor:  # noqa: ARG002
        """Attend with q [1, H, R, D]; return [1, H, R, D]."""
        heads = q[0].transpose(0, 1).unflatten(1, (self.cache.keys[layer].shape[2], -1))
        return self.mix(layer, heads).flatten(1, 2).transpose(0, 1)[None]

    def advance(self, counts: Tensor) -> None:
        """Do nothing: the scheduler counts what was read."""

    def mix_fused(self, layer: int, qkv: Tensor) -> Tensor:
        """Store and attend for a `FusedLlama`: rotated qkv [R, (H + 2 Hkv) D] to [R, H D]."""
        kv, size = self.cache.keys[layer].shape[2:]
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv * size, kv * size, kv * size), 1)
        self.cache.store(layer, k.unflatten(1, (kv, size)), v.unflatten(1, (kv, size)), self._slots)
        mixed = self.mix(layer, q.unflatten(1, (-1, kv, size)).transpose(1, 2))
        return mixed.transpose(1, 2).flatten(1)

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attend, group by group, with q [R, Hkv, G, D] to [R, Hkv, G, D]."""
        parts, begin = [], 0
        for group in self._groups:
            end = begin + group.rows * group.width
            rows = q[begin:end].unflatten(0, (group.rows, group.width))  # [B, T, Hkv, G, D]
            parts.append(group.attend(layer, rows).flatten(0, 1))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _GroupOnCpu:
    """Rows with T tokens each; their keys and values are gathered for torch's attention."""

    def __init__(self, cache: PagedCache, segments: list[Segment]) -> None:
        self.cache, self.rows, self.width = cache, len(segments), len(segments[0].tokens)
        ends = np.array([one.end for one in segments])
        self.reach, size = int(ends.max()), cache.block_size
        table = cache.device_table(segments, -(-self.reach // size)).numpy()
        slots = (table[:, :, None] * size + np.arange(size)).reshape(self.rows, -1)
        inside = np.arange(slots.shape[1]) < ends[:, None]
        # A mask doesn't keep NaN out of a product, so a row's first slot pads it to S keys.
        source = np.where(inside, slots, slots[:, :1])[:, : self.reach].reshape(-1)
        # A long prompt often gets consecutive blocks, which need no copy.
        in_place = self.rows == 1 and bool((np.diff(source) == 1).all())
        self.source = slice(source[0], source[-1] + 1) if in_place else torch.from_numpy(source)
        self.mask: Tensor | None = None  # [B, 1, G * T or 1, S], added to the scores
        if self.width > 1 or ends.min() < self.reach:
            seen = np.stack([_seen(one, self.reach) for one in segments])[:, None]
            self.mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend with q [B, T, Hkv, G, D]; the G heads of a key head become rows of one product."""
        shape = q.shape
        folded = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * T, D]
        k, v = (
            found.unflatten(0, (self.rows, self.reach)).transpose(1, 2)  # [B, Hkv, S, D]
            for found in self.cache.gather(layer, self.source, q.dtype)
        )
        if self.mask is not None and self.mask.shape[2] not in (1, folded.shape[2]):
            self.mask = self.mask.repeat(1, 1, shape[3], 1)
        mask = None if self.mask is None else self.mask.to(q.dtype)
        mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        return mixed.unflatten(2, (shape[3], shape[1])).permute(0, 3, 1, 2, 4)


class _GroupOnGpu:
    """Rows with T tokens each, for the paged kernel, which reads the blocks in place."""

    def __init__(self, cache: PagedCache, segments: list[Segment]) -> None:
        self.cache, self.rows, self.width = cache, len(segments), len(segments[0].tokens)
        width = max(1, *(len(one.blocks) for one in segments))
        self.table = cache.device_table(segments, width)
        self.ends = cache.sent(torch.tensor([one.end for one in segments], dtype=torch.int32))
        self.tree: Tensor | None = None
        if any(one.parents is not None for one in segments):
            chain = range(-1, self.width - 1)
            trees = [one.parents or chain for one in segments]
            self.tree = cache.sent(torch.tensor([[*one] for one in trees], dtype=torch.int32))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend with q [B, T, Hkv, G, D]."""
        heads = q.flatten(2, 3).transpose(1, 2)  # [B, H, T, D]
        mixed = self.cache.read(layer, heads, self.table, self.ends, self.tree)
        return mixed.transpose(1, 2).unflatten(2, q.shape[2:4])


def _bits(x: Tensor) -> Tensor:
    """Return x, or the bytes of float8 numbers: torch moves those only as bytes on a CPU."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _flat(blocks: Tensor) -> Tensor:
    """Return the slots of a pool's blocks, [(P + 1) * block_size, ...], in the same memory."""
    return _bits(blocks).flatten(0, 1)


def _at(flat: Tensor, source: Tensor | slice) -> Tensor:
    return flat[source] if isinstance(source, slice) else flat.index_select(0, source)


def _check(segments: Sequence[Segment], block_size: int) -> None:
    writers: dict[int, int] = {}
    for row, one in enumerate(segments):
        if one.blocks and one.end > len(one.blocks) * block_size:
            raise ValueError(
                f"a row of {len(one.blocks)} blocks must hold at most "
                f"{len(one.blocks) * block_size} tokens, got {one.end} in row {row}; give it more "
                "blocks"
            )
        for block in one.blocks[one.start // block_size : -(-one.end // block_size)]:
            if writers.setdefault(block, row) != row:
                raise ValueError(
                    f"a block must be written by one row, got block {block} in rows "
                    f"{writers[block]} and {row}; give one of them a block of its own"
                )


def _positions(segment: Segment) -> Iterator[int]:
    """Yield each token's position: after the prefix, by depth in a tree."""
    if segment.parents is None:
        yield from range(segment.start, segment.end)
        return
    depths: list[int] = []
    for parent in segment.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        yield segment.start + depths[-1]


def _seen(segment: Segment, reach: int) -> np.ndarray:
    """Return which keys each token sees, the prefix and its ancestors: bool [T, S]."""
    ahead = np.arange(reach) - segment.start
    if segment.parents is None:
        causal: np.ndarray = ahead <= np.arange(len(segment.tokens))[:, None]
        return causal
    seen = np.repeat((ahead < 0)[None], len(segment.tokens), 0)
    related = tree_mask(torch.tensor([[*segment.parents]]))[0].numpy()
    seen[:, segment.start : segment.end] = related
    return seen
