"""The KV cache of the fused form: one rectangle per layer, which attention reads as views.

Letters: B rows, Hkv key and value heads, D head_dim, S capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.models.config import LlamaConfig

__all__ = ["FusedCache", "StoredLayer"]


class StoredLayer(NamedTuple):
    """Views of one layer's keys and values, made once to save time in each step."""

    rows: Tensor  # [2, Hkv, B, S, D]
    slots: Tensor  # [2, Hkv, B * S, D]
    keys: Tensor  # [B, Hkv, S, D]
    values: Tensor


class FusedCache:
    """A KV cache for B rows, created by `FusedLlama.new_cache`: [2, Hkv, B, S, D] per layer.

    lengths: int32 [B], the number of tokens in each row; every forward reads it again.
    """

    @torch.inference_mode()
    def __init__(self, config: LlamaConfig, *, batch: int, capacity: int) -> None:
        self.capacity = positive_int("capacity", capacity)
        size = (2, config.kv_heads, positive_int("batch", batch), capacity, config.head_size)
        rectangles = [torch.zeros(size) for _ in range(config.num_hidden_layers)]
        self.layers = [StoredLayer(x, x.flatten(2, 3), *x.transpose(1, 2)) for x in rectangles]
        with torch.inference_mode(False):  # a caller may change them outside of inference mode
            self.lengths = torch.zeros(batch, dtype=torch.int32)
        self._starts = [0] * batch  # lengths before the last forward
        self._counts = [0] * batch  # tokens of the last forward

    def truncate(self, lengths: Tensor) -> None:
        """Drop all tokens of row b after its first lengths[b]; a shorter row doesn't change.

        lengths: integers [B]. Raises ValueError for another shape.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"lengths must have shape {tuple(self.lengths.shape)}, got {tuple(lengths.shape)}"
            )
        pairs = zip(self.lengths.tolist(), lengths.tolist(), strict=True)
        self._set([min(length, max(int(kept), 0)) for length, kept in pairs])

    @torch.inference_mode()
    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Keep only the tokens at `slots` of a row's last forward, moved next to the prefix.

        slots: integers [K], indices in that forward (a tree's nodes), in the order to keep.
        The row's length becomes its length before the forward plus K.
        Raises ValueError for an index at which that forward stored no token.
        """
        places = slots.tolist() if isinstance(slots, Tensor) else list(slots)
        start, count = self._starts[row], self._counts[row]
        if any(not 0 <= place < count for place in places):
            raise ValueError(
                f"slots must be indices of the {count} tokens that the last forward stored for row "
                f"{row}, got {places}"
            )
        if places != list(range(len(places))):  # an accepted chain is already in place
            index = torch.tensor(places) + start
            for layer in self.layers:
                of_row = layer.rows[:, :, row]
                of_row[:, :, start : start + len(places)] = of_row.index_select(2, index)
        self.lengths[row] = start + len(places)

    def begin(self, counts: list[int]) -> list[int]:
        """Return the rows' lengths before a forward. Raises ValueError if tokens don't fit."""
        starts: list[int] = self.lengths.tolist()
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        if longest > self.capacity:
            raise ValueError(
                f"a row must hold at most {self.capacity} tokens, got {longest}; create the cache "
                "with a larger capacity or truncate it"
            )
        return starts

    def advance(self, starts: list[int], counts: list[int]) -> None:
        """Count the tokens that a forward stored: B ints before it, and B ints of its own."""
        self._starts, self._counts = starts, counts
        self._set([start + count for start, count in zip(starts, counts, strict=True)])

    def _set(self, lengths: list[int]) -> None:
        if len(lengths) == 1:  # saves creating a tensor
            self.lengths.fill_(lengths[0])
        else:
            self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
