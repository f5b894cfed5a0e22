"""The KV cache of a Llama: a protocol, and a dense implementation.

Letters: B rows, T tokens of a forward, H attention heads, Hkv key and value heads, D head_dim,
N nodes of a tree, S capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import one_of, positive_int
from labcore.models.config import LlamaConfig

__all__ = ["KV_DTYPES", "DenseCache", "KVCache", "StepCache", "kv_bytes", "tree_mask"]

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
CODES = (torch.int8, torch.float8_e4m3fn)
SCALE = 4  # bytes of the float32 scale that the D codes of a key or a value share


def kv_bytes(
    config: LlamaConfig, tokens: int, *, dtype: str = "bfloat16", page: int = 1, devices: int = 1
) -> int:
    """Return the bytes that one request's keys and values take on each device.

    They are 2 * layers * Hkv * D numbers per token. `tokens` is rounded up to whole pages of `page`
    tokens; a contiguous reservation is one page of the maximum length.
    dtype: a key of KV_DTYPES. "int8" and "float8" also store a float32 scale per key and value of
    each head, as `attention.quantize_kv` returns.
    devices: tensor parallelism divides the heads. It never splits one, so with more devices than
    key and value heads each device holds one.
    Raises ValueError or TypeError for invalid arguments.
    """
    one_of("dtype", dtype, KV_DTYPES)
    for name, size in (("tokens", tokens), ("page", page), ("devices", devices)):
        positive_int(name, size)
    kept = KV_DTYPES[dtype]
    slots = -(-tokens // page) * page
    heads = -(-config.kv_heads // devices)
    row = config.head_size * kept.itemsize + SCALE * (kept in CODES)
    return 2 * config.num_hidden_layers * heads * row * slots


class StepCache(Protocol):
    """What `Llama.forward` needs of a KV cache.

    lengths: int32 [B] on the cache's device, the number of tokens in each row. Positions and write
    slots are computed from it on the device, so no call synchronizes.
    """

    lengths: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Append k, v [B, Hkv, T, D] to each row's tokens; for row b, only the first counts[b]."""

    def attend(self, layer: int, q: Tensor, counts: Tensor, tree: Tensor | None) -> Tensor:
        """Attend from q [B, H, T, D] to the row's tokens and those just written.

        A query sees itself and the tokens before it, or its ancestors in a tree. Returns
        [B, H, T, D].
        """

    def advance(self, counts: Tensor) -> None:
        """Count the written tokens: lengths += counts, integers [B]."""


@runtime_checkable
class KVCache(StepCache, Protocol):
    """A KV cache whose rows can also drop tokens, and be replayed by CUDA graphs."""

    def truncate(self, lengths: Tensor) -> None:
        """Drop all tokens of row b after its first lengths[b], integers [B]."""

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Keep only the tokens at `slots` of a row's last forward, in that order."""

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors, at fixed addresses, that tell a replayed graph its tokens."""


def tree_mask(parents: Tensor) -> Tensor:
    """Return which nodes each node of a tree sees, itself and its ancestors: bool [B, N, N].

    parents: integers [B, N]. -1 is a child of the prefix and -2 is padding, which sees only itself.
    Computed on the device of `parents` without synchronizing.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    seen = (nodes[:, None] == nodes) | (parents[:, :, None] == nodes)
    # Each squaring doubles the generations that a node sees; a chain of N needs N - 1.
    for _ in range(max(parents.shape[1] - 1, 0).bit_length()):
        seen = (seen.float() @ seen.float()) > 0
    return seen


class DenseCache:
    """A KV cache with one tensor [B, Hkv, S, D] per layer for keys, and one for values.

    batch: B. capacity: S, the most tokens a row can hold. dtype, device: the model's.
    lengths: int32 [B], the number of tokens in each row.
    Raises ValueError if a row would exceed the capacity. The host tracks an upper bound of the
    lengths, so this check synchronizes with the device only if that bound exceeds the capacity.
    A captured graph attends to the whole capacity, and a replay doesn't check it.
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
        # The extra slot receives the keys of padding.
        size = (positive_int("batch", batch), config.kv_heads, capacity + 1, config.head_size)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.zeros(size, dtype=dtype, device=device) for _ in layers]
        self._values = [torch.zeros(size, dtype=dtype, device=device) for _ in layers]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._starts = torch.zeros_like(self.lengths)  # lengths before the last forward
        self._longest = 0  # the host's upper bound of lengths
        self._width = 0  # T of the current forward
        self._lent = False  # whether a caller may change lengths without the host noticing
        self._mask: Tensor | None = None  # bool [B, 1, T, S], shared by a forward's layers

    def write(self, layer: int, k: Tensor, v: Tensor, counts: Tensor) -> None:
        """Append k, v [B, Hkv, T, D] to the rows; the padding of row b begins at counts[b].

        Raises RuntimeError if k requires gradients, and ValueError if a row is full.
        """
        if k.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a KV cache keeps no gradients; run the forward under torch.no_grad() or "
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
        """Raise ValueError if a row's tokens don't fit; synchronizes only near the capacity."""
        if _capturing(counts) or (self._longest + width <= self.capacity and not self._lent):
            return
        self._longest = int(self.lengths.max())
        longest = int((self.lengths + counts).max())
        if longest > self.capacity:
            raise ValueError(
                f"a row must hold at most {self.capacity} tokens, got {longest}; create the cache "
                "with a larger capacity or truncate it"
            )

    def attend(
        self,
        layer: int,
        q: Tensor,
        counts: Tensor,  # noqa: ARG002 - part of the protocol; padding keys weren't stored
        tree: Tensor | None,
    ) -> Tensor:
        """Attend from q [B, H, T, D] to the row's tokens and those just written: [B, H, T, D]."""
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
        """Return which slots each query sees: bool [B, 1, T, reach]."""
        slots = torch.arange(reach, device=self.lengths.device)
        ahead = slots - self.lengths[:, None]  # [B, reach]: index in this forward, < 0 before it
        if tree is None:
            queries = torch.arange(width, device=self.lengths.device)
            return (ahead[:, None, :] <= queries[:, None])[:, None]
        nodes = ahead.clamp(0, width - 1).long()[:, None, :].expand(-1, width, -1)
        related = tree_mask(tree).gather(2, nodes) & (ahead < width)[:, None, :]
        return (related | (ahead < 0)[:, None, :])[:, None]

    def advance(self, counts: Tensor) -> None:
        """Count the written tokens: lengths += counts, integers [B]."""
        self._starts.copy_(self.lengths)
        self.lengths.add_(counts)
        self._longest = min(self._longest + self._width, self.capacity)
        self._mask = None

    def truncate(self, lengths: Tensor) -> None:
        """Drop all tokens of row b after its first lengths[b]; a shorter row doesn't change.

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
        """Keep only the tokens at `slots` of a row's last forward, moved next to the prefix.

        slots: integers [K], an accepted path: indices in that forward (a tree's nodes), in the
        order to keep. The row's length becomes its length before the forward plus K.
        """
        places = torch.as_tensor(slots, device=self.lengths.device, dtype=torch.long)
        start = self._starts[row].long()
        into = start + torch.arange(places.numel(), device=places.device)
        for stored in (*self._keys, *self._values):
            stored[row].index_copy_(1, into, stored[row].index_select(1, start + places))
        self.lengths[row] = (start + places.numel()).to(self.lengths.dtype)
        self._mask = None

    def buffers(self) -> dict[str, Tensor]:
        """Return `lengths`, which a graph's caller fills before a replay.

        After this call, every forward outside a graph synchronizes to check that its tokens fit.
        """
        self._lent = True
        return {"lengths": self.lengths}


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
