"""Attention of a few new tokens over a paged KV cache, with a version in plain PyTorch.

Letters: B batch, H query heads, Hkv key and value heads, T queries of a sequence, S keys of a
sequence, D head dimension, P pages of `page` keys each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labcore.attention.arguments import (
    DTYPES,
    WIDEST_HEAD,
    check_parents,
    make_pattern,
    no_tangents,
)
from labcore.attention.kv_codes import check_codes, check_readable
from labcore.attention.launch import new_heads, new_lse
from labcore.attention.online import KEYS, Running, base_2_scores, finish
from labcore.attention.pattern import Pattern, allowed
from labcore.checks import floating, positive_int
from labcore.device import Backend, choose_backend

__all__ = ["paged_attention"]

Window = tuple[int | None, int | None]
MOST_SPLITS = 128
KEYS_A_SPLIT = 256  # minimum, because each piece also writes a result and reads it back


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    counts: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    tree: Tensor | None = None,
    return_lse: bool = False,
    splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor | Any:  # a pair if return_lse
    """Attend from each sequence's last tokens to its keys, which are scattered over pages.

    query: [B, H, T, D], fp16, bf16 or fp32 (the PyTorch backend takes fp64 too), any strides.
    key_pages, value_pages: [P, page, Hkv, D] in query's dtype, where H is a multiple of Hkv. Key s
    of sequence b is in slot s % page of page block_table[b, s // page]; nothing else is read.
    key_scales, value_scales: float32 [P, page, Hkv]. With them the pages hold codes, int8 or
    float8_e4m3fn; `quantize_kv` makes both.
    block_table: int32 [B, max_pages].
    lengths: int32 [B], each sequence's number of keys, including those of its queries. A sequence
    of length 0 gets zeros.
    counts: int32 [B], how many of the T queries are valid in each sequence of a right-padded batch,
    default T. The rest get zeros. The last counts[b] keys belong to the queries, and a query sees
    the keys up to its own.
    scale: factor for the scores, default 1 / sqrt(D). softcap: c turns a score s into
    c * tanh(s / c).
    window: (left, right) as in `flash_attention`. Only `left` matters, since a query never sees a
    later key.
    tree: parents, int32 [B, T]. A query sees the keys before the queries, its ancestors and itself.
    A parent is an earlier query, -1 for a child of the prefix or -2 for padding, which gets zeros.
    splits: the kernels cut each sequence into this many pieces and run them in parallel; the
    default depends on the device, and the PyTorch form ignores it.

    Returns out [B, H, T, D] in query's dtype and, with return_lse, the natural log-sum-exp of each
    query's scores, fp32 [B, H, T] (fp64 for fp64 inputs), -inf for a query that sees no key. No
    gradients. On a GPU, lengths and pages aren't checked, because the host doesn't read them.
    Raises ValueError or TypeError for invalid arguments.
    Source: Dao et al., 2023, https://pytorch.org/blog/flash-decoding (splits); Kwon et al., 2023,
    arXiv 2309.06180 (pages).
    """
    if key_scales is None and value_scales is None:
        _check_dtypes(query, key_pages, value_pages)
    else:
        check_codes(query, key_pages, value_pages, key_scales, value_scales)
    _check_pages(query, key_pages, value_pages)
    _check_integers(query, block_table, lengths, counts, tree)
    if tree is not None and window is not None:
        raise ValueError("tree and window can't be combined, got both; leave one out")
    pattern = make_pattern(
        query, causal_alignment="bottom_right", scale=scale, window=window, softcap=softcap
    )
    no_tangents("paged_attention", query, key_pages, value_pages)
    out, lse = _paged_attention(
        query,
        key_pages,
        value_pages,
        block_table,
        lengths,
        key_scales,
        value_scales,
        counts,
        tree,
        pattern.scale,
        pattern.softcap,
        pattern.left,
        None if splits is None else positive_int("splits", splits),
        backend,
    )
    return (out, lse) if return_lse else out


@torch.library.custom_op(
    "labcore::paged_attention",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, Tensor lengths, "
        "Tensor? key_scales, Tensor? value_scales, Tensor? counts, Tensor? tree, "
        "float scale, float? softcap, SymInt? left, SymInt? splits, "
        "str backend) -> (Tensor, Tensor)"
    ),
)
def _paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    counts: Tensor | None,
    tree: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    splits: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    wide = query.dtype == torch.float64
    if wide and backend == "triton":
        raise ValueError(
            "paged_attention: the kernels take float16, bfloat16 and float32, got float64; "
            "use backend='torch'"
        )
    if tree is not None:
        check_parents(tree)
    form = "torch" if wide else choose_backend(backend, query, op="paged_attention")
    if query.numel() == 0:
        return new_heads(query), new_lse(query)
    pattern = Pattern(
        scale=scale,
        softcap=softcap,
        is_causal=tree is None,
        bottom_right=True,
        window=(left, None),
        tree=tree,
    )
    tensors = (query, key_pages, value_pages, block_table, lengths)
    scales = None
    if key_scales is not None and value_scales is not None:
        scales = (key_scales, value_scales)
    # Autocast must not change the precision of the products.
    with torch.autocast(query.device.type, enabled=False):
        if form == "torch":
            return _torch_form(*tensors, pattern=pattern, counts=counts, scales=scales)
        from labcore.attention.decode import split_decode

        check_readable(key_pages)
        splits = splits or _splits(query, key_pages, block_table)
        return split_decode(*tensors, pattern=pattern, counts=counts, scales=scales, splits=splits)


@_paged_attention.register_fake
def _(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return new_heads(query), new_lse(query)


def _refuse(*_: object) -> None:
    raise RuntimeError(
        "paged_attention has no gradients, because a KV cache keeps none; run the forward pass "
        "under torch.no_grad(), or train with flash_attention"
    )


_paged_attention.register_autograd(_refuse)


def _torch_form(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    pattern: Pattern,
    counts: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the kernels' results one sequence at a time; the host reads lengths and counts."""
    out, lse = new_heads(query).zero_(), new_lse(query).fill_(-torch.inf)
    most, room = block_table.shape[1] * key_pages.shape[1], key_pages.new_empty(0)
    pools = [
        _Pool(pages, steps, room)
        for pages, steps in zip((key_pages, value_pages), scales or (None, None), strict=True)
    ]
    asked = [query.shape[2]] * len(lengths) if counts is None else counts.tolist()
    for row, (length, count) in enumerate(zip(lengths.tolist(), asked, strict=True)):
        if not 0 <= length <= most:
            raise ValueError(
                f"lengths must be between 0 and the {most} keys that a row of block_table has "
                f"pages for, got {length} in row {row}; give the sequence more pages"
            )
        if not 0 <= count <= query.shape[2]:
            raise ValueError(
                f"counts must be between 0 and the {query.shape[2]} queries, got {count} in row "
                f"{row}; pass the number of valid queries"
            )
        if length == 0 or count == 0:
            continue
        tree = None if pattern.tree is None else pattern.tree[row : row + 1, :count]
        one = replace(pattern, tree=tree)
        row_out, row_lse = _sequence(query[row, :, :count], pools, block_table[row], length, one)
        out[row, :, :count] = row_out.view(query.shape[1], count, -1)
        lse[row, :, :count] = row_lse.view(query.shape[1], count)
    return out, lse


class _Pool(NamedTuple):
    """Pages of keys or values, and room that both share for a copy that fits into a cache."""

    pages: Tensor
    scales: Tensor | None
    room: Tensor

    def read(self, pages: Tensor, held: slice, dtype: torch.dtype) -> Tensor:
        """Return the slots `held` of some pages, [Hkv, S, D], valid until the next read."""
        room = self.room.resize_(len(pages), *self.pages.shape[1:])
        found = torch.index_select(self.pages, 0, pages, out=room).to(dtype)
        if self.scales is not None:
            found = found * self.scales[pages][..., None]
        return found.flatten(0, 1)[held].transpose(0, 1)


def _sequence(
    query: Tensor, pools: list[_Pool], table: Tensor, length: int, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """Attend from the last queries [H, T, D] of one sequence to its keys, some pages at a time.

    Returns out [Hkv, G * T, D] and lse [Hkv, G * T].
    """
    page, kv_heads, dim = pools[0].pages.shape[1:]
    count, dtype = query.shape[1], torch.promote_types(query.dtype, torch.float32)
    first = 0 if pattern.left is None else max(0, length - count - pattern.left)
    size = max(1, KEYS // page) * page
    parts = []
    for begin in range(first // page * page, length, size):
        stop = min(begin + size, length)
        pages = table[begin // page : -(-stop // page)]
        parts.append((pages, slice(max(first, begin) - begin, stop - begin), dtype))
    # Query heads that share a key head become rows of one product.
    rows = query.reshape(kv_heads, -1, dim).to(dtype)
    read = (base_2_scores(rows, pools[0].read(*part), pattern) for part in parts)
    scores, seen = torch.cat(list(read), dim=-1), None
    if count > 1 or pattern.tree is not None:
        seen = allowed(pattern, count, max(length, count), device=query.device)[0, 0]
        seen = seen[:, first - length :]
        scores.view(kv_heads, -1, *seen.shape).masked_fill_(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
    weights = scores.sub_(top).exp2_()
    acc, at = torch.zeros_like(rows), 0
    for part in parts:
        values = pools[1].read(*part)
        keys = slice(at, at := at + values.shape[1])
        if pattern.tree is not None and seen is not None:  # padding may hold anything
            values = values.masked_fill(~seen[:, keys].any(0)[:, None], 0)
        acc.baddbmm_(weights[..., keys], values)
    return finish(Running(top, weights.sum(-1, keepdim=True), acc))


def _splits(query: Tensor, key_pages: Tensor, block_table: Tensor) -> int:
    """Return how many pieces give each multiprocessor four programs.

    Lengths are judged by the room in the table.
    """
    if query.device.type != "cuda":
        return 1
    page, kv_heads = key_pages.shape[1:3]
    batch, heads, queries, _ = query.shape
    programs = batch * kv_heads * -(-heads // kv_heads * queries // 64)  # 64 rows per tile
    wanted = 4 * torch.cuda.get_device_properties(query.device).multi_processor_count // programs
    return max(1, min(wanted, block_table.shape[1] * page // KEYS_A_SPLIT, MOST_SPLITS))


def _check_dtypes(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Raise TypeError unless all are floating-point tensors of one dtype on one device."""
    for name, x in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if getattr(x, "dtype", None) != torch.int8:  # codes get the sentence below
            floating(name, x)
        if x.dtype not in DTYPES or x.dtype != query.dtype or x.device != query.device:
            raise TypeError(
                "query and pages must share one device and one dtype of float16, bfloat16, float32 "
                f"and float64, got {query.dtype} on {query.device} for query, and for {name} "
                f"{x.dtype} on {x.device}; convert the query with .to(key_pages), or pass "
                "key_scales and value_scales with pages of 8-bit codes"
            )


def _check_pages(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Raise unless queries [B, H, T, D] and pages [P, page, Hkv, D] match each other."""
    for name, x in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if x.dim() != 4:
            form = "[B, H, T, D]" if x is query else "[P, page, Hkv, D]"
            raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}")
    shapes = f"query {tuple(query.shape)}, pages {tuple(key_pages.shape)}"
    if key_pages.shape != value_pages.shape or 0 in key_pages.shape:
        raise ValueError(
            "key_pages and value_pages must have the same shape [P, page, Hkv, D] without a 0, "
            f"got {tuple(key_pages.shape)} and {tuple(value_pages.shape)}"
        )
    if not 1 <= query.shape[3] <= WIDEST_HEAD or query.shape[3] != key_pages.shape[3]:
        raise ValueError(
            f"query and pages must share a head dimension D of 1 to {WIDEST_HEAD}, got {shapes}"
        )
    if query.shape[1] % key_pages.shape[2]:
        raise ValueError(f"the query's heads must be a multiple of the pages', got {shapes}")


def _check_integers(
    query: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    tree: Tensor | None,
) -> None:
    """Raise unless each is int32, has the right shape and is on the query's device."""
    given = {"block_table": block_table, "lengths": lengths, "counts": counts, "tree": tree}
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("block_table", "lengths")):
            raise TypeError(f"{name} must be a tensor of int32, got {type(x).__name__}")
    batch, _, queries, _ = query.shape
    wanted = (
        ("block_table", block_table, (batch, max((1, *block_table.shape[-1:])))),
        ("lengths", lengths, (batch,)),
        ("counts", counts, (batch,)),
        ("tree", tree, (batch, queries)),
    )
    for name, x, shape in wanted:
        if x is None:
            continue
        if x.dtype != torch.int32 or x.device != query.device:
            raise TypeError(
                f"{name} must be int32 on the query's device {query.device}, got {x.dtype} on "
                f"{x.device}; convert it with {name}.to(query.device, torch.int32)"
            )
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
