"""Where a sign update breaks: drift without gradients, a hidden NaN, a stall in low precision.

Each trap is a run of one or two weights under hand-made gradients, for any torch optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from labcore.checks import floating, non_negative, positive

__all__ = [
    "NaiveLion",
    "constant_pull",
    "drift",
    "moved_fraction",
    "predict_moved_fraction",
    "spoil_one_gradient",
    "weight_path",
]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Gradient = Callable[[int, torch.Tensor], torch.Tensor]


def weight_path(
    make_optimizer: OptimizerFactory,
    gradient: Gradient,
    *,
    start: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """The weights [steps + 1, N], fp64, of a run with hand-made gradients.

    gradient(step, weights [N]) -> [N]; start: weights [N], whose dtype is the parameter's.
    """
    weights = nn.Parameter(floating("start", start).clone())
    optimizer = make_optimizer([weights])
    path = [weights.detach().double().clone()]
    for step in range(steps):
        weights.grad = gradient(step, weights.detach()).to(weights.dtype)
        optimizer.step()
        path.append(weights.detach().double().clone())
    return torch.stack(path)


def drift(make_optimizer: OptimizerFactory, *, steps: int = 400) -> torch.Tensor:
    """Weights [steps + 1] from 1.0: one gradient of 1, then none at all.

    A rule that follows the size of its momentum comes to rest; one that follows the sign keeps
    walking. In fp32 it never stops: the momentum shrinks to 50 times the smallest number there is,
    a hundredth of which rounds to nothing.
    """
    return weight_path(
        make_optimizer,
        lambda step, weights: torch.full_like(weights, float(step == 0)),
        start=torch.ones(1),
        steps=steps,
    )[:, 0]


def spoil_one_gradient(
    make_optimizer: OptimizerFactory, *, at: int = 30, steps: int = 120
) -> torch.Tensor:
    """Two weights [steps + 1, 2] pulled from 1.0 to 0; the first one's gradient is NaN once.

    The loss is half the squared length, so the gradient is the weight itself.
    """

    def gradient(step: int, weights: torch.Tensor) -> torch.Tensor:
        pulled = weights.clone()
        if step == at:
            pulled[0] = math.nan
        return pulled

    return weight_path(make_optimizer, gradient, start=torch.ones(2), steps=steps)


def constant_pull(
    make_optimizer: OptimizerFactory, *, dtype: torch.dtype, steps: int = 200
) -> torch.Tensor:
    """Weights [steps + 1] from 1.0 under a gradient that is always 1, stored in `dtype`."""
    return weight_path(
        make_optimizer,
        lambda _, weights: torch.ones_like(weights),
        start=torch.ones(1, dtype=dtype),
        steps=steps,
    )[:, 0]


class NaiveLion(torch.optim.Optimizer):
    """Lion as it is commonly written, without a policy for NaN: torch's sign of NaN is 0.

    Kept to show the trap; train with labcore.optim.Lion.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(params, {"lr": non_negative("lr", lr), "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta_update, beta_state = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                update = torch.lerp(momentum, parameter.grad, 1 - beta_update).sign()
                parameter.sub_(update, alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta_state)
        return loss


def moved_fraction(weights: torch.Tensor, lr: float) -> float:
    """Share of `weights` [N] that a step of -lr or +lr changes in their own dtype, measured."""
    positive("lr", lr)
    step = torch.full_like(floating("weights", weights), lr)
    moved = (weights - step != weights).double() + (weights + step != weights).double()
    return (moved / 2).mean().item()


def predict_moved_fraction(weights: torch.Tensor, lr: float, dtype: torch.dtype) -> float:
    """The same share by arithmetic: a step moves a weight when it exceeds half its spacing.

    weights: [N] in any dtype; the spacing of `dtype` at w is eps * 2**floor(log2 |w|).
    """
    positive("lr", lr)
    size = floating("weights", weights).double().abs()
    exponent = torch.frexp(size).exponent - 1
    spacing = torch.ldexp(torch.full_like(size, torch.finfo(dtype).eps), exponent)
    return ((lr > spacing / 2) | (size == 0)).double().mean().item()
