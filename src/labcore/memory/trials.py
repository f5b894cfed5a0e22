"""What a training method costs on the chapter's model: bytes, seconds per step and loss."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from labcore.checks import positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.meter import Meter
from labcore.memory.model import held_out_loss
from labcore.timing import Timing, measure

__all__ = ["LEARNING_RATE", "Trial", "adamw", "trial"]

LEARNING_RATE = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of training with one method.

    peak: the breakdown when the total was highest. most: each part's own maximum. Both are in
    bytes. timing: seconds per step. loss: held out, in nats per byte.
    """

    peak: Breakdown
    most: Breakdown
    timing: Timing
    loss: float


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer with which the methods are compared: torch's AdamW at LEARNING_RATE."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def trial(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[int], object],
    *,
    steps: int,
    loss: Callable[[], float] | None = None,
) -> Trial:
    """Time `steps` steps, compute the loss, then run two more steps under the meter.

    step: does all of step number n, from clearing the gradients to the optimizer's step. The meter
    slows down what it watches, so no step is both timed and metered; by then the optimizer state
    exists. loss: None is `held_out_loss(model)`.
    """
    positive_int("steps", steps)
    numbers = itertools.count()
    device = next(model.parameters()).device
    timing = measure(lambda: step(next(numbers)), repeats=steps, warmup=0, device=device)
    found = (loss or functools.partial(held_out_loss, model))()  # type: ignore[arg-type]
    with Meter(model, optimizer) as meter:
        for _ in range(2):
            step(next(numbers))
    return Trial(peak=meter.peak, most=meter.most, timing=timing, loss=found)
