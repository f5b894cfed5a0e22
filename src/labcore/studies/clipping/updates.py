"""AdamW whose updates are clipped, tensor by tensor, in place of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.optim.rules import State, adamw

__all__ = ["UpdateClippedAdamW", "longest_step", "update_clipped_adamw", "update_rms"]


def longest_step(steps: int, *, beta1: float = 0.9, beta2: float = 0.999) -> float:
    """Return what AdamW makes of a gradient that dwarfs all before it, in learning rates.

    steps: all steps of the run, that of the gradient included.
    """
    positive_int("steps", steps)
    first = (1 - beta1) / (1 - beta1**steps)
    return first * math.sqrt((1 - beta2**steps) / (1 - beta2))


def update_rms(grad: Tensor, state: State, *, beta2: float, eps: float) -> Tensor:
    """Return the root mean square of g / √v̂ over a tensor, with the v̂ that includes g.

    It is about 1 where gradients keep their size, and at most √((1 - beta2^t) / (1 - beta2)) after
    t steps, for a gradient that dwarfs all before it. state: as of `rules.adamw`, before the step.
    """
    step = state.get("step", 0) + 1
    old = state.get("exp_avg_sq", torch.zeros_like(grad))
    square = (beta2 * old + (1 - beta2) * grad.square()) / (1 - beta2**step)
    return (grad.square() / square.clamp(min=eps**2)).mean().sqrt()


def update_clipped_adamw(
    param: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Tensor, State]:
    """AdamW at the rate lr / max(1, `update_rms`), as in StableAdamW.

    A pure function, as all of `labcore.optim.rules`. The smaller rate shrinks the decay too.
    Source: Wortsman et al. (2023), arXiv 2304.13013, after Adafactor (2018), arXiv 1804.04235.
    """
    rate = lr / update_rms(grad, state, beta2=beta2, eps=eps).clamp(min=1)
    return adamw(
        param,
        grad,
        state,
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
    )


class UpdateClippedAdamW(torch.optim.Optimizer):
    """`update_clipped_adamw` in a plain loop; it loads the state of an AdamW.

    params, lr, betas, eps, weight_decay: as of torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = map(float, group["betas"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                new, state = update_clipped_adamw(
                    param,
                    param.grad,
                    self.state[param],
                    lr=float(group["lr"]),
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )
                param.copy_(new)
                self.state[param].update(state)
