"""Parameters with gradients for the tests of clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SHAPES = ((3, 5), (70_001,), (), (1,), (0,), (17, 3, 5, 5), (300, 301), (8192,))


def awkward(
    dtype: torch.dtype, seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, size: float = 1.0
) -> list[Tensor]:
    """Leaves with a gradient of normal numbers times `size`; the last four oddly laid out."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.complex128 if dtype.is_complex else torch.float64

    def draw(*shape: int) -> Tensor:
        return (size * torch.randn(shape, generator=generator, dtype=real)).to(dtype)

    grads = [draw(*shape) for shape in shapes]
    grads.append(draw(20, 3, 15, 17).to(memory_format=torch.channels_last))
    grads.append(draw(95, 99).t())
    grads.append(draw(99, 98)[:, 1:96])  # gaps between its rows
    grads.append(draw(102)[1:])  # its address is no multiple of 16
    found: list[Tensor] = []
    for grad in grads:
        param = nn.Parameter(torch.empty_strided(grad.shape, grad.stride(), dtype=dtype).zero_())
        param.grad = grad
        found.append(param)
    return found


def copies(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, copied with their strides."""
    return [p.grad.clone() for p in params if p.grad is not None]


def put(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Copy gradients back."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def exact_norm(grads: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all of them in float64, scaled so that nothing overflows."""
    flat = torch.cat([g.reshape(-1).abs().double() for g in grads])
    largest = flat.max()
    if largest == 0 or not torch.isfinite(largest):
        return largest
    return largest * torch.linalg.vector_norm(flat / largest, order)


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Of two lists as vectors, in float64."""
    a = torch.cat([g.reshape(-1).double() for g in left])
    b = torch.cat([g.reshape(-1).double() for g in right])
    a, b = a / a.abs().max(), b / b.abs().max()
    return float(a @ b / (a.norm() * b.norm()))
