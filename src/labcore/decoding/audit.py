"""Is an output what the model says? The check that rounding does not fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labcore.checks import non_negative
from labcore.decoding.decoders import as_decoder

__all__ = ["Audit", "Difference", "near_tie_audit"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A token of an output that is not the model's first choice.

    position: its place in the output. best: the model's choice there, of equal ones the first.
    gap: log p(best) - log p(token), in nats.
    """

    position: int
    token: int
    best: int
    gap: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What a near-tie audit found. tokens: how many were looked at; gap: what is forgiven."""

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
    """Read a greedy output back through the model, and list where it departs from the argmax.

    Several tokens in one forward round otherwise than one by one, so two tokens of almost the same
    logit may change places; from there on the outputs differ though both are greedy. Each token is
    therefore judged behind the output's own beginning: it is the argmax there, or at most `gap`
    nats less likely.
    model: anything that `as_decoder` takes. prompt, tokens: ints; the prompt has at least one.
    Raises ValueError without a prompt, and for tokens outside the vocabulary.
    """
    non_negative("gap", gap)
    decoder = as_decoder(model)
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
