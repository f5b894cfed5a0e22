"""Low precision in update rules: the dtype that computes, and how results are rounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["stochastic_round"]

Rule = Callable[..., tuple[Tensor, dict[str, Any]]]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 parameters, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round x [any shape, float32] to bfloat16, randomly up or down, so that the mean is x.

    The 16 bits that bfloat16 drops are compared with 16 random bits. NaN and infinity are kept.
    generator: torch.Generator on x's device; None for torch's default.
    """
    # One 64-bit draw serves four numbers. Viewed as int16, the noise is offset by half its range.
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    draws.random_(-(1 << 63), None, generator=generator)
    noise = draws.view(torch.int16)[: x.numel()].view(x.shape).to(torch.int32)
    # A carry out of the dropped bits rounds the magnitude up. It never reaches the sign bit.
    up = noise.add_(1 << 15).add_(x.contiguous().view(torch.int32)).bitwise_and_(-65536)
    return torch.where(torch.isfinite(x), up.view(torch.float32), x).to(torch.bfloat16)


def store(
    param: Tensor, value: Tensor, *, stochastic: bool, generator: torch.Generator | None
) -> None:
    """Round `value` [float32 or float64] into `param`; if `stochastic`, randomly for bfloat16."""
    if stochastic and param.dtype == torch.bfloat16:
        value = stochastic_round(value, generator)
    param.copy_(value)


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
    """Apply one step of `rule` to real tensors of the same shape, in place.

    `state` holds the moments, in any floating dtype. It may also hold `master`, a float32 copy of
    the weight, which is then updated and rounded into `param` [any shape]. `step` counts the steps
    before this one.
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
    store(param, new, stochastic=stochastic, generator=generator)
