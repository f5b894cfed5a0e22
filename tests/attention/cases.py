"""Queries, keys, values, patterns and trees that the tests of attention share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.attention import Pattern, safe_attention

LENGTHS = (1, 31, 63, 100, 128, 257)

# What a pattern can be besides a tree; scores of normal numbers reach the softcap.
BANDS: tuple[dict, ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "bottom_right": True},
    {"window": (5, 3)},
    {"window": (40, None), "bottom_right": True},
    {"window": (None, 0)},
    {"is_causal": True, "window": (17, 9), "softcap": 1.5},
    {"softcap": 2.0},
)


def draw(
    generator: torch.Generator,
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int,
    k_len: int | None = None,
    dim: int = 16,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves with gradients: query [B, H, T, D], key and value [B, Hkv, S, D]."""
    kv_heads, k_len = kv_heads or heads, q_len if k_len is None else k_len
    shapes = [(batch, heads, q_len, dim), *[(batch, kv_heads, k_len, dim)] * 2]
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    query, key, value = (x.to(dtype).requires_grad_() for x in drawn)
    return query, key, value


def draw_tree(
    generator: torch.Generator, *, batch: int, nodes: int, padding: Sequence[int] = ()
) -> Tensor:
    """Random parents int32 [B, N], the last padding[b] nodes of row b padding."""
    shares = torch.rand(batch, nodes, generator=generator)
    parents = (shares * (torch.arange(nodes) + 1)).floor().to(torch.int32) - 1
    for row, count in enumerate(padding):
        parents[row, nodes - count :] = -2
    return parents


def grads(
    results: Tensor | Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad_results: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of the leaves when the results have those of `grad_results`."""
    results = [results] if isinstance(results, Tensor) else list(results)
    return list(torch.autograd.grad(results, leaves, grad_results))


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference in float64: none where both are the same infinity, inf for NaN."""
    a, b = ours.detach().double(), exact.detach().double()
    # A NaN would pass through `max` of several errors unseen.
    away = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    return float(away.max()) if away.numel() else 0.0


def exact(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Float64 leaves with the same values, and safe attention of them: leaves, out, lse."""
    a, b, c = (x.detach().double().requires_grad_() for x in (query, key, value))
    return (a, b, c), *safe_attention(a, b, c, pattern=pattern)


def plain(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    """Attention by plain operations in the inputs' own dtype: what a 16-bit result is held to."""
    from labcore.attention import allowed

    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.mT) * pattern.scale
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    seen = allowed(pattern, query.shape[2], key.shape[2], device=query.device)
    some = seen.any(-1, keepdim=True)  # without a key, -inf alone would give NaN as a gradient
    weights = torch.softmax(scores.masked_fill(~seen & some, -torch.inf), dim=-1)
    return weights.masked_fill(~seen, 0) @ value
