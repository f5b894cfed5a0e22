"""A step of Lion with a dead zone, which ends the drift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["MASKED_STEP"]


def masked_step(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    decay: float,
    beta_update: float,
    beta_state: float,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """One step of Lion that leaves a weight to its decay where |blend| <= threshold."""
    blend = beta_update * momentum + (1 - beta_update) * grad
    sign = torch.sign(blend) * (blend.abs() > threshold)
    sign = sign + 0.0 * blend  # NaN where the blend is not finite
    new_momentum = beta_state * momentum + (1 - beta_state) * grad
    return (1 - lr * decay) * weight - lr * sign, new_momentum


def _masked_wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(
        weight: Tensor,
        grad: Tensor,
        momentum: Tensor,
        *,
        lr: float,
        decay: float,
        beta_update: float,
        beta_state: float,
        threshold: float,
    ) -> tuple[Tensor, Tensor]:
        if fault == "decay in the gradient":
            grad = grad + decay * weight
        if fault == "betas swapped":
            beta_update, beta_state = beta_state, beta_update
        if fault == "one beta":
            beta_state = beta_update
        new_momentum = beta_state * momentum + (1 - beta_state) * grad
        if fault == "momentum first":
            momentum = new_momentum
        blend = beta_update * momentum + (1 - beta_update) * grad
        if fault == "no blend":
            blend = new_momentum
        zoned = {"zone on the gradient": grad, "zone on the momentum": momentum}
        looked_at = zoned.get(fault, blend)
        outside = looked_at.abs() > threshold
        if fault == "edge outside":
            outside = looked_at.abs() >= threshold
        sign = (blend if fault == "no sign" else torch.sign(blend)) * outside
        if fault == "infinity hidden":
            sign = torch.where(blend.isnan(), blend, sign)
        elif fault != "NaN hidden":
            sign = sign + 0.0 * blend
        if fault == "uphill":
            sign = -sign
        shrink: Any = decay if fault == "decay without the rate" else lr * decay
        if fault == "decay in the gradient":
            shrink = 0.0
        if fault == "zone stops the decay":
            shrink = shrink * outside
        moved = (1 - shrink) * weight - lr * sign
        if fault == "decay after the move":
            moved = (1 - shrink) * (weight - lr * sign)
        return (new_momentum, moved) if fault == "exchanged" else (moved, new_momentum)

    return step


def _step_case(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, **numbers: float
) -> dict[str, Any]:
    """Draw tensors whose blend stays away from the zone's edge, where rounding would decide."""
    beta, threshold = numbers["beta_update"], numbers["threshold"]
    draw = torch.rand(4, *shape, generator=generator, dtype=torch.float64)
    weight, momentum = 4 * draw[0] - 2, 2 * draw[1] - 1
    size = torch.where(draw[2] < 0.5, threshold * (0.1 + 1.4 * draw[2]), threshold + draw[2])
    blend = size * torch.where(draw[3] < 0.5, -1, 1)
    grad = (blend - beta * momentum) / (1 - beta)
    tensors = {"weight": weight, "grad": grad, "momentum": momentum}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | numbers


def _step_cases(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    usual = {"lr": 0.02, "decay": 0.5, "beta_update": 0.9, "beta_state": 0.99, "threshold": 0.3}
    halves = {"lr": 0.125, "decay": 0.5, "beta_update": 0.75, "beta_state": 0.5, "threshold": 0.25}
    cases = [
        _step_case(generator, (3, 5), torch.float32, **usual),
        _step_case(generator, (7,), torch.float64, **(usual | {"lr": 0.1, "beta_state": 0.95})),
        _step_case(generator, (), torch.float32, **(usual | {"decay": 0.25})),
        # Numbers that every form of the blend computes exactly; two are on the zone's edge.
        {
            "weight": torch.tensor([1.0, -2.0, 0.5, 4.0]),
            "grad": torch.tensor([0.25, -0.25, 0.5, -0.5]),
            "momentum": torch.tensor([0.25, -0.25, 0.5, 0.0]),
            **halves,
        },
        _step_case(generator, (6,), torch.float32, **usual),
        _step_case(generator, (2, 3), torch.float32, **usual),
    ]
    cases[4]["grad"][2:5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    cases[5]["grad"].zero_()
    cases[5]["momentum"].mul_(0.1)  # a drift that the zone ends
    return cases


_STEP_HINTS = {
    "one beta": "The momentum that is returned was made with `beta_update`, as the blend is. The "
    "step and the memory have different constants: store `beta_state` of the old momentum and "
    "`1 - beta_state` of the gradient.",
    "betas swapped": "The two betas have changed places. Which of them reaches back about ten "
    "steps, which a hundred, and which of the two do you want to store?",
    "momentum first": "The blend is made of the momentum that this step has just updated, so the "
    "gradient enters it twice. Which of the two is computed first?",
    "no blend": "The sign is taken of the momentum that is stored. Lion's step looks at a blend "
    "of its own, in which the present gradient counts more.",
    "decay in the gradient": "The decay is added to the gradient and disappears in the sign. It "
    "must reach the weight by itself: a weight of 100 shrinks more than a weight of 1.",
    "decay without the rate": "Each step shrinks the weight by the decay alone. In AdamW and Lion "
    "the decay is per unit of learning rate.",
    "NaN hidden": "A NaN or an infinity in the gradient leaves its weight a number: the sign of "
    "NaN is 0 in torch, and a comparison with NaN is False. Let it through to the weight.",
    "zone on the gradient": "The dead zone looks at the gradient. In the drift the gradient is "
    "zero while the momentum lives, and the other way round at the first step: it is the blend "
    "that has to be small.",
    "zone stops the decay": "Inside the zone the weight does not even decay. The zone replaces "
    "the sign by zero and leaves the rest of the rule alone.",
    "zone on the momentum": "The dead zone looks at the momentum that came in. At the first step "
    "that is zero, whatever the gradient: it is the blend that has to be small.",
    "uphill": "The weight moves along the blend. A step goes against it, as gradient descent does.",
    "no sign": "The weight moves by lr times the blend. In Lion the size of the blend decides only "
    "whether the weight moves, never how far.",
    "exchanged": "The two results have changed places: the weight comes first, then the momentum.",
    "decay after the move": "The decay also shrinks the move of this step. In the rule it acts on "
    "the weight that came in.",
    "infinity hidden": "A NaN reaches its weight, an infinite blend does not: its weight moves by "
    "lr as if all were well. Both are to make the weight NaN.",
    "edge outside": "A blend exactly on the threshold moves its weight; by the rule, |blend| <= "
    "threshold does not.",
}

MASKED_STEP = Exercise(
    id="lion.masked_step",
    points=4,
    reference=masked_step,
    mistakes=[Mistake(name, _masked_wrongly(name), hint) for name, hint in _STEP_HINTS.items()],
    cases=_step_cases,
    returns=("weight", "momentum"),
    rtol=1e-5,
    atol=1e-6,
    explanation="The blend is made of the old momentum; the momentum that is stored has a beta "
    "of its own. The zone multiplies the sign by zero, so the decay goes on and a weight whose "
    "momentum has died out comes to rest apart from it. Adding `0.0 * blend` changes nothing where "
    "the blend is finite, and makes NaN of NaN and of infinity: a gradient that has overflowed "
    "is then seen in the weight, where `torch.sign` alone would hide it.",
    hints=(
        "Take a weight of 2 without gradient and momentum, an `lr` of 0.1, and a `decay` of 0.5. "
        "What is the weight after one step, and what is it if the gradient is infinite?",
        "Compute both the blend and the new momentum from the momentum that came in, each with "
        "its own beta. The dead zone only replaces the sign of the blend by 0, and where the "
        "blend is NaN or infinite you replace the sign by NaN, since `torch.sign` hides both.",
        "`sign = torch.sign(blend) * (blend.abs() > threshold) + 0.0 * blend` is 0 in the dead "
        "zone and NaN where the blend is not finite.",
    ),
)
