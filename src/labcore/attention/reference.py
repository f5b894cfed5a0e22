"""The first two rungs: softmax attention as it is written, and the form that cannot overflow.

Both hold all T * S scores in memory and compute in at least fp32. Letters as in `pattern`.
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
    """Scores [B, H, T, S] in at least fp32, -inf where a query does not see a key.

    query: [B, H, T, D]; key: [B, Hkv, S, D], H a multiple of Hkv.
    attn_mask: broadcasts to [B, H, T, S]; bool, True where a query may see a key, or floating
    point, added to the scores after `pattern.softcap`.
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
    """exp(score) over the sum of its row, times the values: [B, H, T, D].

    Overflows in fp32 where a score exceeds 88.7. Arguments as in `safe_attention`.
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
    """Attention with each row's largest score taken away before exp, and the row's log-sum-exp.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D]; attn_mask: as in `masked_scores`.
    dropout_p: the share of weights that torch's own generator sets to 0.
    Returns out [B, H, T, D] in the query's dtype and lse [B, H, T] in at least fp32. A row that
    sees nothing gives zeros and -inf. Differentiable, twice too, in every argument.
    """
    scores = masked_scores(query, key, pattern=pattern, attn_mask=attn_mask)
    # Any shift gives the same softmax, so none of it belongs to the gradient.
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
    """[B, H, S, D]: each of the Hkv heads repeated for the H / Hkv query heads that share it."""
    groups = query.shape[1] // max(shared.shape[1], 1)
    return shared.to(dtype).repeat_interleave(groups, dim=1)
