"""Clipping by a limit: on the norm of everything, on that of each part, on each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from labcore import checks
from labcore.clipping.apply import clear_where_skipped, coefficients_for, measured, scale
from labcore.clipping.contract import (
    Clipped,
    Gradients,
    Parameters,
    gradients,
    limit_above_zero,
    policy,
)
from labcore.clipping.norms import combined, norm_order

__all__ = ["clip_by_global_norm", "clip_by_local_norm", "clip_by_value"]


@torch.no_grad()
def clip_by_global_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    nonfinite: str = "raise",
    foreach: bool | None = None,
) -> Clipped:
    """Scale all gradients, in place, by min(1, max_norm / their common norm): no direction changes.

    parameters: a tensor, tensors, or (name, tensor) pairs; those without a gradient are left out
    and one that comes twice counts once. Sparse gradients are coalesced, complex ones measured by
    modulus, DTensors measured over all ranks (every rank must call).
    max_norm: above 0; infinity measures only.
    norm_type: order of the norm, above 0; infinity is the largest element.
    nonfinite: what a NaN or infinite element does. "raise": a RuntimeError that names the
    parameters, nothing is changed; asking costs a host synchronization on a GPU, the other two
    none. "skip": every gradient becomes 0 and so do the coefficients; momentum and weight decay
    still move weights, so read `finite` where that matters. "zero": such elements become 0, then
    the rest is measured and clipped (three passes on a GPU).
    foreach: False works tensor by tensor, None and True together where that is faster.

    Returns `Clipped` with one norm and one coefficient. Norms are float64: finite gradients of
    lower precision never overflow, and gradients of any size end at max_norm. Unlike
    `torch.nn.utils.clip_grad_norm_` nothing is added to the norm.
    Source: Pascanu, Mikolov and Bengio, arXiv:1211.5063.
    """
    max_norm, order = limit_above_zero("max_norm", max_norm), norm_order(norm_type)
    policy(nonfinite)
    found = gradients(parameters)
    norms, finite = measured(found, order, nonfinite, foreach)
    total = combined(norms, order)
    factor = coefficients_for(total, max_norm, finite, nonfinite)
    scale(found, factor, foreach)
    clear_where_skipped(found, finite, nonfinite)
    return Clipped(
        norms=total.reshape(1),
        coefficients=factor.reshape(1),
        finite=finite,
        names=("all",),
        sizes=(1,),
        norm_type=order,
    )


@torch.no_grad()
def clip_by_local_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    by: str | Callable[[str], str] = "parameter",
    nonfinite: str = "raise",
    foreach: bool | None = None,
) -> Clipped:
    """Scale each group of gradients, in place, by min(1, max_norm / its own norm).

    by: "parameter", a group each; "layer", parameters whose names agree but for the last part
    (weight and bias of one module); or a function from a parameter's name to its group's. The last
    two need (name, tensor) pairs. The rest is as in `clip_by_global_norm`; "skip" sets all
    gradients to 0, whichever group was not finite.

    Returns `Clipped` with a norm and a coefficient for each group, in order of appearance. Where
    groups take different coefficients the direction of the whole gradient bends.
    """
    max_norm, order = limit_above_zero("max_norm", max_norm), norm_order(norm_type)
    policy(nonfinite)
    if not callable(by):
        checks.one_of("by", by, ("parameter", "layer"))
    found = gradients(parameters)
    groups = _groups(found, by)
    each, finite = measured(found, order, nonfinite, foreach)
    norms = _of_groups(each, groups, order)
    factors = coefficients_for(norms, max_norm, finite, nonfinite)
    scale(found, _to_members(factors, groups, len(each)), foreach)
    clear_where_skipped(found, finite, nonfinite)
    return Clipped(
        norms=norms,
        coefficients=factors,
        finite=finite,
        names=tuple(groups),
        sizes=(1,) * len(groups),
        norm_type=order,
    )


@torch.no_grad()
def clip_by_value(
    parameters: Parameters,
    limit: float,
    *,
    nonfinite: str = "raise",
    foreach: bool | None = None,
) -> Clipped:
    """Clamp every element of the gradients, in place, to -limit .. limit.

    A complex element's two parts are clamped each. The rest is as in `clip_by_global_norm`.
    Returns `Clipped` with, for each parameter, its largest absolute element (norm_type infinity)
    and the factor that this element took; all others took a factor between that and 1.
    """
    limit = limit_above_zero("limit", limit)
    policy(nonfinite)
    found = gradients(parameters)
    norms, finite = measured(found, math.inf, nonfinite, foreach, modulus=False)
    factors = coefficients_for(norms, limit, finite, nonfinite)
    parts = found.parts
    if found.readable:
        parts = tuple(p for p, f in zip(parts, factors.tolist(), strict=True) if f < 1)
    if limit < math.inf:
        for part in parts:
            part.clamp_(-limit, limit)
    clear_where_skipped(found, finite, nonfinite)
    return Clipped(
        norms=norms,
        coefficients=factors,
        finite=finite,
        names=found.names,
        sizes=(1,) * len(found.names),
        norm_type=math.inf,
    )


Groups: TypeAlias = dict[str, list[int]]


def _groups(found: Gradients, by: str | Callable[[str], str]) -> Groups:
    """Name of each group -> indices of its gradients."""
    if by == "parameter":
        return {name: [index] for index, name in enumerate(found.names)}
    if not found.named:
        raise ValueError(
            f"by={by!r} needs the parameters' names, got tensors alone; "
            "pass model.named_parameters()"
        )
    groups: Groups = {}
    for index, name in enumerate(found.names):
        group = by(name) if callable(by) else name.rpartition(".")[0] or name
        groups.setdefault(group, []).append(index)
    return groups


def _of_groups(norms: Tensor, groups: Groups, order: float) -> Tensor:
    if len(groups) == len(norms):
        return norms
    rows = norms.unbind()
    members = ([rows[i] for i in indices] for indices in groups.values())
    return torch.stack([combined(torch.stack(m), order) for m in members])


def _to_members(values: Tensor, groups: Groups, count: int) -> Tensor:
    if len(groups) == count:
        return values
    each: list[Tensor] = [values] * count
    for value, indices in zip(values.unbind(), groups.values(), strict=True):
        for index in indices:
            each[index] = value
    return torch.stack(each)
