"""Attention over contiguous keys, with rows of unequal length in one product.

Letters: B rows of a forward, T its tokens, H attention heads, Hkv key and value heads,
G = H / Hkv, D head_dim, S keys of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.models import tree_mask

__all__ = ["additive_mask", "attended", "capturing", "ends_mask", "fold", "unfold"]


def additive_mask(
    lengths: Tensor,
    tree: Tensor | None,
    *,
    width: int,
    group: int,
    reach: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a mask with 0 where a query sees a key and -inf elsewhere: [B, 1, G * T, S].

    lengths: int32 [B], the number of tokens before the queries; query t is at position
    lengths[b] + t. tree: parents, int32 [B, T], or None for a chain. width: T. group: G. reach: S.
    """
    ahead = torch.arange(reach, device=lengths.device) - lengths[:, None]  # [B, S]
    if tree is None:
        seen = ahead[:, None, :] <= torch.arange(width, device=lengths.device)[:, None]
    else:
        nodes = ahead.clamp(0, width - 1).long()[:, None, :].expand(-1, width, -1)
        seen = tree_mask(tree).gather(2, nodes) & (ahead < width)[:, None, :]
        seen = seen | (ahead < 0)[:, None, :]
    mask = torch.zeros(seen.shape, dtype=dtype, device=lengths.device)
    mask.masked_fill_(~seen, -torch.inf)
    return mask.repeat(1, group, 1)[:, None]


def ends_mask(totals: Sequence[int], reach: int) -> Tensor:
    """Return a mask with 0 for the first totals[b] keys of row b, then -inf: fp32 [B, 1, 1, S]."""
    behind = np.arange(reach) >= np.array(totals)[:, None]
    mask = np.where(behind, np.float32(-np.inf), np.float32(0))
    return torch.from_numpy(mask)[:, None, None]


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape q [B, H, T, D] to [B, Hkv, G * T, D].

    The G query heads of a key head become rows of one product, which avoids copying the keys.
    """
    return q.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unfold(out: Tensor, width: int) -> Tensor:
    """Reshape [B, Hkv, G * T, D] to [B, H, T, D]. width: T."""
    return out.unflatten(2, (-1, width)).flatten(1, 2)


def attended(folded: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute torch's attention of folded [B, Hkv, G * T, D] over keys and values [B, S, Hkv, D].

    mask: [B, 1, G * T, S], added to the scores. The result has the shape of `folded`.
    """
    k, v = (x.transpose(1, 2).to(folded.dtype) for x in (keys, values))
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)


def capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is capturing the operations on `tensor`."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
