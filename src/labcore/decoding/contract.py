"""What proposers, verifiers and generation pass to each other.

Letters: B rows, N nodes of a draft, V vocabulary, C width. p is always the target's distribution
and q the draft's; both are fp32, after temperature, top-k, top-p and penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from labcore.checks import positive, positive_int
from labcore.models import LlamaOutput

__all__ = ["Accepted", "Decoder", "Draft", "Proposer", "SamplingConfig", "Verifier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How to sample the tokens of one request.

    temperature: divides the logits; 0 is greedy, which takes the largest logit, the first if
    several tie.
    top_k: keep only the k most probable tokens; 0 is all. top_p: keep only the fewest most probable
    tokens whose probabilities add up to at least top_p; 1 is all. The order is that of
    transformers: repetition penalty, temperature, top-k, top-p.
    repetition_penalty: for tokens in the prompt or output, positive logits are divided by it and
    negative ones multiplied; 1 is none (Keskar et al., 2019, arXiv 1909.05858).
    stop: texts that end the output; the output ends before the first of them.
    max_tokens: the most tokens in the output. seed: of the request's own generator.
    Raises TypeError or ValueError that names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.temperature < float("inf")):
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be an int, 0 (all tokens) or above, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (all tokens), got {self.top_p}")
        positive("repetition_penalty", self.repetition_penalty)
        positive_int("max_tokens", self.max_tokens)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a tuple of texts, none empty, got {self.stop!r}")


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens: a tree, in the simplest case a chain.

    tokens: int64 [N]. parents: int32 [N], each node's parent, which comes before it; -1 for nodes
    that follow the prefix. q: fp32 [N, V], the distribution that each token was drawn from; None if
    nothing was drawn (then q is 1 at the token).
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor | Sequence[int], q: Tensor | None = None) -> Draft:
        """Return a draft in which each token follows the one before it."""
        row = torch.as_tensor(tokens, dtype=torch.int64)
        return cls(row, torch.arange(-1, len(row) - 1, dtype=torch.int32), q)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A verifier's decision.

    path: the accepted nodes, starting at the root. next_token: the token after them, drawn from the
    residual after a rejection, otherwise from p itself (the bonus). draws: the uniform random
    numbers of the decisions, in order, for a trace.
    """

    path: tuple[int, ...]
    next_token: int
    draws: tuple[float, ...] = ()


Verifier = Callable[[Tensor, Draft, Any], Accepted]
"""`verify(p [N + 1, V], draft, generator)`: p[0] follows the prefix, p[i + 1] follows node i."""


class Proposer(Protocol):
    """Guesses the target's next tokens.

    Some proposers also have `reset()`, which a new generation calls, and some have
    `observe(row, start, hidden)`, which brings the target's states: after each forward, those of
    the tokens that stay, hidden [n, C] at positions start .. start + n - 1 of the row. What a row
    brought before from start on no longer counts; n is 0 where another request takes the row.
    """

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Return a draft at most max_tokens[b] nodes deep for each row; it may be empty.

        contexts: all tokens of each row so far, prompt and output; the target hasn't read the last
        one yet. hidden: the target's [B, C] at the last token that it has read.
        """

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Learn what became of each draft, in the order of the rows."""


class Decoder(Protocol):
    """A causal language model as generation sees it: `as_decoder` makes one."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device

    def new_cache(self, batch: int, capacity: int) -> Any:
        """Return a cache with lengths int32 [B], truncate(lengths) and keep(row, slots)."""

    def __call__(
        self, tokens: Tensor, *, counts: Tensor, cache: Any, tree: Tensor | None = None
    ) -> LlamaOutput:
        """Return logits [B, T, V] after tokens [B, T], counts [B] of them valid; see `Llama`."""
