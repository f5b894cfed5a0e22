"""Weights packed in fp16: a product reads half the bytes, and a few rows cost little more than one.

Letter: R rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PackedMatrix", "packing_works"]

_SMALL = 1 << 16  # fewer weights are in cache anyway; for one row, the plain product starts sooner
_ROUNDING = 2.0**-25  # half of fp16's smallest step


class PackedMatrix:
    """x @ weight.T + bias, with the weight multiplied by `scale`, a power of two.

    The scale brings the largest weight just below fp16's largest number. Then bf16 weights (8 bits)
    are exact in fp16 (11 bits), except those 2**-31 times smaller than the largest. Their error is
    at most 2**-39 of the largest, far below the rounding of the fp32 sums. fp32 weights aren't
    exact.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        largest = float(weight.abs().max())
        self.scale = 2.0 ** (15 - math.frexp(largest)[1]) if 1e-25 < largest < 1e25 else 1.0
        self.weight, self.bias = (weight * self.scale).contiguous(), bias
        self._packed: Any = None
        self._fewest = 1  # the fewest rows that use packed weights

    def fits(self) -> bool:
        """Return whether fp16 represents the scaled weights to within _ROUNDING."""
        return bool((self.weight.half().float() - self.weight).abs().max() <= _ROUNDING)

    def pack(self) -> None:
        """Use fp16 weights after this call."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(self.weight, self.bias)
        self._fewest = 2 if self.weight.numel() < _SMALL else 1
        product = torch.ops.quantized.linear_dynamic_fp16.default
        # Skips the overload's __call__, which spends 1 µs on looking for traced objects.
        self._product = getattr(product, "_op", product)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x, fp32 [R, inputs], with fp32 sums in either case; return fp32 [R, outputs]."""
        if self._packed is None or x.shape[0] < self._fewest:
            return F.linear(x, self.weight, self.bias)
        product: Tensor = self._product(x, self._packed)
        return product

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add x @ weight.T, without scale and bias, to total [R, outputs] in place."""
        if self._packed is None or x.shape[0] < self._fewest:
            total.addmm_(x, self.weight.t(), alpha=1 / self.scale)
        else:
            total.add_(self._product(x, self._packed), alpha=1 / self.scale)


def packing_works() -> bool:
    """Return whether this PyTorch build can multiply by fp16 weights (FBGEMM) on this CPU."""
    weight = torch.arange(12.0).view(3, 4)
    matrix = PackedMatrix(weight)
    try:
        matrix.pack()
        product = matrix(torch.ones(2, 4))
    except (AttributeError, RuntimeError):  # not compiled in, or no kernel for this processor
        return False
    return torch.equal(product, (weight.sum(1) * matrix.scale).expand(2, 3))
