"""One weight under AdamW, with separate number formats for weight, state and arithmetic.

torch's loop and foreach AdamW have all three in the weight's format. Its fused AdamW keeps weight
and state in that format and computes in float32. Mixed precision has a float32 copy of the weight,
float32 state and float32 arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.optim import rules
from labcore.studies.adamw_epsilon.epsilon import DTYPES

__all__ = ["Formats", "Path", "all_paths", "weight_paths"]

Formats = tuple[str, str, str]
"""The names of the formats of the weight, the state and the arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Path:
    """What a weight does from 1.0 on.

    weights: [steps + 1] fp64. updates: [steps] fp64, in learning rates; positive moves down.
    """

    weights: Tensor
    updates: Tensor


def weight_paths(
    gradient: float,
    *,
    dtypes: Mapping[str, torch.dtype],
    arithmetic: str,
    eps: float = 1e-8,
    steps: int = 1000,
    lr: float = 1e-3,
    beta2: float = 0.999,
) -> dict[Formats, Path]:
    """Move a weight of 1.0 under a constant gradient, for every format of weight and state.

    dtypes: the formats by name. arithmetic: a name of `dtypes`. Each step rounds the stored weight
    and state to this format, applies `rules.adamw` without decay, and rounds the results back to
    their own formats. The gradient has the weight's format. Raises ValueError for another dtype
    than those of `epsilon.DTYPES`.
    """
    for dtype in dtypes.values():
        one_of("dtype", dtype, DTYPES)
    compute = dtypes[one_of("arithmetic", arithmetic, dtypes)]
    non_negative("eps", eps)
    positive("lr", lr)
    formats = [*dtypes.values()]
    shape = (len(formats), len(formats))  # a row per format of the weight, a column per state
    weight = torch.ones(shape, dtype=torch.float64)
    grad = _rounded(gradient * weight, formats, dim=0).to(compute)
    zero, state = torch.zeros_like(grad), rules.State()
    weights, updates = [weight], []
    for _ in range(positive_int("steps", steps)):
        moved, new = rules.adamw(zero, grad, state, lr=1.0, beta2=beta2, eps=eps, weight_decay=0.0)
        weight = _rounded(weight.to(compute) + lr * moved, formats, dim=0)
        state = {
            name: value if name == "step" else _rounded(value, formats, dim=1).to(compute)
            for name, value in new.items()
        }
        weights.append(weight)
        updates.append(-moved.double())
    of_weights, of_updates = torch.stack(weights), torch.stack(updates)
    return {
        (kept, stored, arithmetic): Path(
            weights=of_weights[:, row, column], updates=of_updates[:, row, column]
        )
        for (row, kept), (column, stored) in itertools.product(enumerate(dtypes), repeat=2)
    }


def all_paths(
    gradient: float,
    *,
    dtypes: Mapping[str, torch.dtype],
    epsilons: Sequence[float],
    steps: int = 1000,
    lr: float = 1e-3,
) -> dict[float, dict[Formats, Path]]:
    """Return `weight_paths` for each eps, with every format of the arithmetic too.

    Three formats, four epsilons and 1,000 steps take about three seconds.
    """
    return {
        eps: {
            formats: path
            for arithmetic in dtypes
            for formats, path in weight_paths(
                gradient, dtypes=dtypes, arithmetic=arithmetic, eps=eps, steps=steps, lr=lr
            ).items()
        }
        for eps in epsilons
    }


def _rounded(values: Tensor, formats: Sequence[torch.dtype], *, dim: int) -> Tensor:
    """Round slice n of values [formats, formats] along `dim` to format n; return fp64."""
    parts = zip(values.unbind(dim), formats, strict=True)
    return torch.stack([part.to(dtype).double() for part, dtype in parts], dim=dim)
