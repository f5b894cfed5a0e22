"""The training loop that the studies share: steps, batches and a run's measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Run", "between", "cosine", "judge", "shuffled", "step", "train"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The measurements of one training run; studies add fields for their chapters.

    losses: each batch's loss before its step. checks: (steps done, loss over a fixed set of rows).
    """

    losses: tuple[float, ...]
    checks: tuple[tuple[int, float], ...] = ()

    def steps_to(self, target: float) -> int | None:
        """Return the steps done at the first check with a loss of at most `target`, or None."""
        return next((step for step, loss in self.checks if loss <= target), None)


def step(
    loss_of: Callable[[B], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: B,
    *,
    change_gradients: Callable[[], object] | None = None,
) -> float:
    """Run one training step; return the batch's loss before the step.

    change_gradients: called between the backward pass and the optimizer's step.
    """
    optimizer.zero_grad()
    loss = loss_of(batch)
    loss.backward()
    if change_gradients is not None:
        change_gradients()
    optimizer.step()
    return loss.item()


def train(
    loss_of: Callable[[B], Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[B]
) -> Iterator[float]:
    """Run `step` on each batch; between steps, the caller can inspect the model or stop."""
    for batch in batches:
        yield step(loss_of, optimizer, batch)


def shuffled(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row indices [batch] forever, with a new order per epoch and no incomplete batches."""
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch].split(batch)


def cosine(optimizer: torch.optim.Optimizer, batches: Iterable[B], steps: int) -> Iterator[B]:
    """Yield the batches while lowering the learning rates from their initial values toward 0."""
    first = [float(group["lr"]) for group in optimizer.param_groups]
    for step, batch in enumerate(batches):
        share = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, lr in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = lr * share
        yield batch


@torch.no_grad()
def judge(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the accuracy and the mean cross-entropy."""
    logits = model(images)
    right = (logits.argmax(1) == labels).double().mean().item()
    return right, F.cross_entropy(logits.float(), labels).item()


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at `x`, linear between the first two neighbors in `xs` that enclose it.

    Raises ValueError if none do.
    """
    for (a, before), (b, after) in itertools.pairwise(zip(xs, ys, strict=True)):
        if min(a, b) <= x <= max(a, b):
            return before + (after - before) * ((x - a) / (b - a) if b != a else 0.0)
    raise ValueError(f"x must lie between {min(xs):.4g} and {max(xs):.4g}, got {x:.4g}")
