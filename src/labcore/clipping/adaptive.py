"""Adaptive gradient clipping (AGC): each unit's gradient is limited by its weights' norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from labcore import checks
from labcore.clipping.apply import clear_where_skipped, coefficients_for, settled
from labcore.clipping.contract import (
    Clipped,
    Gradients,
    Parameters,
    gradients,
    is_distributed,
    named_pairs,
    policy,
)
from labcore.clipping.norms import gathered, replicated, whole, wide_norm
from labcore.clipping.rows import SMALLEST

__all__ = ["clip_adaptive"]


@torch.no_grad()
def clip_adaptive(
    parameters: Parameters,
    clipping: float = 0.01,
    eps: float = 1e-3,
    *,
    unit_axis: int | Mapping[str, int] = 0,
    exclude: Iterable[str] = (),
    nonfinite: str = "raise",
) -> Clipped:
    """Scale each unit's gradient g, in place, to at most clipping * max(norm of its weights, eps).

    A unit is the weights that feed one output: a row of a linear layer [out, in], a filter of a
    convolution [out, in, k...], or a row of an embedding [rows, width]. A parameter with zero or
    one dimensions is one unit. The norms are Euclidean, over all axes except the unit axis.

    unit_axis: the axis that indexes the units: 0 for the layers above, 1 for a transposed
    convolution or a kernel stored as [in, out]. A mapping sets it by name, with 0 for other names.
    exclude: prefixes of names to leave unchanged, as the paper does for the last layer ("head.").
    A mapping and prefixes need (name, tensor) pairs, and each must match a name or ValueError is
    raised.
    nonfinite: as in `clip_by_global_norm`.

    Returns `Clipped` with a norm and a coefficient per unit; `sizes` gives each parameter's number
    of units. A sparse gradient has one unit per row that it holds. The policy checks only
    gradients: a unit whose weights are NaN gets a coefficient of NaN.
    Source: Brock, De, Smith and Simonyan, arXiv:2102.06171.
    """
    checks.positive("clipping", clipping)
    checks.positive("eps", eps)
    policy(nonfinite)
    found, axes = _chosen(parameters, unit_axis, exclude)
    pairs = zip(_weights(found), axes, strict=True)
    weights = gathered([_unit_norms(weight, axis, found.readable) for weight, axis in pairs])
    shapes = [norm.shape for norm in weights]
    sizes = tuple(shape.numel() for shape in shapes)

    def measure() -> Tensor:
        each = zip(found.grads, found.parts, axes, strict=True)
        norms = [_unit_norms(whole(grad, part), axis, found.readable) for grad, part, axis in each]
        return _line(found, gathered(norms))

    norms, finite = settled(found, measure, sizes, nonfinite)
    limits = clipping * _line(found, weights).clamp(min=eps)
    factors = coefficients_for(norms, limits, finite, nonfinite)
    for index, (factor, shape) in enumerate(zip(factors.split(sizes), shapes, strict=True)):
        if not (found.readable and factor.numel() and factor.min() >= 1):
            _scale_units(found.grads[index], found.parts[index], factor.view(shape))
    clear_where_skipped(found, finite, nonfinite)
    return Clipped(norms=norms, coefficients=factors, finite=finite, names=found.names, sizes=sizes)


def _chosen(
    parameters: Parameters, unit_axis: int | Mapping[str, int], exclude: Iterable[str]
) -> tuple[Gradients, list[int]]:
    """Return the gradients to clip and the unit axis of each."""
    prefixes = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    axis_of = dict(unit_axis) if isinstance(unit_axis, Mapping) else {}
    common = 0 if isinstance(unit_axis, Mapping) else unit_axis
    listed = list(named_pairs(parameters))
    names = [name for name, _ in listed if name is not None]
    unknown = [one for one in axis_of if one not in names]
    unknown += [one for one in prefixes if not any(name.startswith(one) for name in names)]
    if unknown:
        raise ValueError(
            f"exclude and unit_axis must match names of parameters, got {unknown[0]!r}, which "
            f"matches none of {len(names)}; pass model.named_parameters() and check its names"
        )
    kept = [(name, p) for name, p in listed if name is None or not name.startswith(prefixes)]
    found = gradients(p if name is None else (name, p) for name, p in kept)
    axes = [axis_of.get(name, common) for name in found.names]
    for name, grad, axis in zip(found.names, found.grads, axes, strict=True):
        if grad.ndim > 1 and not -grad.ndim <= axis < grad.ndim:
            raise ValueError(
                f"unit_axis must be an axis of {name!r}, got {axis} for shape "
                f"{tuple(grad.shape)}; in torch's layers the output axis is 0"
            )
        if grad.is_sparse and (axis != 0 or grad.sparse_dim() != 1):
            raise ValueError(
                f"a sparse gradient needs unit_axis 0 and one sparse dimension, "
                f"got unit_axis {axis} and {grad.sparse_dim()} for {name!r}; "
                "exclude it or make it dense"
            )
    return found, axes


def _weights(found: Gradients) -> Iterator[Tensor]:
    """Yield each parameter; for a sparse gradient, only the rows that the gradient holds."""
    for param, grad in zip(found.params, found.grads, strict=True):
        yield param.index_select(0, grad.indices()[0]) if grad.is_sparse else param


def _unit_norms(x: Tensor, axis: int, readable: bool) -> Tensor:
    """Return norms of x's shape with ones except at `axis`; [] if x has zero or one dimensions."""
    if x.ndim <= 1:
        return wide_norm(x, 2.0)
    dims = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    if readable and x.dtype == torch.float32 and not is_distributed(x):
        return _quick_units(x, axis, dims)
    return wide_norm(x, 2.0, dims)


def _quick_units(x: Tensor, axis: int, dims: tuple[int, ...]) -> Tensor:
    """Compute in float32, and again in float64 for units whose squares float32 cannot hold."""
    quick = torch.linalg.vector_norm(x, 2.0, dims, True)
    norms = quick.double()
    least = math.sqrt(SMALLEST[torch.float32] * (x.numel() // max(x.shape[axis], 1)))
    doubtful = ((quick < least) | ~torch.isfinite(quick)).flatten().nonzero().flatten()
    units = x.index_select(axis, doubtful)
    if units.any():  # Zeros are fine: rows of an embedding that no token used.
        norms.index_copy_(axis, doubtful, wide_norm(units, 2.0, dims))
    return norms


def _line(found: Gradients, norms: list[Tensor]) -> Tensor:
    """Concatenate the norms of all units, on the device of the first gradient."""
    lines = [norm.reshape(-1).to(found.device) for norm in norms]
    return torch.cat(lines) if lines else torch.zeros(0, dtype=torch.float64)


def _scale_units(grad: Tensor, part: Tensor, factor: Tensor) -> None:
    factor = factor.to(part.device, torch.promote_types(part.dtype, torch.float32))
    if is_distributed(grad):
        grad.mul_(replicated(factor, like=grad))
    elif grad.is_complex():
        part.mul_(factor.unsqueeze(-1))
    else:
        part.unsqueeze(0).mul_(factor.unsqueeze(0))
