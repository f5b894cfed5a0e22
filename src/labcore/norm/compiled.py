"""Both passes of ghost normalization as compiled code: what `fused=True` runs on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labcore.compiling import ahead

__all__ = ["Averages", "Passes", "constants", "passes"]


class Passes(NamedTuple):
    """The compiled passes; see `_passes` for what they take and return."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Averages(NamedTuple):
    """Running averages that the forward pass updates: keep · average + Σ weight · statistic.

    mean, var: [channels]. weights: a float for each ghost.
    """

    mean: Tensor
    var: Tensor
    keep: float
    weights: tuple[float, ...]


def passes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, averages: Averages | None
) -> Passes | None:
    """Return the passes for x: [ghosts, values, channels] or [ghosts, rows, channels, area].

    None where nothing compiles, and for tensors that compiled code, which checks nothing, would
    misread.
    """
    given = (x, weight, bias, *(averages[:2] if averages else ()))
    if 1 in x.shape or not all(_alike(one, x) for one in given if one is not None):
        return None
    return _passes(x.dim(), x.dtype, weight is not None, bias is not None, averages is not None)


def _alike(one: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is an ordinary contiguous one of x's dtype on the CPU."""
    plain = type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"
    return plain and one.is_contiguous() and one.dtype == x.dtype and not one.is_neg()


@functools.lru_cache(maxsize=256)
def constants(*numbers: float) -> Tensor:
    """Return numbers as a tensor, which is not to be changed."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


@functools.cache
def _passes(
    dims: int, dtype: torch.dtype, has_weight: bool, has_bias: bool, tracks: bool
) -> Passes | None:
    """Compile both passes. Each writes its result of x's shape to `to`.

    A parameter is [channels] or [channels, 1]. numbers: eps, 1 / n with n values per channel of a
    ghost, n / (n - 1), and the averages' `keep`. averages: mean, variance and `weights`, or none.
    """
    over = (1,) if dims == 3 else (1, 3)

    def forward(
        x: Tensor,
        to: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        numbers: Tensor,
        averages: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        eps, share, unbiased, keep = numbers.unbind()
        mean = x.sum(over, keepdim=True) * share
        centered = x - mean
        var = centered.square().sum(over, keepdim=True) * share
        inverse = torch.rsqrt(var + eps)
        if tracks:
            weights = averages[2].to(dtype)[:, None]
            found = mean.flatten(1), var.flatten(1) * unbiased
            for average, each in zip(averages, found, strict=False):
                average.mul_(keep).add_((weights * each).sum(0))
        out = centered * (inverse if weight is None else inverse * weight)
        to.copy_(out if bias is None else out + bias)
        return mean, var, inverse

    def backward(
        x: Tensor,
        grad: Tensor,
        to: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        numbers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        share = numbers[1]
        normal = (x - mean) * inverse
        total = grad.sum(over, keepdim=True)
        dot = (grad * normal).sum(over, keepdim=True)
        scale = inverse if weight is None else inverse * weight
        to.copy_(scale * (grad - (total + normal * dot) * share))
        return dot.sum((0, 1)), total.sum((0, 1))

    def examples(length: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        shape = (length, length + 1, length + 2, length + 3)[:dims]
        zeros = functools.partial(torch.zeros, dtype=dtype, device="cpu")
        x, grad, to, into = (zeros(shape) for _ in range(4))
        mean, inverse = (one.sum(over, keepdim=True) for one in (x, grad))
        weight, bias = (
            zeros(shape[2], *[1] * (dims - 3)) if there else None
            for there in (has_weight, has_bias)
        )
        numbers = torch.ones(4, dtype=torch.float64, device="cpu")
        weights = torch.zeros(length, dtype=torch.float64, device="cpu")
        kept = (zeros(shape[2]), zeros(shape[2]), weights) if tracks else ()
        back = x, grad, into, weight, mean, inverse, numbers
        return (x, to, weight, bias, numbers, kept), back

    (fore, back), (more_fore, more_back) = examples(5), examples(11)  # 4 would be tied to `numbers`
    first = ahead(forward, fore, more_fore)
    second = None if first is None else ahead(backward, back, more_back)
    return None if first is None or second is None else Passes(first, second)
