"""Norms of gradients in float64, in which no finite gradient overflows or underflows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from labcore.clipping.contract import Gradients, is_distributed
from labcore.clipping.rows import row_norms

WIDE = (torch.float64, torch.complex128)


def norm_order(norm_type: float) -> float:
    """Return norm_type as a float if it is above 0, including infinity and 'inf'."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(
            f"norm_type must be a number above 0 or infinity, got {norm_type!r}; "
            "2.0 is the Euclidean norm"
        )
    return order


def gradient_norms(
    found: Gradients, order: float, *, foreach: bool | None = None, modulus: bool = True
) -> Tensor:
    """Return each gradient's norm, [n] float64 on `found.device`; NaN or infinite if it is.

    modulus: True counts a complex number as one element, False as its two parts.
    """
    if not found.parts:
        return torch.zeros(0, dtype=torch.float64)
    quick = order == 2.0 and found.readable and not found.distributed
    if quick and foreach is not False:
        norms, doubtful = row_norms(found.parts)
        for index in doubtful:
            norms[index] = wide_norm(found.parts[index], order)
        return norms
    pairs = zip(found.grads, found.parts, strict=True)
    each = [wide_norm(whole(grad, part, modulus), order) for grad, part in pairs]
    return torch.stack([norm.to(found.device) for norm in gathered(each)])


def whole(grad: Tensor, part: Tensor, modulus: bool = True) -> Tensor:
    """Return what to measure: the DTensor itself, complex numbers, a sparse gradient's values."""
    if is_distributed(grad):
        return grad
    return torch.view_as_complex(part) if modulus and grad.is_complex() else part


def wide_norm(x: Tensor, order: float, dim: tuple[int, ...] | None = None) -> Tensor:
    """Compute norms in float64 without reading numbers: [], or x's shape with ones at `dim`.

    float64 holds the squares of float32. Tensors that are already float64 are scaled by their
    largest element.
    """
    wide = torch.complex128 if x.is_complex() else torch.float64
    keep = dim is not None
    plain = order in (1.0, 2.0) and x.dtype not in WIDE
    if plain or x.numel() == 0:
        order = 2.0 if x.numel() == 0 else order  # torch has no maximum of an empty tensor
        return torch.linalg.vector_norm(x, order, dim, keep, dtype=wide)
    if dim is None and not x.is_complex() and not is_distributed(x):
        # On a CPU, this is 30 times faster than the norm of order infinity, and also exact.
        largest = torch.maximum(*(end.abs() for end in torch.aminmax(x))).double()
    else:
        # The modulus of a complex number may overflow in its own dtype.
        dtype = wide if x.is_complex() else None
        largest = torch.linalg.vector_norm(x, math.inf, dim, keep, dtype=dtype).double()
    if order == math.inf:
        return largest
    scale = scale_of(largest)
    return scale * torch.linalg.vector_norm(x.to(wide) / scale, order, dim, keep)


def scale_of(largest: Tensor) -> Tensor:
    """Return `largest`, or 1 where it is 0, NaN or infinite: 0 / 0 and inf / inf would be NaN."""
    return torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)


def combined(norms: Tensor, order: float) -> Tensor:
    """[n] -> []: the norm of a vector whose pieces have these norms, without overflow."""
    if norms.numel() == 0:
        return norms.new_zeros(())
    if order == 2.0 and norms.is_cpu and not torch.compiler.is_compiling():
        total = torch.linalg.vector_norm(norms)
        if 1e-100 < total < 1e100:
            return total
    scale = scale_of(norms.amax())
    return scale * torch.linalg.vector_norm(norms / scale, order)


def gathered(norms: list[Tensor]) -> list[Tensor]:
    """Replace each DTensor by its value, with one collective per mesh and placement of scalars."""
    full: list[Any] = list(norms)
    kinds: dict[Any, list[int]] = {}
    for index, norm in enumerate(norms):
        if is_distributed(norm):
            one: Any = norm
            if norm.ndim:
                full[index] = one.full_tensor()
            else:
                kinds.setdefault((one.device_mesh, one.placements), []).append(index)
    for (mesh, placements), members in kinds.items():
        local = torch.stack([full[i].to_local() for i in members])
        whole = type(full[members[0]]).from_local(local, mesh, placements, run_check=False)
        for index, norm in zip(members, whole.full_tensor().unbind(), strict=True):
            full[index] = norm
    return full


def replicated(x: Tensor, *, like: Tensor) -> Tensor:
    """Wrap a tensor that every rank holds whole in a DTensor on the mesh of the DTensor `like`."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
