"""Is what an engine said what the request says alone? Where rounding may have decided: an audit.

A row of a larger batch is summed in another order, so two tokens that are almost equally good may
change places, and everything after them differs. Each token is then judged after the output's
own beginning: a greedy one by `near_tie_audit`; a sampled one by the number that was drawn for it,
which must lie in the token's part of the distribution or within `EDGE` of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from labcore.decoding import SamplingConfig, near_tie_audit, probabilities
from labcore.models import Llama

EDGE = 1e-4  # of the sum of probabilities; in nats between two tokens at the border of top-k
GAP = 1e-3  # nats between two greedy tokens: `near_tie_audit`'s


def departure(
    model: Llama, prompt: Sequence[int], sampling: SamplingConfig, said: Sequence[int]
) -> str:
    """Where an output is none of the request's, in a sentence; "" where it is one up to near ties.

    One number of the request's generator is drawn for each token, as without drafts and with
    "sample_and_compare".
    """
    if sampling.temperature == 0 and sampling.repetition_penalty == 1:
        audit = near_tie_audit(model, prompt, said, gap=GAP)
        return "" if audit.passed else f"{audit.worst:.3g} nats below the argmax"
    generator = torch.Generator().manual_seed(sampling.seed)
    row = torch.tensor([[*prompt, *said[:-1]]])
    with torch.inference_mode():
        logits = model(row).logits[0, len(prompt) - 1 :]
    for place, token in enumerate(said):
        seen = [*prompt, *said[:place]]
        if sampling.temperature == 0:
            logs = probabilities(logits[place], replace(sampling, temperature=1.0), seen).log()
            if (gap := float(logs.max() - logs[token])) > GAP:
                return f"token {place} is {gap:.3g} nats below the argmax"
            continue
        u = torch.rand((), generator=generator, dtype=torch.float64).item()
        away = min(_away(p, token, u) for p in _near(logits[place], sampling, seen))
        if away > EDGE:
            return f"token {place} is {away:.3g} from the number drawn"
    return ""


def _away(p: Tensor, token: int, u: float) -> float:
    """How far u lies from the part of [0, 1] that `token` has; infinite where it has none."""
    if not p[token] > 0:
        return math.inf
    sums = p.double().cumsum(0) / p.double().sum()
    begin = float(sums[token - 1]) if token else 0.0
    return max(begin - u, u - float(sums[token]), 0.0)


def _near(logits: Tensor, sampling: SamplingConfig, seen: Sequence[int]) -> Iterator[Tensor]:
    """Weights of the tokens, and those where two tie at the border of top-k or top-p."""
    whole = probabilities(logits, replace(sampling, top_k=0, top_p=1.0), seen)
    masses = {sampling.top_p}
    if sampling.top_p < 1:
        masses |= {sampling.top_p - EDGE, min(sampling.top_p + EDGE, 1.0)}
    for mass in masses:
        kept = probabilities(logits, replace(sampling, top_p=mass), seen) > 0
        yield whole * kept
        if kept.all():
            continue
        inside = int(whole.masked_fill(~kept, 2.0).argmin())
        outside = int(whole.masked_fill(kept, -1.0).argmax())
        if whole[outside] > 0 and math.log(whole[inside] / whole[outside]) < EDGE:
            kept[outside] = True
            yield whole * kept
            kept[inside] = False
            yield whole * kept
