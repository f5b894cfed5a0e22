"""The fused form of a Llama over the rows of a paged cache: an engine's forwards on a CPU.

Letters: B rows, T tokens of the widest, R tokens of all rows, C hidden_size, V vocab_size, H
attention heads, Hkv key and value heads, G = H / Hkv, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.models import Llama
from labcore.models.fused import FusedLlama
from labcore.serving.cache.gathered import additive_mask
from labcore.serving.cache.paged import Forward, PagedCache

__all__ = ["FusedPages", "can_be_fused"]

_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)
MOST_WEIGHTS = 2**28
"""Most weights of a model that are copied unasked: 1 GiB in fp32."""


def can_be_fused(model: Llama) -> str:
    """Why a model has no fused form, "" where it has one.

    It must be whole, in fp32, on the CPU, and nothing in it changed: no module of another kind in
    a module's place, no hooks.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return f"it is on {parameter.device} in {parameter.dtype}, not on the CPU in float32"
    for name, module in model.named_modules():
        if type(module) not in _PLAIN and type(module).__module__ != Llama.__module__:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks"
    return ""


class FusedPages(FusedLlama):
    """A `FusedLlama` whose keys and values lie in a `PagedCache`.

    It must have written all that it reads: inside a head it stores numbers in another order than a
    `Llama`. Padding is not computed; a row that rests is, as one token.
    """

    @torch.inference_mode()
    def read(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        cache: PagedCache,
        parents: Sequence[Sequence[int]] | None = None,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and hidden [B, T, C] behind the tokens of the cache's first B rows.

        The cache was bound to the rows, and told how many tokens of each come. tokens: of each
        row, none where it rests. parents: of trees, [B, T], -2 for padding; None for chains.
        last: only behind the last token of each row, T is 1.
        """
        rows = _Rows(self, tokens, cache, parents)
        turns = self._turns_up_to(max(rows.positions) + 1)[torch.tensor(rows.positions)]
        x = F.embedding(rows.tokens, self._embedding)  # [R, C]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.before_attention))
            qkv.view(torch.complex64).mul_(turns)
            x.add_(layer.out(rows.attend(index, qkv)), alpha=1 / layer.out.scale)
            if layer.out_bias is not None:
                x.add_(layer.out_bias)
            gate, up = layer.gate_up(self._normed(x, layer.before_mlp)).chunk(2, dim=1)
            x.add_(layer.down(F.silu(gate) * up), alpha=1 / layer.down.scale)
        cache.advance(rows.counts)
        x = rows.last(x) if last else rows.pad(x)
        hidden = self._normed(x, self._last_gain)
        logits = self._head(hidden * (1 / self._head.scale))
        batch = len(tokens)
        return logits.view(batch, -1, logits.shape[1]), hidden.view(batch, -1, hidden.shape[1])


class _Rows:
    """What all layers of one forward share: which token is where, and what it sees."""

    def __init__(
        self,
        model: FusedLlama,
        tokens: Sequence[Sequence[int]],
        cache: PagedCache,
        parents: Sequence[Sequence[int]] | None,
    ) -> None:
        config = model.config
        self.cache, self.kv, self.size = cache, config.kv_heads, config.head_size
        self.group = config.num_attention_heads // self.kv
        self.batch = len(tokens)
        read = [[*row] or [0] for row in tokens]
        sizes = [len(row) for row in read]
        self.width = max(sizes)
        self.tokens = torch.tensor([token for row in read for token in row])
        self.counts = torch.tensor([len(row) for row in tokens], dtype=torch.int32)
        starts = cache.starts
        steps = [range(size) for size in sizes] if parents is None else map(_depths, parents)
        self.positions = [
            start + step
            for start, size, row in zip(starts, sizes, steps, strict=False)
            for step in row[:size]
        ]
        self.forward: Forward = cache.hosted(sizes)
        if self.forward.mask is None:
            tree = None if parents is None else torch.tensor(parents, dtype=torch.int32)
            self.forward.mask = additive_mask(
                cache.lengths[: self.batch],
                tree,
                width=self.width,
                group=self.group,
                reach=self.forward.reach,
                dtype=torch.float32,
            )
        # Of each token its place in the rectangle of rows, None where all are as wide.
        self.places: Tensor | None = None
        if min(sizes) < self.width:
            places = [row * self.width + t for row, size in enumerate(sizes) for t in range(size)]
            self.places = torch.tensor(places)
        self._sizes = sizes

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Store and attend. qkv: [R, (H + 2 Hkv) D], rotated; returns [R, H D]."""
        kv, size, batch, width = self.kv, self.size, self.batch, self.width
        split = self.group * kv * size
        k, v = qkv[:, split:].unflatten(1, (2, kv, size)).unbind(1)
        self.cache.store(layer, k, v, self.forward)
        q = self.pad(qkv[:, :split]).view(batch, width, self.group, kv, size)
        # [B, Hkv, G * T, D]
        folded = q.permute(0, 3, 2, 1, 4).reshape(batch, kv, -1, size)
        mixed = self.cache.mix(layer, folded, self.forward)
        mixed = mixed.view(batch, kv, self.group, width, size).permute(0, 3, 2, 1, 4)
        return self._unpad(mixed.reshape(batch * width, split))

    def pad(self, x: Tensor) -> Tensor:
        """[R, ...] as [B * T, ...]."""
        if self.places is None:
            return x
        padded = x.new_zeros(self.batch * self.width, *x.shape[1:])
        return padded.index_copy_(0, self.places, x)

    def _unpad(self, x: Tensor) -> Tensor:
        return x if self.places is None else x.index_select(0, self.places)

    def last(self, x: Tensor) -> Tensor:
        """Of [R, ...] the last token of each row: [B, ...]."""
        return x.index_select(0, torch.tensor(self._sizes).cumsum(0) - 1)


def _depths(parents: Sequence[int]) -> Sequence[int]:
    """Of each node of a tree, padding behind it, the number of its ancestors."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
