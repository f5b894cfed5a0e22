"""What speculation can gain: tokens per step from acceptance, speedup from tokens and costs.

Times are in units of one forward over one token, so plain decoding takes 1 per token. gamma is the
number of drafted tokens per step, alpha the probability that a drafted token is accepted once all
before it were.
Source: Leviathan, Kalman, Matias, 2023, "Fast inference from transformers via speculative
decoding", arXiv 2211.17192, theorem 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from labcore.checks import non_negative, positive, positive_int
from labcore.models.config import LlamaConfig

__all__ = [
    "Roofline",
    "acceptance_after",
    "best_length",
    "bursty_tokens",
    "conditionals",
    "expected_tokens",
    "expected_tokens_of",
    "judged",
    "speedup",
]

HALF = 2
"""Bytes per weight and per number in the KV cache."""


def _probability(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability from 0 to 1, got {value!r}")
    return float(value)


def _length(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return value


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per step: (1 - alpha^(gamma + 1)) / (1 - alpha), gamma + 1 at alpha = 1.

    Every drafted token is accepted with probability alpha, independently of all others; the token
    that the target adds is counted. Raises ValueError outside 0..1 and for a negative gamma.
    """
    _probability("alpha", alpha), _length("gamma", gamma)
    # The sum of powers equals the closed form, without its 0 / 0 at alpha = 1.
    return math.fsum(alpha**power for power in range(gamma + 1))


def speedup(
    alpha: float, gamma: int, *, verify_cost: float = 1.0, draft_cost: float = 0.0
) -> float:
    """Return speed over plain decoding: expected_tokens / (verify_cost + draft_cost * gamma).

    verify_cost: v(gamma + 1), the target's forward over gamma + 1 tokens in forwards over one; 1 if
    decoding is memory-bound. draft_cost: c, what one drafted token costs, in the same unit. With
    verify_cost 1 this is Leviathan's theorem 3.8.
    """
    positive("verify_cost", verify_cost)
    non_negative("draft_cost", draft_cost)
    return expected_tokens(alpha, gamma) / (verify_cost + draft_cost * gamma)


def best_length(
    alpha: float, costs: Sequence[float], draft_cost: float, longest: int | None = None
) -> int:
    """Return the number of drafted tokens with the largest speedup, 0 if drafting doesn't pay.

    costs: v(1), v(2), ... in forwards over one token; longest: the most drafted tokens, by default
    as many as costs allow. The shortest wins ties. Raises ValueError for too few costs.
    """
    most = len(costs) - 1 if longest is None else _length("longest", longest)
    if not 0 <= most < len(costs):
        raise ValueError(
            f"costs must hold v(1) to v({most + 1}), one more than the longest draft, "
            f"got {len(costs)} numbers"
        )

    def gain(gamma: int) -> float:
        return speedup(alpha, gamma, verify_cost=costs[gamma], draft_cost=draft_cost)

    return max(range(most + 1), key=gain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """A model's forward on a device that is kept busy at its published peaks.

    flops: FLOP/s; bandwidth: bytes/s. weights: parameters in matrix products, read once per forward
    and used once per token. cache: bytes of keys and values per token of context, read once per
    row and forward, however many tokens the row has. attention: FLOP per token and token of its
    context. The products take the longer of reading and computing, and so does attention, one after
    the other. Launches and collectives are left out, so times are lower bounds. N devices that
    share the work evenly have the same ratios.
    Source: Williams, Waterman and Patterson, 2009; Chen et al., MagicDec, arXiv 2408.11049.
    """

    flops: float
    bandwidth: float
    weights: float
    cache: float
    attention: float

    @classmethod
    def of(cls, config: LlamaConfig, *, flops: float, bandwidth: float) -> Roofline:
        """Return the roofline of a Llama in 16 bits; its embedding is a lookup and not counted."""
        width, layers = config.hidden_size, config.num_hidden_layers
        queries = config.num_attention_heads * config.head_size
        keys = config.kv_heads * config.head_size
        block = width * (2 * queries + 2 * keys + 3 * config.intermediate_size)
        return cls(
            flops=positive("flops", flops),
            bandwidth=positive("bandwidth", bandwidth),
            weights=layers * block + width * config.vocab_size,
            cache=2 * HALF * layers * keys,
            attention=4 * layers * queries,
        )

    @classmethod
    def at_ridge(cls, ridge: float) -> Roofline:
        """Return a forward without attention; `ridge` tokens take as long to compute as to read."""
        return cls(flops=positive("ridge", ridge), bandwidth=1, weights=1, cache=0, attention=0)

    def seconds(self, tokens: int, *, batch: int = 1, context: int = 0) -> float:
        """Return the time of a forward over `batch` rows, each with `tokens` new tokens."""
        rows = positive_int("tokens", tokens) * positive_int("batch", batch)
        length = _length("context", context)
        products = max(2 * self.weights * rows / self.flops, HALF * self.weights / self.bandwidth)
        return products + max(
            self.attention * length * rows / self.flops,
            self.cache * length * batch / self.bandwidth,
        )

    def cost(self, tokens: int, *, batch: int = 1, context: int = 0) -> float:
        """Return v(tokens): a forward over so many tokens per row in forwards over one per row."""
        one = self.seconds(1, batch=batch, context=context)
        return self.seconds(tokens, batch=batch, context=context) / one


def conditionals(accepted: Sequence[float], tried: float | Sequence[float] = 1.0) -> list[float]:
    """Return P(accepted | all before it accepted) for each position in the draft.

    accepted: how many drafts had their token accepted at each position, or its share of all drafts.
    tried: the number of drafts (1 for shares) if all have the same length; if lengths differ, how
    many tokens were judged at each position. The result ends before the first position that was
    never judged.
    Raises ValueError if more were accepted than judged.
    """
    reached = (
        [float(tried), *accepted[:-1]]
        if isinstance(tried, int | float)
        else [float(t) for t in tried]
    )
    if len(reached) < len(accepted):
        raise ValueError(
            f"tried must have a number for each of the {len(accepted)} places, got {len(reached)}"
        )
    found = []
    for place, (taken, judged_here) in enumerate(zip(accepted, reached, strict=False)):
        if not 0 <= taken <= judged_here:
            raise ValueError(
                f"accepted must be at least 0 and at most what was judged, got {taken} of "
                f"{judged_here} at place {place}; for counts, pass the number of drafts as tried"
            )
        if judged_here == 0:
            break
        found.append(taken / judged_here)
    return found


def expected_tokens_of(conditionals: Sequence[float]) -> float:
    """Return tokens per step if position i, once reached, is accepted with conditionals[i].

    1 + c0 + c0 c1 + c0 c1 c2 + ...; this is `expected_tokens` if all are equal.
    """
    total, reached = 1.0, 1.0
    for place, one in enumerate(conditionals):
        reached *= _probability(f"conditionals[{place}]", one)
        total += reached
    return total


def judged(accepted: Iterable[int], drafted: Iterable[int]) -> list[bool]:
    """Return the outcomes of all drafted tokens that were judged, in order, for one request.

    accepted, drafted: tokens per step. A step that rejects a token doesn't judge those after it.
    Raises ValueError for a step that accepts more than it drafts, or for lists of different
    lengths.
    """
    outcomes: list[bool] = []
    for taken, count in zip(accepted, drafted, strict=True):
        if not 0 <= taken <= count:
            raise ValueError(f"a step must accept 0 to all {count} of its tokens, got {taken}")
        outcomes += [True] * taken + [False] * (taken < count)
    return outcomes


def acceptance_after(outcomes: Sequence[bool]) -> tuple[float, float]:
    """Return P(accepted | previous was accepted) and P(accepted | previous was rejected).

    outcomes: of the judged tokens in order, see `judged`. The two are equal if acceptance is
    independent, as the closed form assumes; the first is larger if acceptances come in bursts. NaN
    if no token of that kind has a successor.
    """
    after: dict[bool, list[bool]] = {True: [], False: []}
    for before, now in pairwise(outcomes):
        after[bool(before)].append(bool(now))
    rates = [sum(seen) / len(seen) if seen else math.nan for seen in (after[True], after[False])]
    return rates[0], rates[1]


def bursty_tokens(after_accepted: float, after_rejected: float, gamma: int) -> float:
    """Return tokens per step if each outcome depends on the one before, as in `acceptance_after`.

    The judged tokens form a Markov chain in its stationary state. This is `expected_tokens` if both
    probabilities are equal. Raises ValueError outside 0..1.
    """
    _probability("after_accepted", after_accepted)
    _probability("after_rejected", after_rejected)
    if _length("gamma", gamma) == 0:
        return 1.0
    rest = after_accepted ** (gamma - 1)  # all accepted, given that the first was
    slope = (after_accepted - after_rejected) * rest
    if slope == 1:  # nothing is ever rejected
        return gamma + 1.0
    # full: the share of steps that accept all, after which a step starts as after an acceptance.
    full = after_rejected * rest / (1 - slope)
    first = after_rejected + full * (after_accepted - after_rejected)
    return 1 + first * expected_tokens(after_accepted, gamma - 1)
