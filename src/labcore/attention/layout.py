"""The memory layout of attention results, shared by all implementations and the fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["new_heads", "new_lse"]


def new_heads(like: Tensor) -> Tensor:
    """Return an empty [B, H, T, D] with the dtype and device of `like`, stored as [B, T, H, D].

    With this layout, joining the heads with `.transpose(1, 2).flatten(2)` copies nothing.
    """
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def new_lse(query: Tensor) -> Tensor:
    """Return an empty contiguous log-sum-exp [B, H, T], at least fp32, for `query` [B, H, T, D]."""
    return query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
