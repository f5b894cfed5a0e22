"""How results of attention lie in memory: every form and the fake kernels allocate here."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["new_heads", "new_lse"]


def new_heads(like: Tensor) -> Tensor:
    """An empty [B, H, T, D] with the dtype and device of `like`, in memory [B, T, H, D].

    Joining the heads afterwards, `.transpose(1, 2).flatten(2)`, then copies nothing.
    """
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def new_lse(query: Tensor) -> Tensor:
    """An empty log-sum-exp [B, H, T] of `query` [B, H, T, D], contiguous, in at least fp32."""
    return query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
