"""Where low precision meets an update rule: which dtype computes, and how the result is rounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["stochastic_round"]

Rule = Callable[..., tuple[Tensor, dict[str, Any]]]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an update is computed in: float64 for float64 parameters, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round x [any shape, float32] to bfloat16, up or down by chance, so that the mean is x.

    The 16 bits that bfloat16 drops are compared with 16 random bits. NaN and infinity are kept.
    generator: torch.Generator on x's device, None for torch's default one.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    # A carry out of the dropped bits rounds the magnitude up: the sign bit is never touched.
    up = (x.contiguous().view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(x), up.view(torch.float32), x).to(torch.bfloat16)


def apply_rule(
    rule: Rule,
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    step: float | Tensor = 0.0,
    maximize: bool = False,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
    **hyperparameters: Any,
) -> None:
    """One step of `rule` on real tensors of one shape, results stored in place.

    `state` holds the moments, in any floating dtype, and perhaps `master`, a float32 copy of the
    weight that is then the one updated; `param` [any shape] gets its rounded value.
    `step` counts the steps before this one.
    """
    dtype = compute_dtype(param.dtype)
    moments = {name: value.to(dtype) for name, value in state.items() if name != "master"}
    master = state.get("master")
    weight = (param if master is None else master).to(dtype)
    grad = grad.to(dtype)
    if maximize:
        grad = -grad
    new, new_state = rule(weight, grad, {**moments, "step": step}, **hyperparameters)
    for name in moments:
        state[name].copy_(new_state[name])
    if master is not None:
        master.copy_(new)
    if stochastic and param.dtype == torch.bfloat16:
        new = stochastic_round(new, generator)
    param.copy_(new)
