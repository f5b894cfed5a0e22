"""Drafts by a small model, whose cache is kept exact by comparing it with the context.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.decoders import as_decoder
from labcore.decoding.draws import draws_of
from labcore.decoding.rows import check_rows, common_prefix
from labcore.decoding.sampling import probabilities

__all__ = ["DraftModel", "GoOn", "always"]

GoOn = Callable[[int, int, Callable[[], float]], bool]
"""`go_on(row, token, confidence)`: whether to draft another token after this one, which stays.

confidence(): the draft model's probability of the token, after the request's processors if it was
drawn, from the plain softmax if it's the argmax.
"""


class DraftModel:
    """Drafts token by token with a small model, one forward per token.

    model: anything that `as_decoder` accepts, with the target's tokens. gamma: the most tokens in a
    draft, which ends earlier after an end-of-sequence token, and after a token that the model gave
    a probability below `confidence`: unlikely guesses cost more than they give.
    Each row has its own KV cache. Before drafting, the cache is cut back to the prefix that it
    shares with the context, and the rest of the context is read. After a rejection this drops the
    wrong tokens; after a full accept it reads the last drafted token, which was never fed; for a
    new request it starts over. Nothing depends on how many tokens were accepted.
    Tokens are drawn from q by the row's own generator; q is after penalty, temperature, top-k and
    top-p. At temperature 0 the token is the argmax and q is None. A decoder with `greedy`, such as
    a `FusedLlama`, drafts all tokens of a single greedy row in one call.
    Source: Leviathan, Kalman and Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.
    """

    def __init__(self, model: Any, *, gamma: int = 4, confidence: float = 0.0) -> None:
        if not 0 <= confidence < 1:
            raise ValueError(f"confidence must be at least 0 and below 1, got {confidence}")
        self._model, self.confidence = model, confidence
        self.gamma = positive_int("gamma", gamma)
        self._capacity = 0
        self.reset()

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row of the cache."""
        return [len(held) for held in self._held]

    def reset(self) -> None:
        """Start over, with the weights that the model has now; `generate` begins with it."""
        self.decoder = as_decoder(self._model)
        self._ends = frozenset(self.decoder.eos_token_ids)
        self._greedy: Any = getattr(self.decoder, "greedy", None)
        self._cache: Any = None
        self._held: list[list[int]] = []  # the tokens of each row of the cache

    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,  # noqa: ARG002 - the protocol's
    ) -> list[Draft]:
        """Return a chain of min(gamma, max_tokens[b]) tokens for each row; see `Proposer`."""
        return self.propose_while(contexts, samplings, max_tokens, generators, always)

    def propose_while(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        go_on: GoOn,
    ) -> list[Draft]:
        """Like `propose`, but `go_on` is called after every token and may end a row's draft.

        A token that `go_on` has seen is never withdrawn: the output's distribution needs every
        drawn token.
        """
        check_rows(contexts, samplings, max_tokens, generators)
        limits = [min(self.gamma, most) for most in max_tokens]
        rest = self._follow(contexts, samplings, [row for row, most in enumerate(limits) if most])
        if go_on is always and self._greedy is not None and len(limits) == 1 and rest:
            plain = samplings[0].temperature == 0 and samplings[0].repetition_penalty == 1
            if plain:
                return [Draft.chain(self._round(rest[0], limits[0]))]
        tokens: list[list[int]] = [[] for _ in limits]
        q: list[list[Tensor]] = [[] for _ in limits]
        while rest:
            logits = self._read(rest)
            greedy = _argmax(logits, samplings, rest)
            active, rest = list(rest), {}
            for row in active:
                token, weights = greedy.get(row, -1), None
                if token < 0:
                    seen = () if samplings[row].repetition_penalty == 1 else contexts[row]
                    weights = probabilities(logits[row], samplings[row], [*seen, *tokens[row]])
                    token, weights = _take(weights, samplings[row], generators[row])
                if weights is not None:
                    q[row].append(weights)
                tokens[row].append(token)
                confidence = partial(_confidence, logits, row, token, weights)
                more = go_on(row, token, confidence)
                more = more and (not self.confidence or confidence() >= self.confidence)
                if more and len(tokens[row]) < limits[row] and token not in self._ends:
                    rest[row] = [token]
        return [
            Draft.chain(chain, torch.stack(rows) if rows else None)
            for chain, rows in zip(tokens, q, strict=True)
        ]

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing: the next contexts show what was accepted."""

    def _follow(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        active: Sequence[int],
    ) -> dict[int, list[int]]:
        """Cut the cache back to the active rows' contexts; return the missing tokens, by row."""
        if not active:
            return {}
        room = max(len(contexts[row]) for row in active) + self.gamma
        if len(self._held) != len(contexts) or room > self._capacity:
            self._capacity = self.gamma + max(
                len(context) + sampling.max_tokens
                for context, sampling in zip(contexts, samplings, strict=True)
            )
            self._cache = self.decoder.new_cache(len(contexts), self._capacity)
            self._held = [[] for _ in contexts]
        rest, cut = {}, False
        for row in active:
            context, held = list(contexts[row]), self._held[row]
            # The last token is always read, for the logits after it.
            kept = min(common_prefix(held, context), len(context) - 1)
            cut = cut or kept < len(held)
            del held[kept:]
            rest[row] = context[kept:]
        if cut:
            self._cache.truncate(torch.tensor(self.lengths, dtype=torch.int32))
        return rest

    def _round(self, rest: list[int], count: int) -> list[int]:
        """Read the only row's tokens and draft greedily, all in one call of the decoder."""
        drafted: list[int] = self._greedy(rest, count, self._cache, self.confidence)
        self._held[0] += [*rest, *drafted][:-1]
        return drafted

    def _read(self, rest: Mapping[int, list[int]]) -> Tensor:
        """Feed tokens to some rows; return logits [B, V] after the last of each of those rows."""
        fed = [rest.get(row, []) for row in range(len(self._held))]
        counts = [len(new) for new in fed]
        width = max(counts)
        padded = torch.tensor([new + [0] * (width - len(new)) for new in fed])
        logits = self.decoder(
            padded, counts=torch.tensor(counts, dtype=torch.int32), cache=self._cache
        ).logits
        for held, new in zip(self._held, fed, strict=True):
            held += new
        if width == 1 or len(fed) == 1:
            return logits[:, -1]
        return logits[torch.arange(len(fed)), torch.tensor([max(count - 1, 0) for count in counts])]


def always(row: int, token: int, confidence: Callable[[], float]) -> bool:  # noqa: ARG001
    """Return True: the rule that sets no limit."""
    return True


def _argmax(
    logits: Tensor, samplings: Sequence[SamplingConfig], rows: Mapping[int, object]
) -> dict[int, int]:
    """Return the token of each greedy row without a penalty, all from one call."""
    plain = [
        row
        for row in rows
        if samplings[row].temperature == 0 and samplings[row].repetition_penalty == 1
    ]
    if not plain:
        return {}
    largest: list[int] = logits.argmax(-1).tolist()
    return {row: largest[row] for row in plain}


def _take(weights: Tensor, sampling: SamplingConfig, generator: Any) -> tuple[int, Tensor | None]:
    """Return a token and the q it was drawn from: fp32 [V], or None if nothing was drawn."""
    if sampling.temperature == 0:
        return int(weights.argmax()), None
    return draws_of(generator).token(weights), weights


def _confidence(logits: Tensor, row: int, token: int, q: Tensor | None) -> float:
    weights = logits[row].float().softmax(-1) if q is None else q
    return float(weights[token])
