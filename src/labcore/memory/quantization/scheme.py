"""Weights in eight or four bits: each weight becomes a code, and each row or group shares a scale.

A weight-only layer stores codes and rounds nothing else: it multiplies with the dequantized
weights, which exist for one layer at a time. `Scheme` is the implementation to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labcore.checks import finite, floating, one_of, positive_int

__all__ = ["INT4", "INT8", "Quantized", "QuantizedLinear", "Scheme", "pack", "quantize", "unpack"]

SCALE = 4  # bytes: scales and lows are float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How to turn a weight [O, I] into codes.

    bits: 8, or 4 with two codes per byte.
    group_size: adjacent weights in a row that share a scale; None is the whole row, an output
    channel. It must divide I, and be even with 4 bits.
    symmetric: codes from -127 to 127 (-7 to 7) times a scale, so 0 stays 0. Otherwise codes from 0
    to 255 (15) times a scale, plus the group's lowest weight, which must be stored too.
    """

    bits: int = 8
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        one_of("bits", self.bits, (8, 4))
        if self.group_size is not None:
            positive_int("group_size", self.group_size)

    def groups(self, inputs: int, name: str = "weight") -> int:
        """Return the groups per row of `inputs` weights. Raises ValueError if they don't fit."""
        size = inputs if self.group_size is None else self.group_size
        if not inputs or inputs % size:
            raise ValueError(
                f"group_size must divide the rows of {name}, got {size} for {inputs} inputs; "
                "choose a divisor or keep that layer"
            )
        if self.bits == 4 and size % 2:
            raise ValueError(
                f"group_size must be even where two codes share a byte, got {size} for {name}; "
                "choose an even size or 8 bits"
            )
        return inputs // size

    def bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of the codes and scales of a weight [outputs, inputs] of any dtype."""
        numbers = 1 if self.symmetric else 2
        codes = outputs * inputs * self.bits // 8
        return codes + outputs * self.groups(inputs) * numbers * SCALE

    def check(self, name: str, weight: Tensor) -> None:
        """Raise ValueError for a weight [O, I] whose rows aren't a whole number of groups."""
        self.groups(weight.shape[1], name)

    def apply(self, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        """Replace each layer by a `QuantizedLinear`, and remove it from `linears`."""
        for name in list(linears):
            model.set_submodule(name, QuantizedLinear(linears.pop(name), self))


INT8 = Scheme()
INT4 = Scheme(bits=4, group_size=32, symmetric=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """The codes of a weight [O, I] with G groups per row.

    codes: int8 [O, I]; uint8 [O, I] if asymmetric; uint8 [O, I / 2] for 4 bits.
    scales: float32 [O, G], the step from one code to the next.
    lows: float32 [O, G], the weight that code 0 represents; None for a symmetric scheme.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    scheme: Scheme

    def dequantize(self) -> Tensor:
        """Return the weights that the codes represent: float32 [O, I], a new tensor."""
        wide = (self.codes if self.scheme.bits == 8 else unpack(self.codes)).float()
        if self.scheme.bits == 4 and self.scheme.symmetric:
            wide -= 8
        groups = wide.unflatten(1, (self.scales.shape[1], -1))
        groups *= self.scales.unsqueeze(-1)
        if self.lows is not None:
            groups += self.lows.unsqueeze(-1)
        return wide

    def expected_rms(self) -> float:
        """Return the RMS error to expect if errors are uniform within ±half a step: step / √12."""
        return math.sqrt(self.scales.double().square().mean().item() / 12)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes per byte: uint8 [O, I] of 0 to 15, I even -> uint8 [O, I / 2].

    An even column goes into the low four bits, the odd column after it into the high four.
    Raises ValueError for other codes, which would spill into their neighbors.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] % 2 or (codes > 15).any():
        raise ValueError(
            f"codes must be uint8 [O, I] of 0 to 15 with I even, got {codes.dtype} "
            f"{tuple(codes.shape)} up to {codes.max().item() if codes.numel() else 'none'}; "
            "quantize to 4 bits first"
        )
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: uint8 [O, I / 2] -> uint8 [O, I]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


@torch.no_grad()
def quantize(weight: Tensor, scheme: Scheme) -> Quantized:
    """Return the nearest codes for a weight [O, I]; no weight is off by more than half a step.

    Half a step is the group's largest magnitude / 254 (/ 14 for 4 bits), or, if asymmetric, its
    range / 510 (/ 30). float32 rounding adds to that. Asymmetric codes are exact for a group of
    equal weights.
    weight: float; computed in float32. Raises ValueError for NaN, infinity (including float64
    numbers beyond float32's range), or rows that aren't a whole number of groups.
    """
    finite("weight", floating("weight", weight).float())
    if weight.dim() != 2:
        raise ValueError(f"weight must be [outputs, inputs], got shape {tuple(weight.shape)}")
    wide = weight.float().unflatten(1, (scheme.groups(weight.shape[1]), -1))
    if scheme.symmetric:
        most = 2 ** (scheme.bits - 1) - 1
        least, lows = -most, None
        scales = wide.abs().amax(-1) / most
    else:
        least, most = 0, 2**scheme.bits - 1
        lows = wide.amin(-1)
        scales = (wide.amax(-1) - lows) / most
        wide = wide - lows.unsqueeze(-1)
    # A scale of 0 means that any other step will do; 0 / 0 has no code.
    steps = torch.where(scales == 0, 1.0, scales)
    codes = (wide / steps.unsqueeze(-1)).round_().clamp_(least, most).flatten(1)
    if scheme.bits == 8:
        codes = codes.to(torch.int8 if scheme.symmetric else torch.uint8)
    else:
        codes = pack((codes + 8 if scheme.symmetric else codes).to(torch.uint8))
    return Quantized(codes=codes, scales=scales, lows=lows, scheme=scheme)


class _Product(torch.autograd.Function):
    """x [..., I] -> [..., O]. The backward dequantizes again, so no weight waits for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None


class QuantizedLinear(nn.Module):
    """A linear layer that stores its weight as codes: x [..., I] -> [..., O].

    The forward dequantizes the weight in float32, casts it to the layer's dtype, multiplies, and
    frees it, so one layer at a time needs workspace. The input gets a gradient and the weight
    doesn't, so small adapters can be trained next to it. The scales are buffers, which
    `.to(torch.bfloat16)` would round, so choose the model's dtype before you convert it.

    linear: the layer to replace. Its bias doesn't change.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.scheme, self.dtype = scheme, linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantized = quantize(linear.weight, scheme)
        self.register_buffer("codes", quantized.codes)
        self.register_buffer("scales", quantized.scales)
        self.register_buffer("lows", quantized.lows)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [O, I] in the layer's dtype; recomputed on each access."""
        kept = Quantized(codes=self.codes, scales=self.scales, lows=self.lows, scheme=self.scheme)
        return kept.dequantize().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O], in the dtype of x."""
        product: Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        """Return what `print` shows for the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"
