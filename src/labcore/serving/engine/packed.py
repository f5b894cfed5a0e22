"""The packed layout in which one step writes to a paged cache and reads from it.

A step's tokens, chunks of prompts and decodes alike, are concatenated: linear layers see one
matrix, and in attention each request sees its own blocks (selective batching: Yu et al., Orca, OSDI
2022).

Letters: R tokens of a step, B rows of a group, T tokens per row, H attention heads, Hkv key and
value heads, G = H / Hkv, D head_dim, S keys of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.models import tree_mask
from labcore.serving.engine.cache import PagedCache, Segment

__all__ = ["PackedStep"]


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
