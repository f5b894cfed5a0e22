"""From the logits of a step to the next tokens of its requests, each by its own rules.

Letters: B rows of the step, N drafted tokens of a row, T tokens of the forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Verifier
from labcore.decoding.requests import Plan, Request
from labcore.decoding.sampling import tree_probabilities
from labcore.decoding.verify import greedy_match

__all__ = ["decide"]


def decide(
    logits: Tensor, rows: Sequence[Request], plans: Sequence[Plan], verifier: Verifier
) -> list[Accepted | Exception]:
    """What each row says next, or why it cannot.

    logits: [B, T, V], of row b the first plans[b].size + 1 count: behind its last token and behind
    each drafted one. rows: of `labcore.decoding`, with sampling, context and generator. verifier:
    for rows that sample; at temperature 0 it is a greedy match.
    An error of one row (logits that are not finite, a verifier that raises) is returned in its
    place: it is not to end the others.
    """
    told: dict[int, Accepted | Exception] = {}
    plain = [
        place
        for place, (row, plan) in enumerate(zip(rows, plans, strict=True))
        if row.sampling.temperature == 0 and row.sampling.repetition_penalty == 1 and not plan.size
    ]
    if plain:
        # One look at the device for all of them.
        first = logits[:, 0] if len(plain) == len(rows) else logits[plain, 0]
        largest, tokens = first.max(-1)
        tokens = torch.where(largest.isfinite(), tokens, -1)
        for place, token in zip(plain, tokens.tolist(), strict=True):
            if token >= 0:
                told[place] = Accepted((), token)
    for place, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        if place not in told:
            told[place] = _judged(logits[place, : plan.size + 1], row, plan, verifier)
    return [told[place] for place in range(len(rows))]


def _judged(logits: Tensor, row: Request, plan: Plan, verifier: Verifier) -> Accepted | Exception:
    """What a row [N + 1, V] says, by probabilities."""
    try:
        p = tree_probabilities(logits, plan.draft, row.context, row.sampling)
        chosen = greedy_match if row.sampling.temperature == 0 else verifier
        verdict = chosen(p, plan.draft, row.generator)
        plan.check_path(verdict.path)
    except Exception as problem:
        return problem
    return verdict
