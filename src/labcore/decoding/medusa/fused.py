"""Medusa heads for a few rows on a CPU: one product for all first blocks, packed weights.

Letters: B rows, C hidden_size, V vocabulary, K heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.decoding.medusa.heads import MedusaHeads
from labcore.models.forms import MOST_WEIGHTS, SharedForms, why_not_fused
from labcore.models.packed import PackedMatrix, packing_works

__all__ = ["FusedHeads", "fused_heads"]


class FusedHeads:
    """`MedusaHeads` as a function of a few rows on a CPU: the same logits, up to fp32 rounding.

    heads: on the CPU, in fp32. Weights are copied, so later changes to the heads have no effect.
    The first blocks of all heads are one product, and so is a tied projection, which reads its
    matrix once for all heads. packed: whether weights are read in fp16, see `FusedLlama`.
    Raises TypeError for another dtype, ValueError for another device.
    """

    @torch.inference_mode()
    def __init__(self, heads: MedusaHeads) -> None:
        weight = heads.backbone_projection
        for tensor in (weight, *heads.parameters()):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"FusedHeads run on the CPU, got {tensor.device}; move backbone and heads "
                    "with .cpu() or use the MedusaHeads themselves"
                )
            if tensor.dtype != torch.float32:
                raise TypeError(
                    f"FusedHeads compute in torch.float32, got {tensor.dtype}; convert backbone "
                    "and heads with .float()"
                )
        self.heads, self.layers, self.config = heads.heads, heads.layers, heads.config
        sources: Any = heads.blocks
        projections: Any = heads.projections
        blocks = [list(block) for block in sources]
        firsts = [block[0].linear for block in blocks]
        self._first = PackedMatrix(torch.cat([one.weight for one in firsts]))
        self._first_bias = torch.cat([one.bias for one in firsts])
        self._later = [
            [(PackedMatrix(block.linear.weight), block.linear.bias.clone()) for block in later]
            for later in zip(*(block[1:] for block in blocks), strict=True)
        ]
        self._shared = None if heads.projection == "full" else PackedMatrix(weight)
        self._own: list[list[PackedMatrix]] = []  # per head, its products in order
        for own in projections:
            parts = [own] if heads.projection == "full" else [own.down, own.up]
            self._own.append([PackedMatrix(part.weight) for part in parts])
        every = [self._first, *(m for layer in self._later for m, _ in layer)]
        every += [m for own in self._own for m in own]
        every += [] if self._shared is None else [self._shared]
        self.packed = packing_works() and all(matrix.fits() for matrix in every)
        if self.packed:
            for matrix in every:
                matrix.pack()

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return fp32 logits [count, B, V] of the first heads, None: all; hidden: fp32 [B, C]."""
        rows, width = hidden.shape
        heads = len(range(self.heads)[:count])
        all_firsts = self._first(hidden) * (1 / self._first.scale) + self._first_bias
        changed = F.silu(all_firsts).view(rows, self.heads, width)[:, :heads]
        state = (hidden[:, None] + changed).transpose(0, 1).reshape(-1, width)  # [K B, C]
        for layer in self._later:
            inside = [
                _product(matrix, part) + bias
                for (matrix, bias), part in zip(layer, state.split(rows), strict=False)
            ]
            state = state + F.silu(torch.cat(inside))
        logits = None if self._shared is None else _product(self._shared, state)
        if self._own:
            parts = []
            for products, part in zip(self._own, state.split(rows), strict=False):
                for matrix in products:
                    part = _product(matrix, part)
                parts.append(part)
            own = torch.cat(parts)
            logits = own if logits is None else logits + own
        if logits is None:
            raise RuntimeError("heads must have a projection, got none")
        return logits.view(heads, rows, -1)


_FUSED: SharedForms[MedusaHeads, FusedHeads] = SharedForms(FusedHeads)


def fused_heads(heads: MedusaHeads) -> FusedHeads | None:
    """Return the fused form of heads as they are now, by the rule of `fused_form`, or None."""
    shared = heads.backbone_projection
    weights = sum(parameter.numel() for parameter in heads.parameters())
    movable = shared.device.type == "cpu" and shared.dtype == torch.float32
    if not movable or why_not_fused(heads, MedusaHeads) or weights > MOST_WEIGHTS:
        return None
    return _FUSED.of(heads, [shared])


def _product(matrix: PackedMatrix, x: Tensor) -> Tensor:
    return matrix(x) * (1 / matrix.scale)
