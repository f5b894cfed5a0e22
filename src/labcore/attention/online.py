"""Online softmax and tiled attention in plain PyTorch, with O(T + S) memory besides the inputs.

See `pattern` for the dimension letters. G = H / Hkv query heads share a key head. The R rows of a
tile are the queries of all of them, which makes every product one batched matrix product over key
heads. Scores are in base 2: exp(s) is 2^(s * log2(e)), and the factor is part of the scale. On a
CPU, torch.exp takes far longer than torch.exp2 where its result underflows.
Source: Milakov and Gimelshein, 2018, arXiv 1805.02867; Dao, 2023, arXiv 2307.08691.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from labcore.attention.launch import new_heads, new_lse
from labcore.attention.pattern import Pattern, key_range, masked_keys, tile_mask

__all__ = [
    "KEYS",
    "Running",
    "absorb",
    "base_2_scores",
    "finish",
    "merge_states",
    "tiled_backward",
    "tiled_forward",
]

LOG2E = math.log2(math.e)
# Queries, keys and scores of a tile, at most. In fp32 the scores take 1 MiB, which fits into the
# L2 cache of many server cores; smaller tiles cost more in Python's loop than they save.
ROWS, KEYS, TILE = 256, 512, 1 << 18

Index = tuple[slice, slice, slice]


class Running(NamedTuple):
    """Softmax-weighted sums over the keys so far.

    top: the largest score, in base 2, [..., R, 1].
    total: the sum of 2^(score - top), [..., R, 1].
    acc: the sum of 2^(score - top) * value, [..., R, D].
    """

    top: Tensor
    total: Tensor
    acc: Tensor


def absorb(state: Running | None, scores: Tensor, values: Tensor) -> Running:
    """Add keys to the sums; `state` is None before the first ones.

    scores: [..., R, S] in base 2, which are overwritten; -inf marks a key that isn't seen.
    values: [..., S, D]. A new largest score rescales the earlier sums.
    """
    top = scores.amax(-1, keepdim=True)
    if state is None:
        top.clamp_(min=torch.finfo(top.dtype).min)  # -inf - -inf would be NaN
    else:
        top = torch.maximum(state.top, top)
    weights = scores.sub_(top).exp2_()
    total, acc = weights.sum(-1, keepdim=True), weights @ values
    if state is not None:
        rescale = (state.top - top).exp2_()
        total.addcmul_(state.total, rescale)
        acc.addcmul_(state.acc, rescale)
    return Running(top, total, acc)


def finish(state: Running) -> tuple[Tensor, Tensor]:
    """Return out [..., R, D] and lse [..., R]; zeros and -inf for a row that saw no key."""
    lse = state.total.log().add_(state.top, alpha=1 / LOG2E)
    # The largest score's own weight is 1, so only a row that saw no key has a smaller total.
    return state.acc.div_(state.total.clamp(min=1)), lse.squeeze(-1)


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
    out, lse = new_heads(query).zero_(), new_lse(query).fill_(-torch.inf)
    room = lse.new_empty(TILE)
    for part, at_q, at_k in _parts(pattern, query, key, cu_q, cu_k):
        q, q_out, q_lse = query[at_q], out[at_q], lse[at_q]
        k, v = (x[at_k].flatten(0, 1).to(lse.dtype) for x in (key, value))
        for rows, spans in _tiles(part, q, k):
            q_tile = _rows(q, rows, k)
            state = None
            for span in spans:
                scores = base_2_scores(q_tile, k[:, span], part, room)
                _hide(scores, part, rows, span, q, k)
                state = absorb(state, scores, v[:, span])
            for whole, tile in zip((q_out, q_lse), finish(state) if state else (), strict=False):
                place = whole[:, :, rows]
                place.copy_(tile.view(place.shape))
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
    lse = lse.masked_fill(lse == -torch.inf, 0) * LOG2E
    rooms = lse.new_empty(TILE), lse.new_empty(TILE)
    for part, at_q, at_k in _parts(pattern, query, key, cu_q, cu_k):
        q, dy, q_lse, q_mean, dq = (x[at_q] for x in (query, grad_out, lse, mean, grads[0]))
        k, v = (x[at_k].flatten(0, 1).to(lse.dtype) for x in (key, value))
        dk, dv = (x.new_zeros(x.shape) for x in (k, v))
        for rows, spans in _tiles(part, q, k):
            q_tile, dy_tile = _rows(q, rows, k), _rows(dy, rows, k)
            lse_tile, mean_tile = (_rows(x[..., None], rows, k) for x in (q_lse, q_mean))
            dq_tile = q_tile.new_zeros(q_tile.shape)
            for span in spans:
                scores = base_2_scores(q_tile, k[:, span], part, rooms[0])
                slope = _slope(scores, part)
                _hide(scores, part, rows, span, q, k)
                weights = scores.sub_(lse_tile).exp2_()
                dv[:, span].baddbmm_(weights.mT, dy_tile)
                ds = torch.bmm(dy_tile, v[:, span].mT, out=rooms[1].resize_(weights.shape))
                ds.sub_(mean_tile).mul_(weights)
                ds = ds if slope is None else ds.mul_(slope)
                dq_tile.baddbmm_(ds, k[:, span])
                dk[:, span].baddbmm_(ds.mT, q_tile)
            dq[:, :, rows] = dq_tile.mul_(part.scale).view(dq[:, :, rows].shape)
        for whole, found in zip(grads[1:], (dk.mul_(part.scale), dv), strict=True):
            whole[at_k] = found.view(whole[at_k].shape)
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


def _parts(
    pattern: Pattern, query: Tensor, key: Tensor, cu_q: Tensor | None, cu_k: Tensor | None
) -> Iterator[tuple[Pattern, Index, Index]]:
    """Cut the work into independent parts: by sequence, and by heads where they exceed a tile.

    Yields each part's pattern, its place in the query and its place in key and value.
    """
    batch, heads = key.shape[:2]
    group = query.shape[1] // heads
    for queries, keys in _sequences(query, key, cu_q, cu_k):
        rows = min(queries.stop - queries.start, _side(group))
        scores = group * rows * min(keys.stop - keys.start, KEYS)
        fit = max(1, TILE // max(1, scores))  # key heads
        step = max(1, fit // heads)
        for b, h in itertools.product(range(0, batch, step), range(0, heads, fit)):
            some = slice(b, b + step)
            tree = None if pattern.tree is None else pattern.tree[some]
            at_q = some, slice(h * group, (h + fit) * group), queries
            yield replace(pattern, tree=tree), at_q, (some, slice(h, h + fit), keys)


def _side(group: int) -> int:
    """Return how many queries make the rows of a tile."""
    return max(1, ROWS // group)


def _tiles(pattern: Pattern, query: Tensor, key: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of queries, each with the blocks of keys that some of its queries may see."""
    q_len, k_len = query.shape[2], key.shape[1]
    side = _side(query.shape[0] * query.shape[1] // key.shape[0])
    for first in range(0, q_len, side):
        rows = slice(first, min(first + side, q_len))
        keys = key_range(pattern, rows.start, rows.stop, q_len, k_len)
        yield rows, [slice(j, min(j + KEYS, keys.stop)) for j in keys[::KEYS]]


def _rows(x: Tensor, rows: slice, key: Tensor) -> Tensor:
    """Return `rows` of x [B, H, T, D], with heads that share a key as rows: [B * Hkv, R, D]."""
    return x[:, :, rows].reshape(key.shape[0], -1, x.shape[-1]).to(key.dtype)


def base_2_scores(
    rows: Tensor, keys: Tensor, pattern: Pattern, room: Tensor | None = None
) -> Tensor:
    """Return capped but unmasked scores in base 2, [B * Hkv, R, S], written into `room`."""
    room = rows.new_empty(0) if room is None else room
    scores = room.resize_(*rows.shape[:2], keys.shape[1])
    if pattern.softcap is None:
        return scores.baddbmm_(rows, keys.mT, beta=0, alpha=pattern.scale * LOG2E)
    scores.baddbmm_(rows, keys.mT, beta=0, alpha=pattern.scale / pattern.softcap)
    return scores.tanh_().mul_(pattern.softcap * LOG2E)


def _slope(scores: Tensor, pattern: Pattern) -> Tensor | None:
    """Return the derivative of the capped scores by the uncapped ones; None means 1."""
    if pattern.softcap is None:
        return None
    return (scores / (pattern.softcap * LOG2E)).square_().neg_().add_(1)


def _hide(
    scores: Tensor, pattern: Pattern, rows: slice, span: slice, query: Tensor, key: Tensor
) -> None:
    """Write -inf where a row of the tile doesn't see a key."""
    q_len, k_len = query.shape[2], key.shape[1]
    keys = masked_keys(pattern, rows, span, q_len, k_len)
    if keys.start == keys.stop:
        return
    heads = scores.view(len(query), -1, rows.stop - rows.start, scores.shape[2])  # [B, H, T, S]
    some = heads[..., keys.start - span.start : keys.stop - span.start]
    if pattern.tree is None:
        first = keys.start - rows.start - pattern.shift(q_len, k_len)
        size = *some.shape[2:], some.dtype, some.device
        keep, put = _band(pattern.left, pattern.right, first, *size)
        # Bitwise operations are faster than masked_fill_, and hide a NaN, which adding -inf keeps.
        some.view(keep.dtype).bitwise_and_(keep).bitwise_or_(put)
    elif (seen := tile_mask(pattern, rows, keys, q_len, k_len)) is not None:
        some.masked_fill_(~seen, -torch.inf)


@functools.lru_cache(maxsize=16)
def _band(
    left: int | None,
    right: int | None,
    first: int,
    rows: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return which bits of a score to keep and which to put instead: -inf where it isn't seen.

    Row i's diagonal is key i; column j is key first + j. Tiles at the same distance from the
    diagonal share both tensors.
    """
    band, place = Pattern(scale=1.0, window=(left, right)), slice(first, first + keys)
    seen = tile_mask(band, slice(0, rows), place, rows, keys, device=device)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    keep = torch.full((rows, keys), -1, dtype=bits, device=device)
    put = torch.zeros(rows, keys, dtype=dtype, device=device)
    if seen is not None:
        keep.masked_fill_(~seen[0, 0], 0)
        put.masked_fill_(~seen[0, 0], -torch.inf)
    return keep, put.view(bits)
