"""The two random decisions of decoding, in fp64, with a log of the uniform numbers."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Drawing", "Draws", "checked_weights", "draws_of"]


class Drawing(Protocol):
    """What a verifier may ask of chance; `exact` answers it with every outcome in turn."""

    log: list[float]

    def coin(self, probability: float) -> bool:
        """True with this probability."""

    def token(self, weights: Tensor) -> int:
        """A token with these weights [V]."""


class Draws:
    """Decisions by the uniform numbers of `generator`; None takes torch's own generator.

    log: each number u that was used, in order, in [0, 1) with 53 random bits. (Of the CPU's uniform
    numbers in bf16 one in 512 is 0, which lets a token of probability 0 pass wherever the
    comparison is not strict.)
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
        """u < probability: at 0 never, from 1 on always. Raises ValueError for NaN."""
        if math.isnan(probability):
            raise ValueError("probability must be a number, got nan; look for inf in the logits")
        return self._uniform() < probability

    def token(self, weights: Tensor) -> int:
        """The token where the running sum of weights [V] first exceeds u times their sum.

        The weights need not add up to 1. A token of weight 0 is never drawn: it does not raise the
        sum. Raises ValueError unless they are one row, none negative, with a positive sum.
        """
        # On the CPU the running sum goes in order, so it never falls; on a GPU it may.
        sums = checked_weights(weights).cumsum(0)
        u = self._uniform()
        return int(torch.searchsorted(sums, u * sums[-1], right=True))


def checked_weights(weights: Tensor) -> Tensor:
    """`weights` as fp64 on the CPU. Raises ValueError as `Draws.token` says."""
    if weights.ndim != 1 or not len(weights):
        shape = tuple(weights.shape)
        raise ValueError(f"weights must be one row [V] with V above 0, got shape {shape}")
    wide = weights.detach().to("cpu", torch.float64)
    total, least = wide.sum().item(), wide.min().item()
    if not (least >= 0 and 0 < total < math.inf):
        came = f"the least {least} and the sum {total}"
        raise ValueError(f"weights must be at least 0 with a finite sum above 0, got {came}")
    return wide


def draws_of(generator: Any) -> Drawing:
    """`generator` if it can draw already, otherwise `Draws` of it.

    Raises TypeError for what is neither a torch.Generator, None nor an object with coin and token.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return Draws(generator)
    if hasattr(generator, "coin") and hasattr(generator, "token"):
        return generator
    kind = type(generator).__name__
    raise TypeError(f"generator must be a torch.Generator, Draws or None, got {kind}")
