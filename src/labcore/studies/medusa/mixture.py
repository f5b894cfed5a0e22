"""Do heads know anything about the next token that the backbone doesn't?

The token at position s is predicted by the backbone at s - 1, and was predicted before: by head i
at s - 2 - i. Each of them read a shorter context. A mixture of all these distributions predicts
better only if the earlier ones hold something that the last one lacks.
Letters: N tokens, K heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.decoding.medusa import MedusaHeads
from labcore.models import Llama

__all__ = ["Mixture", "mix", "predictions"]

_ROUNDS = 200  # of expectation maximization, which stops moving well before


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """weights: of the backbone and each head, adding up to 1. alone, mixed: nats per token."""

    weights: tuple[float, ...]
    alone: float
    mixed: float


@torch.inference_mode()
def predictions(
    target: Llama, heads: MedusaHeads, text: Sequence[int], *, length: int = 256
) -> Tensor:
    """Return the probability that each predictor gave to each token of a text: fp64 [N, 1 + K].

    text: cut into rows of `length` tokens, each a context of its own; tokens that not all
    predictors reach are left out. The first column is the backbone's.
    Raises ValueError for a text shorter than a row and for rows that leave no token.
    """
    reach = heads.heads + 1  # tokens from the first state to the first token that all predict
    if not reach < length <= len(text):
        raise ValueError(
            f"length must be more than {reach} and at most the text's {len(text)} tokens, got "
            f"{length}"
        )
    found = []
    for row in torch.tensor(text).unfold(0, length, length):
        hidden = target(row[None]).hidden[0]  # [T, C]
        labels = row[reach:]
        # The state that predicts a label: the last one before it for the backbone, then earlier.
        columns = [target.head(hidden[reach - 1 : -1])]
        columns += [
            heads.head(i, hidden[reach - 2 - i : length - 2 - i]) for i in range(heads.heads)
        ]
        chances = [one.double().softmax(-1).gather(1, labels[:, None]) for one in columns]
        found.append(torch.cat(chances, 1))
    return torch.cat(found)


def mix(tuned: Tensor, judged: Tensor) -> Mixture:
    """Find the mixture's weights on some predictions, and judge it on others; both [N, 1 + K].

    The weights maximize the tuned tokens' likelihood, a concave problem, by expectation
    maximization.
    """
    weights = torch.full((tuned.shape[1],), 1 / tuned.shape[1], dtype=tuned.dtype)
    for _ in range(_ROUNDS):
        parts = tuned * weights
        weights = (parts / parts.sum(1, keepdim=True)).mean(0)
    return Mixture(
        weights=tuple(weights.tolist()),
        alone=float(-judged[:, 0].log().mean()),
        mixed=float(-(judged @ weights).log().mean()),
    )
