"""Four runs with wrong clipping, told apart by a loss, a length and a direction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from labcore.exercises.clinic import Clinic, Fault

__all__ = ["CLINIC"]

INPUTS, WIDTH, BATCH, HELD = 8, 16, 32, 256
STEPS, RATE = 200, 0.1
LIMIT, SCALE = 0.5, 1024.0
LOUD = range(60, STEPS, 40)  # steps with broken targets
_Clip = Callable[[Sequence[Tensor]], list[Tensor]]


def _length(gradient: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in gradient]).norm()


def _globally(gradient: Sequence[Tensor]) -> list[Tensor]:
    factor = (LIMIT / _length(gradient)).clamp(max=1.0)
    return [factor * part for part in gradient]


def _one_by_one(gradient: Sequence[Tensor]) -> list[Tensor]:
    return [part for one in gradient for part in _globally([one])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """How the gradient of loss · SCALE reaches the optimizer.

    before: clips the scaled gradient; after: clips the unscaled one.
    zeroed: whether each step starts the gradient sums at zero.
    """

    before: _Clip = list
    after: _Clip = _globally
    zeroed: bool = True


def _draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs [rows, INPUTS] and a curved target [rows, 1]."""
    x = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :1] + x[:, 1:2]) + 0.5 * x[:, 2:3]


def _start(generator: torch.Generator) -> list[Tensor]:
    shapes = ((INPUTS, WIDTH), (WIDTH,), (WIDTH, 1), (1,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    sizes = (INPUTS**-0.5, 0.0, WIDTH**-0.5, 0.0)
    return [size * one for size, one in zip(sizes, drawn, strict=True)]


def _loss(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    first, bias, last, level = weights
    return mse_loss((x @ first + bias).tanh() @ last + level, y)


def _observe(run: _Run) -> dict[str, list[float]]:
    """Train a two-layer network in float64 by gradient descent."""
    generator = torch.Generator().manual_seed(0)
    held = _draw(HELD, generator)
    weights = _start(generator)
    sums = [torch.zeros_like(weight) for weight in weights]
    losses, lengths, cosines = [], [], []
    for step in range(STEPS):
        x, y = _draw(BATCH, generator)
        if step in LOUD:
            y = 5 * y
        leaves = [weight.requires_grad_() for weight in weights]
        raw = torch.autograd.grad(SCALE * _loss(leaves, x, y), leaves)
        kept = sums if not run.zeroed else [torch.zeros_like(one) for one in sums]
        sums = [old + new for old, new in zip(kept, raw, strict=True)]
        unscaled = [part / SCALE for part in run.before(sums)]
        taken = run.after(unscaled)
        inner = sum(((a * b).sum() for a, b in zip(taken, raw, strict=True)), torch.zeros(()))
        with torch.no_grad():
            losses.append(_loss(weights, *held).item())
        lengths.append(_length(taken).item())
        cosines.append((inner / (_length(taken) * _length(raw))).item())
        weights = [w.detach() - RATE * part for w, part in zip(weights, taken, strict=True)]
    return {
        "loss on fixed rows": losses,
        "length of the gradient used": lengths,
        "its cosine to the raw one": cosines,
    }


CLINIC = Clinic(
    id="clipping.clinic",
    points=4,
    healthy=_Run,
    faults={
        "each tensor clipped by itself": Fault(
            make=functools.partial(_Run, after=_one_by_one),
            symptom="where a step is clipped, the gradient used is longer than the limit, by up to "
            "the root of the number of tensors, and no longer points where the raw one does; where "
            "nothing is clipped, it is the raw one. The loss hardly shows it.",
        ),
        "clipped before the backward pass": Fault(
            make=functools.partial(_Run, after=list),
            symptom="the direction is right, but the limit does not hold: the gradients used "
            "are as long as they come, from the first step on, and each broken batch throws the "
            "loss up. What was clipped is thrown away before the new gradient is written.",
        ),
        "clipped before unscaling": Fault(
            make=functools.partial(_Run, before=_globally, after=list),
            symptom="the gradient used has the right direction and next to no length, always the "
            "same, a thousandth of the limit; the loss goes down by so little that its curve looks "
            "flat.",
        ),
        "gradients never zeroed": Fault(
            make=functools.partial(_Run, zeroed=False),
            symptom="the gradient used has the length of the limit in all steps, also where the "
            "healthy one is shorter, and soon has little to do with the raw one: it is the "
            "sum of all gradients since the start, in which a new one counts little. The loss "
            "stops falling and goes up and down.",
        ),
    },
    observe=_observe,
    axis=range(STEPS),
    explanation="A limit that holds is no proof of correct clipping: three of the four patients "
    "never exceed twice the limit. Length and direction together tell what the loss cannot. The "
    "clipping hides a sum that is never zeroed, which would grow until it is noticed if there "
    "were no limit. And a limit on the scaled gradient looks like a learning rate far too "
    "small: only the length, the same in every step, gives it away.",
)
