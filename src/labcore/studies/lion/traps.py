"""Failures of a sign update: drift without gradients, a hidden NaN, a stall in low precision.

Each trap is a run of one or two weights with handmade gradients, for any PyTorch optimizer.
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
    """Return the weights [steps + 1, N], fp64, of a run with handmade gradients.

    gradient: a function (step, weights [N]) -> [N]. start: weights [N] in the parameter's dtype.
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
    """Return the weights [steps + 1], starting at 1.0, with one gradient of 1 followed by zeros.

    A rule whose step depends on the momentum's size comes to rest, but one that depends only on its
    sign keeps moving. In fp32 it never stops, because the momentum decays only to 50 times the
    smallest subnormal number. A hundredth of that rounds to 0.
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
    """Return two weights [steps + 1, 2] pulled from 1.0 to 0, the first with one NaN gradient.

    The loss is half the squared norm, so the gradient equals the weight.
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
    """Return weights [steps + 1], stored in `dtype`, from 1.0 under a constant gradient of 1."""
    return weight_path(
        make_optimizer,
        lambda _, weights: torch.ones_like(weights),
        start=torch.ones(1, dtype=dtype),
        steps=steps,
    )[:, 0]


class NaiveLion(torch.optim.Optimizer):
    """Lion as it's commonly written, without NaN handling; PyTorch's sign of NaN is 0.

    It exists to show the trap. Use labcore.optim.Lion for training.
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
        """Update every parameter that has a gradient."""
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
    """Measure the fraction of `weights` [N] that a step of -lr or +lr changes in their dtype."""
    positive("lr", lr)
    step = torch.full_like(floating("weights", weights), lr)
    moved = (weights - step != weights).double() + (weights + step != weights).double()
    return (moved / 2).mean().item()


def predict_moved_fraction(weights: torch.Tensor, lr: float, dtype: torch.dtype) -> float:
    """Predict the same fraction: a step moves a weight if it exceeds half the spacing there.

    weights: [N] in any dtype. The spacing of `dtype` at w is eps * 2**floor(log2 |w|).
    """
    positive("lr", lr)
    size = floating("weights", weights).double().abs()
    exponent = torch.frexp(size).exponent - 1
    spacing = torch.ldexp(torch.full_like(size, torch.finfo(dtype).eps), exponent)
    return ((lr > spacing / 2) | (size == 0)).double().mean().item()
