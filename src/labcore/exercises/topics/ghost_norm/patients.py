"""Diagnose four broken ghost batch norms from what they store, output, and backpropagate."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.exercises.clinic import Clinic, Fault

__all__ = ["CLINIC", "Norm"]

STEPS = 60  # per run; the rows change halfway
MOMENTUM, EPS = 0.1, 1e-5
GHOSTS, SIZE = 4, 8
SOURCES = (-3.0, -1.0, 1.0, 3.0)  # the means of the ghosts
RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Ghost batch norm of one channel, without weight and bias.

    Each batch updates the running statistics with the means of its ghosts' means and variances.
    ghosts: the number of ghosts per batch.
    kept: the share of the running statistics that an update keeps.
    own_in_evaluation: whether evaluation uses the statistics of its own batch.
    detached: whether the gradient treats the statistics as constants.
    """

    ghosts: int = GHOSTS
    kept: float = 1 - MOMENTUM
    own_in_evaluation: bool = False
    detached: bool = False

    def train(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B] -> (y [B], mean of the ghosts' means, mean of their variances by n - 1)."""
        rows = x.view(self.ghosts, -1)
        mean, variance = rows.mean(1, keepdim=True), rows.var(1, correction=0, keepdim=True)
        if self.detached:
            mean, variance = mean.detach(), variance.detach()
        y = (rows - mean) / (variance + EPS).sqrt()
        return y.view(-1), mean.detach().mean(), rows.detach().var(1).mean()

    def evaluate(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalize x [B] by the running statistics, or by its own."""
        if self.own_in_evaluation:
            mean, variance = x.mean(), x.var(correction=0)
        return (x - mean) / (variance + EPS).sqrt()


def _batch(step: int, generator: torch.Generator) -> Tensor:
    """Draw 32 rows, eight from each source; halfway their spread falls and their mean rises.

    Each ghost has exactly the intended spread, so healthy curves are smooth.
    """
    spread, level = (2.0, 0.0) if step < STEPS // 2 else (1.0, 2.0)
    noise = torch.randn(GHOSTS, SIZE, generator=generator, dtype=torch.float64)
    noise = (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)
    return (spread * noise + torch.tensor(SOURCES).double()[:, None] + level).view(-1)


def _running(norm: Norm) -> tuple[list[float], list[float]]:
    """Return, for each step, the running variance and the evaluation output of a row of 5."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.tensor([5.0, 1.0, 0.0, -2.0], dtype=torch.float64)
    mean, variance = torch.tensor([0.0, 1.0], dtype=torch.float64)
    stored, outputs = [], []
    for step in range(STEPS + 1):
        stored.append(variance.item())
        outputs.append(norm.evaluate(probe, mean, variance)[0].item())
        _, new_mean, new_variance = norm.train(_batch(step, generator))
        mean = norm.kept * mean + (1 - norm.kept) * new_mean
        variance = norm.kept * variance + (1 - norm.kept) * new_variance
    return stored, outputs


def _length(norm: Norm) -> list[float]:
    """Return the length of the two weights w at each step of gradient descent.

    The norm's input is w1 u1 + w2 u2, and the target is 2 u2.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, GHOSTS * SIZE, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.4, -0.2], dtype=torch.float64)
    lengths = [weights.norm().item()]
    for _ in range(STEPS):
        weights.requires_grad_()
        y, _, _ = norm.train(weights @ inputs)
        loss = (y - 2 * inputs[1]).square().mean()
        (grad,) = torch.autograd.grad(loss, weights)
        weights = weights.detach() - RATE * grad
        lengths.append(weights.norm().item())
    return lengths


def _observe(norm: Norm) -> dict[str, list[float]]:
    stored, outputs = _running(norm)
    return {
        "running variance": stored,
        "evaluation: output": outputs,
        "length of w": _length(norm),
    }


CLINIC = Clinic(
    id="ghost_norm.clinic",
    points=4,
    healthy=Norm,
    faults={
        "statistics of the whole batch": Fault(
            make=functools.partial(Norm, ghosts=1),
            symptom="the running variance goes up far beyond the spread within a ghost and stays "
            "there, since from ghost to ghost the rows differ too; the output in evaluation is "
            "too small in proportion. Both come about as slowly as in health.",
        ),
        "momentum the wrong way round": Fault(
            make=functools.partial(Norm, kept=MOMENTUM),
            symptom="within three steps the running variance is where the healthy one is going, "
            "at the start and after the change, and the output in evaluation with it: nearly all "
            "of what was stored is replaced by each batch.",
        ),
        "own statistics in evaluation": Fault(
            make=functools.partial(Norm, own_in_evaluation=True),
            symptom="the output in evaluation is the same at every step, before training and after "
            "it, for it asks the four rows and not what was stored; what is stored is healthy.",
        ),
        "statistics without a gradient": Fault(
            make=functools.partial(Norm, detached=True),
            symptom="w grows longer and longer, since the gradient does not know that the length "
            "of w has no effect on the output; what is stored and put out is healthy.",
        ),
    },
    observe=_observe,
    axis=range(STEPS + 1),
    explanation="Each column asks for one part of the layer: what it stores, what it uses in "
    "evaluation, what it passes back. A fault of the statistics shows wherever they are used, so "
    "two of the patients are ill in more than one column. A healthy gradient is at right "
    "angles to w, whose length therefore only grows a little, until its direction is right. Ghosts "
    "made of every fourth row could not be told from the whole batch here: each would have two "
    "rows of every source, and only a look at the code, or at which rows influence each other, "
    "shows that.",
)
