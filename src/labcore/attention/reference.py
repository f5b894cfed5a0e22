"""Textbook softmax attention, and the version that can't overflow.

Both store all T * S scores and compute in at least fp32. See `pattern` for the dimension letters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.attention.pattern import Pattern, allowed

__all__ = ["masked_scores", "naive_attention", "safe_attention"]


def masked_scores(
    query: Tensor, key: Tensor, *, pattern: Pattern, attn_mask: Tensor | None = None
) -> Tensor:
    """Return scores [B, H, T, S] in at least fp32, with -inf where a query doesn't see a key.

    query: [B, H, T, D]; key: [B, Hkv, S, D], where H is a multiple of Hkv.
    attn_mask: broadcasts to [B, H, T, S]. A bool mask is True where a query may see a key; a
    floating-point mask is added to the scores after `pattern.softcap`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = pattern.scale * query.to(wide) @ _per_query_head(key, query, wide).mT
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    seen = allowed(pattern, query.shape[2], key.shape[2], device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    return scores.masked_fill(~seen, -torch.inf)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, *, pattern: Pattern) -> Tensor:
    """Divide exp(score) by its row's sum and multiply by the values: [B, H, T, D].

    Overflows in fp32 if a score exceeds 88.7. See `safe_attention` for the arguments.
    """
    weights = masked_scores(query, key, pattern=pattern).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    return (weights @ _per_query_head(value, query, weights.dtype)).to(query.dtype)


def safe_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Subtract each row's largest score before exp; return attention and each row's log-sum-exp.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D]; attn_mask: as in `masked_scores`.
    dropout_p: the fraction of weights set to 0 with PyTorch's default generator.
    Returns out [B, H, T, D] in the query's dtype and lse [B, H, T] in at least fp32. A row that
    sees no key gets zeros in out and -inf in lse. Twice differentiable in every argument.
    """
    scores = masked_scores(query, key, pattern=pattern, attn_mask=attn_mask)
    # The softmax is the same for any shift, so the shift contributes no gradient.
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(())
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (top + total.log()).masked_fill(blind, -torch.inf).squeeze(-1)
    weights = F.dropout(weights / total, dropout_p)
    out = weights @ _per_query_head(value, query, weights.dtype)
    return out.to(query.dtype), lse


def _per_query_head(shared: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Repeat each of the Hkv heads for the H / Hkv query heads that share it: [B, H, S, D]."""
    groups = query.shape[1] // max(shared.shape[1], 1)
    return shared.to(dtype).repeat_interleave(groups, dim=1)
