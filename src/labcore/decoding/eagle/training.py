"""Training an EAGLE-like head: training-time test, against the backbone's distributions.

Letters: B rows, T positions, A tokens kept ahead, C hidden_size, V vocabulary, S steps.
Source: Li et al., EAGLE-3, 2025, arXiv 2503.01840, section 3.2: no loss on features, which are free
to be what helps the later steps; each step's own features are the next step's input.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from labcore.decoding.eagle.head import EagleHead
from labcore.decoding.medusa.training import HeadsCurve, HiddenStates, fit

__all__ = ["eagle_accuracies", "eagle_loss", "fitted_sharpness", "train_eagle"]

_ROWS = 8  # rows of one pass
_SHARPNESS = [round(0.5 + 0.1 * step, 1) for step in range(36)]


def eagle_loss(
    head: EagleHead, hidden: Tensor, tokens: Tensor, *, steps: int = 4, decay: float = 0.8
) -> tuple[Tensor, Tensor]:
    """Return the sum over steps s of decay^s times its mean cross entropy, and those means [S].

    hidden: the backbone's [B, T, C]; tokens: integers [B, T + A], of which the first T are read.
    The label of the pair at t, whose token is t + 1, is the backbone's distribution of token t + 2,
    which comes from hidden at t + 1. So T - 1 pairs have a label, and step s counts those from s
    on. Cross entropies are in nats, and include the entropy of the backbone's distribution.
    """
    with torch.no_grad():
        target = head.logits(hidden[:, 1:]).float().softmax(-1)
    width = target.shape[1]
    features = head.unrolled(hidden[:, :width], tokens[:, 1 : width + 1], steps)
    means = []
    for s, one in enumerate(features):
        logs = head.logits(one[:, s:]).float().log_softmax(-1)
        means.append(-(target[:, s:] * logs).sum(-1).mean())
    each = torch.stack(means)
    weights = decay ** torch.arange(steps, dtype=torch.float32, device=each.device)
    return (weights * each).sum(), each.detach()


def train_eagle(
    head: EagleHead,
    states: HiddenStates,
    *,
    steps: int,
    unroll: int = 4,
    batch: int = 8,
    rate: float = 1e-3,
    warmup: int = 50,
    decay: float = 0.8,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    save_every: int = 50,
    progress: bool = True,
) -> HeadsCurve:
    """Train the head in place until `steps` steps are done; return the curve of all of them.

    unroll: steps of training-time test. The rest is as in `train_heads`.
    """
    return fit(
        head,
        states,
        lambda hidden, tokens: eagle_loss(head, hidden, tokens, steps=unroll, decay=decay),
        steps=steps,
        batch=batch,
        rate=rate,
        warmup=warmup,
        seed=seed,
        checkpoint=checkpoint,
        save_every=save_every,
        progress=progress,
    )


@torch.inference_mode()
def eagle_accuracies(head: EagleHead, states: HiddenStates, *, steps: int = 4) -> list[float]:
    """Return for each of S steps how often the head's likeliest token is the text's.

    Step s counts the pairs from s on, whatever the steps before it guessed: the head reads the
    text's tokens, and its own features in place of the last s states.
    """
    right, seen = [0] * steps, [0] * steps
    for index in torch.arange(len(states)).split(_ROWS):
        hidden, tokens = states.rows(index)
        hidden = hidden.to(head.norm.weight.dtype)
        width = hidden.shape[1]
        for s, one in enumerate(head.unrolled(hidden, tokens[:, 1 : width + 1], steps)):
            hits = head.logits(one[:, s:]).argmax(-1) == tokens[:, 2 + s : 2 + width]
            right[s] += int(hits.sum())
            seen[s] += hits.numel()
    return [hit / all_ for hit, all_ in zip(right, seen, strict=True)]


@torch.inference_mode()
def fitted_sharpness(head: EagleHead, states: HiddenStates, *, steps: int = 3) -> float:
    """Return the factor of the head's logits that fits the backbone's likeliest tokens best.

    It has the smallest cross entropy against the argmax of the backbone, over the pairs of all
    steps: temperature scaling, as in Guo et al., 2017, arXiv 1706.04599. With it, a confidence is
    the chance that a greedy target accepts the token.
    """
    totals = torch.zeros(len(_SHARPNESS), dtype=torch.float64)
    for index in torch.arange(len(states)).split(_ROWS):
        hidden, tokens = states.rows(index)
        hidden = hidden.to(head.norm.weight.dtype)
        width = hidden.shape[1] - 1
        labels = head.logits(hidden[:, 1:]).argmax(-1)
        for s, one in enumerate(head.unrolled(hidden[:, :width], tokens[:, 1 : width + 1], steps)):
            logits = head.logits(one[:, s:]).flatten(0, 1).float()
            right = labels[:, s:].reshape(-1, 1)
            for place, sharpness in enumerate(_SHARPNESS):
                logs = (logits * sharpness).log_softmax(-1).gather(1, right)
                totals[place] -= logs.sum().double()
    return _SHARPNESS[int(totals.argmin())]
