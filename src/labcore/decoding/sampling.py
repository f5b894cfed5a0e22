"""From logits to a request's sampling distribution, for the target and the draft alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.decoding.contract import Draft, SamplingConfig

__all__ = ["probabilities", "tree_probabilities"]


def probabilities(logits: Tensor, sampling: SamplingConfig, seen: Sequence[int] = ()) -> Tensor:
    """Return the sampling distribution: fp32 [..., V] from logits [..., V] of any floating dtype.

    The steps follow transformers' order: repetition penalty on the tokens in `seen` (each counts
    once), temperature, top-k (all ties with the k-th stay), top-p (of tokens that tie at its
    border, the later ones stay; in transformers, an unstable sort decides).
    Temperature 0 gives 1 to the first largest logit.
    Raises TypeError for logits that aren't floating point; ValueError for a row without a finite
    largest logit and for tokens in `seen` outside the vocabulary.
    """
    logits = _checked(logits)
    if sampling.repetition_penalty == 1 or not len(seen):
        return _distribution(logits, sampling)
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    mask[_token_ids(seen, logits)] = True
    return _distribution(_penalised(logits, mask, sampling.repetition_penalty), sampling)


def tree_probabilities(
    logits: Tensor, draft: Draft, context: Sequence[int], sampling: SamplingConfig
) -> Tensor:
    """Return a verifier's p: fp32 [N + 1, V] from logits [N + 1, V] after the prefix and each node.

    The penalty at a node applies to `context`, the prompt and output so far, and to the tokens on
    the node's own path, but not to other branches. Errors as in `probabilities`, and ValueError for
    logits that aren't [N + 1, V].
    """
    logits = _checked(logits)
    if logits.ndim != 2 or len(logits) != len(draft) + 1:
        rule = f"logits must be [N + 1, V] with N + 1 = {len(draft) + 1} rows"
        raise ValueError(f"{rule}, got {tuple(logits.shape)}; row 0 follows the prefix")
    if sampling.repetition_penalty == 1:
        return _distribution(logits, sampling)
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    if len(context):
        mask[0, _token_ids(context, logits)] = True
    own = _token_ids(draft.tokens, logits).tolist()
    for node, parent in enumerate(draft.parents.tolist()):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, own[node]] = True
    return _distribution(_penalised(logits, mask, sampling.repetition_penalty), sampling)


def _checked(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        came = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a floating-point tensor, got {came}")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"logits must be [..., V] with V above 0, got {tuple(logits.shape)}")
    return logits.detach()


def _token_ids(tokens: Sequence[int] | Tensor, logits: Tensor) -> Tensor:
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
    if len(ids) and not (ids.min() >= 0 and ids.max() < logits.shape[-1]):
        came = f"{ids.min().item()} to {ids.max().item()}"
        raise ValueError(f"tokens must lie between 0 and {logits.shape[-1] - 1}, got {came}")
    return ids


def _penalised(logits: Tensor, mask: Tensor, penalty: float) -> Tensor:
    """Penalize the masked tokens; above 1 they get less likely, whatever their logit's sign."""
    logits = logits.float()
    return torch.where(mask, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _distribution(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    largest, first = logits.max(-1, keepdim=True)
    if not torch.isfinite(largest).all():
        rule = "logits must have a finite largest value in each row"
        raise ValueError(f"{rule}, got NaN, inf or a row of -inf; check the model's output")
    if sampling.temperature == 0:
        one_hot = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return one_hot.scatter_(-1, first, 1.0)
    scores = logits.float()
    if sampling.temperature < 1e-4:
        scores = scores - largest.float()  # divided by so little, the largest would overflow
    if sampling.temperature != 1:
        scores = scores / max(sampling.temperature, 1e-30)
    if 0 < sampling.top_k < scores.shape[-1]:
        border = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < border, -torch.inf)
    if sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p)
    return scores.softmax(-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Set the least probable tokens, which together have at most 1 - top_p, to -inf."""
    ascending, order = scores.sort(dim=-1, stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
