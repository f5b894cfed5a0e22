"""Checks that a greedy output is the model's, up to near ties that rounding can swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labcore.checks import non_negative
from labcore.decoding.contract import Decoder
from labcore.decoding.decoders import LlamaDecoder, as_decoder
from labcore.models import Llama

__all__ = ["Audit", "Difference", "near_tie_audit"]


@dataclass(frozen=True, slots=True)
class Difference:
    """An output token that isn't the model's first choice.

    position: its place in the output. best: the model's choice there, the first if several tie.
    gap: log p(best) - log p(token), in nats.
    """

    position: int
    token: int
    best: int
    gap: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What a near-tie audit found. tokens: how many were checked; gap: the tolerance, in nats."""

    tokens: int
    gap: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> float:
        """The largest gap; 0 without a difference."""
        return max((difference.gap for difference in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every token is the model's first choice or a near tie with it."""
        return self.worst <= self.gap


def near_tie_audit(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], *, gap: float = 1e-3
) -> Audit:
    """Run a greedy output back through the model, and list where it differs from the argmax.

    One forward over several tokens rounds differently from one token at a time, so two tokens with
    almost equal logits may swap. From there on the outputs differ, although both are greedy. So
    each token is judged after the output's own prefix: it must be the argmax there, or at most
    `gap` nats less likely.
    model: anything that `as_decoder` accepts; a `Llama` judges with its modules, not in its fused
    form. prompt, tokens: ints; the prompt has at least one.
    Raises ValueError without a prompt, and for tokens outside the vocabulary.
    """
    non_negative("gap", gap)
    # The fused form must not be its own judge.
    decoder: Decoder = LlamaDecoder(model) if isinstance(model, Llama) else as_decoder(model)
    read, said = [int(token) for token in prompt], [int(token) for token in tokens]
    if not read:
        raise ValueError("prompt must hold at least one token, got none; begin with a BOS")
    if bad := [token for token in (*read, *said) if not 0 <= token < decoder.vocab_size]:
        raise ValueError(f"tokens must lie between 0 and {decoder.vocab_size - 1}, got {bad[:8]}")
    if not said:
        return Audit(0, gap, ())
    row = [*read, *said[:-1]]
    with torch.inference_mode():
        cache = decoder.new_cache(1, len(row))
        logits = decoder(
            torch.tensor([row], device=decoder.device),
            counts=torch.tensor([len(row)], dtype=torch.int32, device=decoder.device),
            cache=cache,
        ).logits[0, len(read) - 1 :]
        wide = logits.double().log_softmax(-1)
        largest, first = wide.max(-1)
        chosen = wide.gather(-1, torch.tensor(said, device=wide.device)[:, None])[:, 0]
        gaps, best = (largest - chosen).tolist(), first.tolist()
    differences = (
        Difference(position, token, best[position], gaps[position])
        for position, token in enumerate(said)
        if token != best[position]
    )
    return Audit(len(said), gap, tuple(differences))
