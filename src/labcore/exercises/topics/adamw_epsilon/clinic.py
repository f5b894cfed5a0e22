"""Four broken AdamWs, to be recognized by their curves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.clinic import Clinic, Fault
from labcore.optim import rules

__all__ = ["CLINIC"]

STEPS, EVERY = 3000, 20
Rule = Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, dict[str, Any]]]


def _bf16_moment(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    new, state = _adamw()(param, grad, state)
    return new, {**state, "exp_avg_sq": state["exp_avg_sq"].bfloat16().to(param)}


def _uncorrected(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    _, state = _adamw()(param, grad, state)
    mean = state["exp_avg"] / (1 - 0.9 ** state["step"])
    return param - mean / (state["exp_avg_sq"].sqrt() + 1e-8), state


def _adamw(eps: float = 1e-8, eps_mode: str = "outside") -> Rule:
    """AdamW without decay, whose weights are in units of the learning rate."""
    return functools.partial(rules.adamw, lr=1.0, weight_decay=0.0, eps=eps, eps_mode=eps_mode)


def _observe(rule: Rule) -> dict[str, list[float]]:
    """Run three float64 weights for STEPS steps and keep every EVERY-th step."""
    later = torch.tensor([1e-8, 1.0, 0.1], dtype=torch.float64)
    early = torch.tensor([1e-8, 1.0, 1.0], dtype=torch.float64)
    weights = torch.zeros_like(later)
    state: dict[str, Any] = {}
    path = [weights]
    for step in range(STEPS):
        weights, state = rule(weights, early if step < 100 else later, state)
        path.append(weights)
    way = -torch.stack(path)
    size = way.diff(dim=0)
    titles = {
        "gradient 1e-8: way": way[1:, 0],
        "gradient 1: update": size[:, 1],
        "gradient 1, then 0.1: update": size[:, 2],
    }
    return {title: curve[EVERY - 1 :: EVERY].tolist() for title, curve in titles.items()}


CLINIC = Clinic(
    id="adamw_epsilon.clinic",
    points=3,
    healthy=_adamw,
    faults={
        "eps inside the root": Fault(
            make=functools.partial(_adamw, eps_mode="inside"),
            symptom=(
                "an eps of 1e-8 added to v̂ is a floor of 1e-4 under the gradient, so a weight with "
                "gradients of 1e-8 hardly moves, while larger gradients look healthy."
            ),
        ),
        "eps rounded to zero": Fault(
            make=functools.partial(_adamw, eps=torch.tensor(1e-8).half().item()),
            symptom=(
                "stored in fp16, 1e-8 is 0, so that nothing holds back the smallest gradients: "
                "1e-8 moves a weight by one learning rate a step, twice the healthy way; larger "
                "gradients look healthy."
            ),
        ),
        "no bias correction of v": Fault(
            make=lambda: _uncorrected,
            symptom=(
                "v starts at zero and is far too small at first, so the first updates are many "
                "times the learning rate; they fall to their right size as v fills up, in every "
                "panel."
            ),
        ),
        "v stored in bf16": Fault(
            make=lambda: _bf16_moment,
            symptom=(
                "a change of a thousandth is below half the spacing of bf16, so v stops before it "
                "arrives: under a constant gradient the updates grow beyond one, and after a "
                "burst v does not come down again and the updates stay small."
            ),
        ),
    },
    observe=_observe,
    axis=range(EVERY, STEPS + 1, EVERY),
    explanation=(
        "Way and size are in learning rates. An epsilon in the wrong place, or lost, shows only "
        "where gradients are as small as it is; a wrong second moment shows at every size: early "
        "where its start is not corrected, late where it sticks."
    ),
)
