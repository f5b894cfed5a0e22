"""Clipping by a fixed limit on the global norm, on each group's norm, or on each element."""

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
    """Scale all gradients, in place, by min(1, max_norm / their global norm).

    The direction of the whole gradient does not change.

    parameters: a tensor, tensors, or (name, tensor) pairs. Parameters without a gradient are
    ignored, and one that appears twice counts once. Sparse gradients are coalesced. Complex
    gradients are measured by modulus, and DTensors over all ranks, so every rank must call this.
    max_norm: above 0; infinity measures without clipping.
    norm_type: the order of the norm, above 0; infinity is the largest absolute element.
    nonfinite: what to do about NaN and infinite elements.
        "raise": raise a RuntimeError that names the parameters, and change nothing. Only this
        policy costs a host synchronization on a GPU. Meta tensors have no numbers and pass.
        "skip": set all gradients and coefficients to 0. Momentum and weight decay still move the
        weights, so read `finite` if that matters.
        "zero": set these elements to 0, then measure and clip the rest (three passes on a GPU).
    foreach: False works tensor by tensor; None and True group tensors where that is faster.

    Returns `Clipped` with one norm and one coefficient. Norms are float64, so finite gradients of
    lower precision never overflow, and gradients of any size are clipped to max_norm. Unlike
    `torch.nn.utils.clip_grad_norm_`, this adds no epsilon to the norm.
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
    """Scale each group of gradients, in place, by min(1, max_norm / the group's norm).

    by: "parameter" makes each parameter a group. "layer" groups parameters whose names differ only
    in the last part (weight and bias of one module). A function maps a parameter's name to the name
    of its group. The last two need (name, tensor) pairs.
    The other arguments are as in `clip_by_global_norm`. "skip" sets all gradients to 0, whichever
    group was not finite.

    Returns `Clipped` with a norm and a coefficient per group, in order of appearance. If the
    coefficients differ, the direction of the whole gradient changes.
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

    The two parts of a complex element are clamped separately. The other arguments are as in
    `clip_by_global_norm`. Returns `Clipped` with, for each parameter, its largest absolute element
    (norm_type infinity) and that element's factor. Other elements have a factor between that and 1.
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
    """Map the name of each group to the indices of its gradients."""
    if by == "parameter":
        return {name: [index] for index, name in enumerate(found.names)}
    if not found.named:
        raise ValueError(
            f"by={by!r} needs the parameters' names, got tensors without names; "
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
