"""Proposers: none, n-gram lookup, a draft model, and two rules for the length of a draft.

A rule may look at a drafted token to decide whether to draft another. It never withdraws one:
otherwise the tokens that are judged would depend on their values, and so would the output's
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.draft_model import DraftModel, GoOn, always
from labcore.decoding.ngram import NGram, NGramIndex
from labcore.decoding.rows import check_rows

__all__ = [
    "Adaptive",
    "DraftModel",
    "Gated",
    "GoOn",
    "NGram",
    "NGramIndex",
    "NoProposer",
    "Stepwise",
]


class Stepwise(Proposer, Protocol):
    """A proposer that asks after each of its tokens whether to continue."""

    gamma: int

    def propose_while(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        go_on: GoOn,
    ) -> list[Draft]:
        """Like `propose`, but a row ends after the token for which `go_on` returns False."""


class NoProposer:
    """Proposes nothing: each step gives one token, as in plain decoding."""

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,  # noqa: ARG002 - the protocol's
    ) -> list[Draft]:
        """Return an empty draft for each row."""
        check_rows(contexts, samplings, max_tokens, generators)
        return [Draft.chain([]) for _ in contexts]

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing."""


class Adaptive:
    """Adapts the draft length: two more tokens after a full accept, otherwise one less.

    proposer: any. start, maximum: tokens per draft at first and at most, at least 1. If maximum is
    None, it's the proposer's gamma, or 16 without one; start can't exceed it. A row without a draft
    keeps its length, and a row whose context doesn't continue the previous one starts over.
    confidence: a draft also ends after a token to which the draft model gave a smaller probability;
    that token stays in the draft. Above 0 it needs a proposer with `propose_while`.
    Raises TypeError or ValueError for other options.
    Source: the heuristic schedule of transformers' assisted generation.
    """

    def __init__(
        self,
        proposer: Any,
        *,
        start: int = 4,
        maximum: int | None = None,
        confidence: float = 0.0,
    ) -> None:
        if not 0 <= confidence < 1:
            raise ValueError(f"confidence must be at least 0 and below 1, got {confidence}")
        if confidence and not hasattr(proposer, "propose_while"):
            raise TypeError(
                "confidence must be 0 for a proposer that gives no probabilities, got "
                f"{confidence} and {type(proposer).__name__}; use it with a DraftModel"
            )
        self.proposer, self.confidence = proposer, confidence
        most = getattr(proposer, "gamma", 16) if maximum is None else maximum
        self.gamma = positive_int("maximum", most)
        self.start = min(positive_int("start", start), self.gamma)
        self.lengths: list[int] = []  # of the next draft of each row
        self._contexts: list[list[int]] = []
        self._depths: list[int] = []  # of the drafts that commit expects

    def reset(self) -> None:
        """Start over, and the proposer too."""
        self._contexts, self.lengths, self._depths = [], [], []
        _reset(self.proposer)

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Return a draft at most `lengths[b]` tokens deep for each row; see `Proposer`."""
        check_rows(contexts, samplings, max_tokens, generators)
        self._follow(contexts)
        limits = [min(pair) for pair in zip(self.lengths, max_tokens, strict=True)]
        if self.confidence:
            drafts = self.proposer.propose_while(
                contexts, samplings, limits, generators, self._confident
            )
        else:
            drafts = self.proposer.propose(contexts, samplings, limits, generators, hidden=hidden)
        self._depths = [_depth(draft) for draft in drafts]
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Set the next lengths and inform the proposer. Raises ValueError for another batch."""
        if len(accepted) != len(self._depths):
            raise ValueError(
                f"accepted must have one entry for each of {len(self._depths)} drafts, got "
                f"{len(accepted)}; call commit once after each propose"
            )
        for row, (told, depth) in enumerate(zip(accepted, self._depths, strict=True)):
            if depth:
                change = 2 if len(told.path) == depth else -1
                self.lengths[row] = max(1, min(self.lengths[row] + change, self.gamma))
        self._depths = []
        self.proposer.commit(accepted)

    def _confident(self, row: int, token: int, confidence: Callable[[], float]) -> bool:  # noqa: ARG002
        return confidence() >= self.confidence

    def _follow(self, contexts: Sequence[Sequence[int]]) -> None:
        if len(self._contexts) != len(contexts):
            self._contexts = [[] for _ in contexts]
            self.lengths = [self.start] * len(contexts)
        for row, context in enumerate(contexts):
            before = self._contexts[row]
            self._contexts[row] = list(context)
            if self._contexts[row][: len(before)] != before:
                self.lengths[row] = self.start


def _reset(proposer: Any) -> None:
    reset = getattr(proposer, "reset", None)
    if callable(reset):
        reset()


def _depth(draft: Draft) -> int:
    """Return the number of tokens on the longest path of a draft."""
    depths: list[int] = []
    for parent in draft.parents.tolist():
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


class Gated:
    """Drafts with a model while an n-gram lookup confirms it: two checks before the target's.

    drafter: a `DraftModel` or another proposer with `propose_while`; it chooses every token.
    ngram: gives the lookup's options. A token is confirmed if a lookup in prompt, output and the
    draft so far predicts that token. slack: how many unconfirmed tokens may be followed by another;
    after the next unconfirmed token the draft ends, and that token stays in it. So a draft has at
    most slack + 1 unconfirmed tokens, and at least one token if any is allowed. The target still
    verifies confirmed tokens: confirmation only decides the length.
    confirmed: for each row, which tokens of the last draft were confirmed.
    """

    def __init__(self, drafter: Any, ngram: NGram, slack: int = 0) -> None:
        if not hasattr(drafter, "propose_while"):
            raise TypeError(
                "drafter must have propose_while, as a DraftModel does, got "
                f"{type(drafter).__name__}"
            )
        if not isinstance(ngram, NGram):
            raise TypeError(f"ngram must be an NGram, got {type(ngram).__name__}")
        if isinstance(slack, bool) or not isinstance(slack, int):
            raise TypeError(f"slack must be a whole number, got {slack!r}")
        if slack < 0:
            raise ValueError(f"slack must be at least 0, got {slack}")
        self.drafter: Stepwise = drafter
        self.ngram, self.slack, self.gamma = ngram, slack, int(drafter.gamma)
        self.confirmed: list[list[bool]] = []
        self._rows: list[NGramIndex] = []

    def reset(self) -> None:
        """Start over, and the drafter too."""
        self._rows = []
        _reset(self.drafter)

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,  # noqa: ARG002 - the protocol's
    ) -> list[Draft]:
        """Return a chain for each row, with the draft model's q; see `Proposer`."""
        return self.propose_while(contexts, samplings, max_tokens, generators, always)

    def propose_while(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        go_on: GoOn,
    ) -> list[Draft]:
        """Like `propose`, but a row also ends after the token for which `go_on` returns False."""
        check_rows(contexts, samplings, max_tokens, generators)
        if len(self._rows) != len(contexts):
            self._rows = [self.ngram.index() for _ in contexts]
        for index, context, most in zip(self._rows, contexts, max_tokens, strict=True):
            if most:
                index.follow(context)  # drops drafted tokens that weren't accepted
        self.confirmed = [[] for _ in contexts]

        def gate(row: int, token: int, confidence: Callable[[], float]) -> bool:
            index, confirmed = self._rows[row], self.confirmed[row]
            confirmed.append(index.lookup(1) == [token])
            index.append(token)
            asked = go_on(row, token, confidence)
            return asked and confirmed.count(False) <= self.slack

        return self.drafter.propose_while(contexts, samplings, max_tokens, generators, gate)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Inform the drafter."""
        self.drafter.commit(accepted)
