"""The keys and values of tokens that a Llama has read: the protocol, and the dense form of it.

Letters: B rows, T tokens of a forward, H attention heads, Hkv key and value heads, D head_dim,
N nodes of a tree, S capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import positive_int
from labcore.models.config import LlamaConfig

__all__ = ["DenseCache", "KVCache", "tree_mask"]


@runtime_checkable
class KVCache(Protocol):
    """What `Llama.forward` asks of a cache.

    lengths: int32 [B] on the cache's device, the tokens of each row. Positions and write slots
    are computed from it there, so no call waits for the device.
    """

    lengths: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Store k, v [B, Hkv, T, D] behind each row's tokens: of row b the first counts[b]."""

    def attend(self, layer: int, q: Tensor, counts: Tensor, tree: Tensor | None) -> Tensor:
        """Attention of q [B, H, T, D] over the row's tokens and those just written.

        A query sees the ones before it, in a tree its ancestors. Returns [B, H, T, D].
        """

    def advance(self, counts: Tensor) -> None:
        """Count what was written: lengths += counts, integers [B]."""

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens of each row after its first lengths[b], integers [B]."""

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Of a row's tokens in the last forward keep those at `slots`, in that order."""

    def buffers(self) -> dict[str, Tensor]:
        """The tensors, at fixed addresses, that say which tokens a replayed graph works on."""


def tree_mask(parents: Tensor) -> Tensor:
    """Which nodes each node of a tree sees: itself and its ancestors. bool [B, N, N].

    parents: integers [B, N]: -1 is a child of the prefix, -2 is padding, which sees itself only.
    Computed on the device of `parents` without waiting for it.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    seen = (nodes[:, None] == nodes) | (parents[:, :, None] == nodes)
    # Each squaring doubles the generations that a node sees; a chain of N needs N - 1.
    for _ in range(max(parents.shape[1] - 1, 0).bit_length()):
        seen = (seen.float() @ seen.float()) > 0
    return seen


class DenseCache:
    """A cache of one rectangle a layer: [B, Hkv, S, D] for keys, the same for values.

    batch: B; capacity: S, the most tokens a row can hold; dtype, device: the model's.
    lengths: int32 [B], the tokens of each row.
    Raises ValueError when a row would outgrow the capacity. That is known here without asking the
    device while B rows of the forwards so far fit; past that, each forward may ask it.
    A captured graph attends to the whole capacity and, replayed, checks nothing.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.capacity = positive_int("capacity", capacity)
        # One slot more than the capacity takes the keys of padding.
        size = (positive_int("batch", batch), config.kv_heads, capacity + 1, config.head_size)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.zeros(size, dtype=dtype, device=device) for _ in layers]
        self._values = [torch.zeros(size, dtype=dtype, device=device) for _ in layers]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._starts = torch.zeros_like(self.lengths)  # lengths before the last forward
        self._longest = 0  # the host's upper bound of lengths
        self._width = 0  # T of the forward under way
        self._lent = False  # whether a caller may write lengths behind the host's back
        self._mask: Tensor | None = None  # bool [B, 1, T, S], shared by a forward's layers

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Store k, v [B, Hkv, T, D]; the padding of row b begins at counts[b].

        Raises RuntimeError when k carries gradients, ValueError when a row is full.
        """
        if k.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a cache keeps no gradients; run the forward under torch.no_grad() or "
                "torch.inference_mode(), or without a cache"
            )
        if layer == 0 or self._mask is None:
            self._mask = None
            self._width = k.shape[2]
            self._make_room(k.shape[2], counts)
        offsets = torch.arange(k.shape[2], device=k.device)
        slots = (self.lengths[:, None] + offsets).clamp(max=self.capacity)
        slots = torch.where(offsets < counts[:, None], slots, self.capacity).long()
        index = slots[:, None, :, None].expand_as(k)
        self._keys[layer].scatter_(2, index, k.to(self._keys[layer].dtype))
        self._values[layer].scatter_(2, index, v.to(self._values[layer].dtype))

    def _make_room(self, width: int, counts: Tensor) -> None:
        """Raise ValueError if a row cannot take its tokens; asks the device only near the end."""
        if _capturing(counts) or (self._longest + width <= self.capacity and not self._lent):
            return
        self._longest = int(self.lengths.max())
        longest = int((self.lengths + counts).max())
        if longest > self.capacity:
            raise ValueError(
                f"a row must hold at most {self.capacity} tokens, got {longest}; make the cache "
                "with a larger capacity or truncate it"
            )

    def attend(
        self,
        layer: int,
        q: Tensor,
        counts: Tensor,  # noqa: ARG002 - the protocol's; keys of padding were not stored
        tree: Tensor | None,
    ) -> Tensor:
        """Attention of q [B, H, T, D] over the row and what was just written; [B, H, T, D]."""
        reach = self.capacity
        if not (_capturing(q) or self._lent):
            reach = min(reach, self._longest + q.shape[2])
        if layer == 0 or self._mask is None:
            self._mask = self._visible(q.shape[2], reach, tree)
        k, v = self._keys[layer][:, :, :reach], self._values[layer][:, :, :reach]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), attn_mask=self._mask, enable_gqa=grouped
        )

    def _visible(self, width: int, reach: int, tree: Tensor | None) -> Tensor:
        """Which slots each query sees: bool [B, 1, T, reach]."""
        slots = torch.arange(reach, device=self.lengths.device)
        ahead = slots - self.lengths[:, None]  # [B, reach]: place in this forward, < 0 before it
        if tree is None:
            queries = torch.arange(width, device=self.lengths.device)
            return (ahead[:, None, :] <= queries[:, None])[:, None]
        nodes = ahead.clamp(0, width - 1).long()[:, None, :].expand(-1, width, -1)
        related = tree_mask(tree).gather(2, nodes) & (ahead < width)[:, None, :]
        return (related | (ahead < 0)[:, None, :])[:, None]

    def advance(self, counts: Tensor) -> None:
        """Count what was written: lengths += counts, integers [B]."""
        self._starts.copy_(self.lengths)
        self.lengths.add_(counts)
        self._longest = min(self._longest + self._width, self.capacity)
        self._mask = None

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens of row b after its first lengths[b]; a shorter row stays.

        lengths: integers [B]. Raises ValueError for another shape.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"lengths must have shape {tuple(self.lengths.shape)}, got {tuple(lengths.shape)}"
            )
        kept = lengths.to(self.lengths).clamp(min=0)
        self.lengths.copy_(torch.minimum(self.lengths, kept))
        self._mask = None

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Of a row's tokens in the last forward keep those at `slots`, moved behind the prefix.

        slots: integers [K], places in that forward (a tree's nodes), in the order to be kept:
        an accepted path. The row's length becomes that before the forward plus K.
        """
        places = torch.as_tensor(slots, device=self.lengths.device, dtype=torch.long)
        start = self._starts[row].long()
        into = start + torch.arange(places.numel(), device=places.device)
        for stored in (*self._keys, *self._values):
            stored[row].index_copy_(1, into, stored[row].index_select(1, start + places))
        self.lengths[row] = (start + places.numel()).to(self.lengths.dtype)
        self._mask = None

    def buffers(self) -> dict[str, Tensor]:
        """`lengths`: what a graph's caller fills before a replay.

        From then on every forward outside of a graph asks the device whether its tokens fit.
        """
        self._lent = True
        return {"lengths": self.lengths}


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
