"""A loss with a cliff: a recurrent network of one neuron, and gradient descent on its two weights.

The network is x_t = w σ(x_{t-1}) + b, and its loss (σ(x_T) - TARGET)² after T = LENGTH steps, as in
the error surface of Pascanu, Mikolov and Bengio (2013, arXiv 1211.5063).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.checks import positive, positive_int

__all__ = ["LENGTH", "STARTS", "WINDOW", "Walk", "descend", "surface"]

LENGTH, FIRST, TARGET = 50, 0.5, 0.7
# The part of the plane that is drawn: w and b. The two starting points lie on either side.
WINDOW = ((3.0, 7.0), (-4.2, -0.2))
STARTS = {"below the cliff": (5.25, -1.7), "above the cliff": (6.0, -3.6)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """A path of gradient descent: before each step, w and b, the loss and the gradient's norm."""

    points: tuple[tuple[float, float], ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]


def surface(cells: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Return w [cells], b [cells] and the loss [cells, cells], a row per b, all float64."""
    w, b = (torch.linspace(*ends, cells, dtype=torch.float64) for ends in WINDOW)
    state = torch.full((cells, cells), FIRST, dtype=torch.float64)
    for _ in range(LENGTH):
        state = w * state.sigmoid() + b[:, None]
    return w, b, (state.sigmoid() - TARGET).square()


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _loss_and_gradient(w: float, b: float) -> tuple[float, float, float]:
    """Return the loss and its derivatives by w and b, carried forward step by step."""
    state, by_w, by_b = FIRST, 0.0, 0.0
    for _ in range(LENGTH):
        out = _sigmoid(state)
        back = w * out * (1 - out)
        state, by_w, by_b = w * out + b, out + back * by_w, 1 + back * by_b
    out = _sigmoid(state)
    error = out - TARGET
    slope = 2 * error * out * (1 - out)
    return error**2, slope * by_w, slope * by_b


def descend(
    start: tuple[float, float], *, lr: float, max_norm: float = math.inf, steps: int = 60
) -> Walk:
    """Walk down from `start`, with the gradient's norm clipped to `max_norm`."""
    positive("lr", lr)
    w, b = start
    points, losses, norms = [], [], []
    for _ in range(positive_int("steps", steps)):
        loss, by_w, by_b = _loss_and_gradient(w, b)
        norm = math.hypot(by_w, by_b)
        points.append((w, b))
        losses.append(loss)
        norms.append(norm)
        rate = lr * min(1.0, max_norm / norm) if norm else lr
        w, b = w - rate * by_w, b - rate * by_b
    return Walk(points=tuple(points), losses=tuple(losses), norms=tuple(norms))
