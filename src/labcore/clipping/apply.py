"""Change gradients in place. On a CPU, only those that need it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labcore.clipping.contract import Gradients
from labcore.clipping.norms import gradient_norms

HALVES = (torch.float16, torch.bfloat16)
TINY = 1e-30  # float32 has full precision down to 1e-38


def settled(
    found: Gradients, measure: Callable[[], Tensor], sizes: tuple[int, ...], nonfinite: str
) -> tuple[Tensor, Tensor]:
    """Return (norms [K], finite [] bool) after applying the policy: "raise", or clean for "zero".

    measure: returns the norms. sizes: the number of norms that belong to each gradient.
    """
    norms = measure()
    fine = torch.isfinite(norms)
    finite = fine.all()
    if nonfinite == "raise" or (nonfinite == "zero" and found.readable):
        # Meta tensors have no numbers to judge. Otherwise, this line reads one; the rest is rare.
        if finite.is_meta or finite:
            return norms, finite
        good = [bool(units.all()) for units in fine.split(sizes)]
        bad = [i for i, each in enumerate(good) if not each]
        if nonfinite == "raise":
            _refuse([found.names[i] for i in bad], len(good))
    elif nonfinite == "zero":
        bad = list(range(len(found.parts)))
    else:
        return norms, finite
    for i in bad:
        found.parts[i].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return (measure() if bad else norms), finite


def measured(
    found: Gradients, order: float, nonfinite: str, foreach: bool | None, modulus: bool = True
) -> tuple[Tensor, Tensor]:
    """Call `settled` with one norm per gradient, as computed by `gradient_norms`."""
    measure = functools.partial(gradient_norms, found, order, foreach=foreach, modulus=modulus)
    return settled(found, measure, (1,) * len(found.parts), nonfinite)


def _refuse(bad: list[str], count: int) -> None:
    listed = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    raise RuntimeError(
        f"gradients must be finite, got NaN or infinity in {len(bad)} of {count}: {listed}; "
        "nothing was changed. Find the cause, or pass nonfinite='skip' or 'zero'"
    )


def coefficients_for(norms: Tensor, limit: float | Tensor, finite: Tensor, policy: str) -> Tensor:
    """Return min(1, limit / norms), which is 1 for a norm of 0; all 0 if the step is skipped."""
    factors = torch.where(norms > 0, limit / norms, 1.0).clamp(max=1.0)
    return torch.where(finite, factors, 0.0) if policy == "skip" else factors


def scale(found: Gradients, factors: Tensor, foreach: bool | None) -> None:
    """Multiply the gradients by `factors`: [] for one common factor, or [n] for one each."""
    if found.readable:
        _scale_on_cpu(found.parts, factors, foreach)
    elif factors.ndim == 0 and foreach is not False and found.parts:
        _scale_together(found.parts, factors)
    else:
        each = factors.unbind() if factors.ndim else [factors] * len(found.parts)
        for part, factor in zip(found.parts, each, strict=True):
            _scale_one(part, factor)


def _scale_on_cpu(parts: tuple[Tensor, ...], factors: Tensor, foreach: bool | None) -> None:
    """Multiply by factors below 1. On a CPU, numbers may be read."""
    if factors.ndim == 0 and not factors < 1:
        return
    if factors.ndim == 0 and foreach is not False and parts and not 0 < factors < TINY:
        dtypes = {part.dtype for part in parts}
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        # Pass a tensor: with a number, a list of float16 loses factors below 6e-8. Start at the
        # end, which was read last and may still be in the cache.
        torch._foreach_mul_(parts[::-1], factors.to(wide))
        return
    for part, factor in zip(parts, factors.expand(len(parts)).tolist(), strict=True):
        if 0 < factor < TINY:  # in two steps, both at full precision
            part.mul_(math.sqrt(factor)).mul_(math.sqrt(factor))
        elif factor < 1:
            part.mul_(factor)


def _scale_together(parts: Sequence[Tensor], factor: Tensor) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        kinds.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), members in kinds.items():
        if dtype in HALVES:
            for part in members:
                _scale_one(part, factor)
        else:
            torch._foreach_mul_(members, factor.to(device, dtype))


def _scale_one(part: Tensor, factor: Tensor) -> None:
    """Multiply in at least float32, because in float16 a factor below 6e-8 is 0."""
    wide = torch.promote_types(part.dtype, torch.float32)
    # A factor with a dimension takes part in type promotion, so the product is rounded once.
    part.unsqueeze(0).mul_(factor.to(part.device, wide).reshape(1))


def clear_where_skipped(found: Gradients, finite: Tensor, policy: str) -> None:
    """Under "skip", set all gradients to 0 unless `finite`, because NaN times 0 is NaN."""
    if policy != "skip" or (found.readable and finite):
        return
    for part in found.parts:
        part.masked_fill_(~finite.to(part.device), 0.0)
