"""The two random decisions of decoding, in fp64, with a log of the uniform random numbers."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Drawing", "Draws", "checked_weights", "draws_of"]


class Drawing(Protocol):
    """A verifier's source of randomness; `exact` supplies one that goes through every outcome."""

    log: list[float]

    def coin(self, probability: float) -> bool:
        """Return True with this probability."""

    def token(self, weights: Tensor) -> int:
        """Return a token, drawn with these weights [V]."""


class Draws:
    """Decides with uniform random numbers from `generator`; None uses torch's global generator.

    log: each number u that was used, in order, in [0, 1) with 53 random bits. (On a CPU, one in 512
    uniform numbers in bf16 is 0, which accepts a token of probability 0 if the comparison isn't
    strict.)
    """

    __slots__ = ("generator", "log")

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.log: list[float] = []

    def _uniform(self) -> float:
        device = "cpu" if self.generator is None else self.generator.device
        u = torch.rand((), generator=self.generator, dtype=torch.float64, device=device).item()
        self.log.append(u)
        return u

    def coin(self, probability: float) -> bool:
        """Return u < probability: never at 0, always at 1 or more. Raises ValueError for NaN."""
        if math.isnan(probability):
            raise ValueError("probability must be a number, got nan; check the logits for inf")
        return self._uniform() < probability

    def token(self, weights: Tensor) -> int:
        """Return the token at which the running sum of weights [V] first exceeds u times their sum.

        The weights need not add up to 1. A token of weight 0 is never drawn, because it doesn't
        raise the sum. Raises ValueError unless they are one row, none negative, with a finite
        positive sum.
        """
        # On a CPU the sum runs in order, so it never decreases; on a GPU it may.
        sums = checked_weights(weights).cumsum(0)
        u = self._uniform()
        return int(torch.searchsorted(sums, u * sums[-1], right=True))


def checked_weights(weights: Tensor) -> Tensor:
    """Return `weights` as fp64 on the CPU. Raises ValueError as `Draws.token` does."""
    if weights.ndim != 1 or not len(weights):
        shape = tuple(weights.shape)
        raise ValueError(f"weights must be one row [V] with V above 0, got shape {shape}")
    wide = weights.detach().to("cpu", torch.float64)
    total, least = wide.sum().item(), wide.min().item()
    if not (least >= 0 and 0 < total < math.inf):
        came = f"a minimum of {least} and a sum of {total}"
        raise ValueError(f"weights must be at least 0 with a finite sum above 0, got {came}")
    return wide


def draws_of(generator: Any) -> Drawing:
    """Return `generator` if it can already draw, otherwise `Draws` of it.

    Raises TypeError unless it's a torch.Generator, None or an object with coin and token.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return Draws(generator)
    if hasattr(generator, "coin") and hasattr(generator, "token"):
        return generator
    kind = type(generator).__name__
    raise TypeError(f"generator must be a torch.Generator, Draws or None, got {kind}")
