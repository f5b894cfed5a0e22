"""What a way of training costs on the topic's model: bytes, seconds a step and loss."""

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
    """One way of training, after its steps.

    peak: what was held when most was held. most: each part's own highest. Both in bytes.
    timing: seconds of each step. loss: held out, nats a byte.
    """

    peak: Breakdown
    most: Breakdown
    timing: Timing
    loss: float


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer with which the methods are compared: torch's, at LEARNING_RATE."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def trial(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[int], object],
    *,
    steps: int,
    loss: Callable[[], float] | None = None,
) -> Trial:
    """Run `steps` steps by the clock, take the loss, then run two more under the meter.

    step: does all of step number n, from clearing the gradients to the optimizer's step. The meter
    slows what it watches, so that no step is both timed and metered; the optimizer's state stands
    by then. loss: None is `held_out_loss(model)`.
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
