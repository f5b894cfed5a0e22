"""Online softmax and tiled attention in plain PyTorch, with O(T + S) memory besides the inputs.

See `pattern` for the dimension letters. G = H / Hkv query heads share a key head. The R rows of a
tile are the queries of all of them, which makes every product one batched matrix product over
B * Hkv.
Source: Milakov and Gimelshein, 2018, arXiv 1805.02867; Dao, 2023, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from labcore.attention.layout import new_heads, new_lse
from labcore.attention.pattern import Pattern, key_range, tile_mask

__all__ = [
    "Running",
    "absorb",
    "finish",
    "merge_states",
    "start",
    "tiled_backward",
    "tiled_forward",
]

# Scores of one tile over all rows and heads: 2 MiB in fp32, small compared to a CPU's last-level
# cache. A tile's side is a power of two within SIDES.
TILE = 1 << 19
SIDES = (32, 256)


class Running(NamedTuple):
    """Softmax-weighted sums over the keys so far.

    top: the largest score, [..., R].
    total: the sum of exp(score - top), [..., R].
    acc: the sum of exp(score - top) * value, [..., R, D].
    """

    top: Tensor
    total: Tensor
    acc: Tensor


def start(rows: Tensor) -> Running:
    """Return the sums over no keys, in the shape and dtype of the queries, rows [..., R, D]."""
    top = rows.new_full(rows.shape[:-1], -torch.inf)
    return Running(top, torch.zeros_like(top), torch.zeros_like(rows))


def absorb(state: Running, scores: Tensor, values: Tensor) -> Running:
    """Add keys to the sums: scores [..., R, S], which are overwritten, and values [..., S, D].

    A new largest score rescales the earlier sums; -inf marks a key that isn't seen.
    """
    top = torch.maximum(state.top, scores.amax(-1))
    shift = top.masked_fill(top == -torch.inf, 0)  # -inf - -inf would be NaN
    weights = scores.sub_(shift[..., None]).exp_()
    rescale = (state.top - shift).exp_()
    total = state.total * rescale + weights.sum(-1)
    acc = state.acc.mul_(rescale[..., None]).add_(weights @ values)
    return Running(top, total, acc)


def finish(state: Running) -> tuple[Tensor, Tensor]:
    """Return out [..., R, D] and lse [..., R]; zeros and -inf for a row that saw no key."""
    total = state.total.masked_fill(state.total == 0, 1)
    return state.acc / total[..., None], torch.where(
        state.total == 0, state.top, state.top + total.log()
    )


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attention results for two disjoint sets of keys; return out and lse.

    out_a, out_b: [..., T, D]. lse_a, lse_b: [..., T], natural logarithm, -inf where no key was
    seen. Differentiable in all four arguments.
    """
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    part_a, part_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = part_a + part_b
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (top + total.log()).masked_fill(blind, -torch.inf)
    weight_a, weight_b = (part_a / total)[..., None], (part_b / total)[..., None]
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


@torch.no_grad()
def tiled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention tile by tile: out [B, H, T, D] in the query's dtype and lse [B, H, T].

    query: [B, H, T, D]; key, value: [B, Hkv, S, D], where H is a multiple of Hkv.
    cu_q, cu_k: int32 [sequences + 1], where each sequence begins along T and S of a batch of 1.
    Arithmetic and lse are in at least fp32. Tiles that no query sees are skipped. For gradients,
    call `tiled_backward`.
    """
    out, lse = new_heads(query), new_lse(query)
    for queries, keys in _sequences(query, key, cu_q, cu_k):
        q, q_out, q_lse = query[:, :, queries], out[:, :, queries], lse[:, :, queries]
        k, v = (x[:, :, keys].to(lse.dtype).contiguous() for x in (key, value))
        for rows, spans in _tiles(pattern, q, k):
            q_tile = _rows(q, rows, k) * pattern.scale
            state = start(q_tile)
            for span in spans:
                scores = _scores(q_tile, k[:, :, span], pattern)
                _hide(scores, pattern, rows, span, q, k)
                state = absorb(state, scores, v[:, :, span])
            for whole, tile in zip((q_out, q_lse), finish(state), strict=True):
                whole[:, :, rows] = tile.reshape(whole[:, :, rows].shape)
    return out, lse


@torch.no_grad()
def tiled_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    pattern: Pattern,
    grad_lse: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, recomputing the scores tile by tile.

    grad_out: like out; grad_lse: like lse, or None. The others are `tiled_forward`'s arguments
    and results. No weights are stored, because a weight is exp(score - lse).
    """
    grads = new_heads(query), new_heads(key), new_heads(value)
    # A row's sum of weight * its gradient equals sum(out * grad_out); lse depends on all weights.
    mean = (grad_out.to(lse.dtype) * out).sum(-1)
    mean = mean if grad_lse is None else mean - grad_lse
    lse = lse.masked_fill(lse == -torch.inf, 0)
    for queries, keys in _sequences(query, key, cu_q, cu_k):
        q, dy, q_lse, q_mean = (x[:, :, queries] for x in (query, grad_out, lse, mean))
        k, v = (x[:, :, keys].to(lse.dtype).contiguous() for x in (key, value))
        dq, dk, dv = grads[0][:, :, queries], torch.zeros_like(k), torch.zeros_like(v)
        for rows, spans in _tiles(pattern, q, k):
            q_tile, dy_tile = _rows(q, rows, k) * pattern.scale, _rows(dy, rows, k)
            lse_tile, mean_tile = (_rows(x[..., None], rows, k) for x in (q_lse, q_mean))
            dq_tile = torch.zeros_like(q_tile)
            for span in spans:
                scores = _scores(q_tile, k[:, :, span], pattern)
                slope = _slope(scores, pattern)
                _hide(scores, pattern, rows, span, q, k)
                weights = scores.sub_(lse_tile).exp_()
                dv[:, :, span] += weights.mT @ dy_tile
                ds = (dy_tile @ v[:, :, span].mT).sub_(mean_tile).mul_(weights)
                ds = ds if slope is None else ds.mul_(slope)
                dq_tile += ds @ k[:, :, span]
                dk[:, :, span] += ds.mT @ q_tile
            dq_tile *= pattern.scale
            dq[:, :, rows] = dq_tile.reshape(dq[:, :, rows].shape)
        grads[1][:, :, keys], grads[2][:, :, keys] = dk, dv
    return grads


def _sequences(
    query: Tensor, key: Tensor, cu_q: Tensor | None, cu_k: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """Yield each sequence's slices of T and S; without cu_q and cu_k, one that spans all."""
    if cu_q is None or cu_k is None:
        yield slice(0, query.shape[2]), slice(0, key.shape[2])
        return
    at_q, at_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(at_q) - 1):
        yield slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])


def _tiles(pattern: Pattern, query: Tensor, key: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of queries, each with the blocks of keys that some of its queries may see."""
    batch, per_batch, q_len, _ = query.shape
    heads, k_len = batch * per_batch, key.shape[2]
    side = SIDES[1]
    while side > SIDES[0] and heads * side * side > TILE:
        side //= 2
    for first in range(0, q_len, side):
        rows = slice(first, min(first + side, q_len))
        keys = key_range(pattern, rows.start, rows.stop, q_len, k_len)
        yield rows, [slice(j, min(j + side, keys.stop)) for j in keys[::side]]


def _rows(x: Tensor, rows: slice, key: Tensor) -> Tensor:
    """Return `rows` of x [B, H, T, D], with heads that share a key as rows: [B, Hkv, R, D]."""
    grouped = x[:, :, rows].to(key.dtype).unflatten(1, (key.shape[1], -1))
    return grouped.flatten(2, 3).contiguous()


def _scores(rows: Tensor, keys: Tensor, pattern: Pattern) -> Tensor:
    """Return capped but unmasked scores [B, Hkv, R, S] of rows that are already scaled."""
    scores = rows @ keys.mT
    if pattern.softcap is None:
        return scores
    return scores.div_(pattern.softcap).tanh_().mul_(pattern.softcap)


def _slope(scores: Tensor, pattern: Pattern) -> Tensor | None:
    """Return the derivative of the capped scores by the uncapped ones; None means 1."""
    if pattern.softcap is None:
        return None
    return (scores / pattern.softcap).square_().neg_().add_(1)


def _hide(
    scores: Tensor, pattern: Pattern, rows: slice, span: slice, query: Tensor, key: Tensor
) -> None:
    """Write -inf where a row of the tile doesn't see a key."""
    mask = tile_mask(pattern, rows, span, query.shape[2], key.shape[2], device=query.device)
    if mask is not None:
        heads = scores.view(*query.shape[:2], -1, scores.shape[-1])  # [B, H, T, S]
        heads.masked_fill_(~mask, -torch.inf)
