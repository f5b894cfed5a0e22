"""Decoding over a paged KV cache with several programs per sequence.

A decode step has few queries and many keys, so one program per sequence would leave most of a GPU
idle. Instead, a sequence's keys are cut into `splits` pieces, a program computes softmax attention
over each piece, and `reduce_kernel` weights the results by their log-sum-exp (flash decoding: Dao,
Haziza, Massa and Sizov, 2023, https://pytorch.org/blog/flash-decoding).

Letters: B batch, H query heads, Hkv key and value heads, G = H / Hkv, T queries of a sequence,
D head dimension, P pages of `page` keys each, N nodes of a tree (N = T).
"""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from labcore import device
from labcore.attention.configs import Config, kind_of, padded
from labcore.attention.launch import new_heads, new_lse
from labcore.attention.pattern import Pattern, tree_bits
from labcore.attention.tiling import LN2, softmax_step, visible

LOG2E = math.log2(math.e)
LEAST_ROWS, MOST_ROWS = 16, 64  # per tile; 16 is a matrix instruction's minimum
ADDED = tl.constexpr(16)  # pieces that reduce_kernel adds at a time
FEWEST_PAD = 128  # of reduce_kernel's pieces: one program for all numbers that `paged` chooses


@triton.jit
def pages_of(table_ptr, start, end, PAGE: tl.constexpr, N: tl.constexpr):
    """Load the pages of the keys start … start + N - 1; 0 from `end` on."""
    keys = start + tl.arange(0, N)
    return tl.load(table_ptr + keys // PAGE, mask=keys < end, other=0)


@triton.jit
def walk_pages(
    acc, peak, total, page, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, bits_ptr,
    parents_ptr, begin, stop, end, rows, queries, prefix, left, scale2, cap_scale,
    stride_kp, stride_ks, stride_vp, stride_vs,
    PAGE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr,
    LEFT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add blocks of N keys from `begin` to `stop` to the running softmax.

    page [N]: the pages of the first block's keys. Each step loads those of the next block: if keys
    had to wait for pages of their own step, the compiler would keep fewer blocks in flight.
    """
    cols = tl.arange(0, D_PAD)
    for start in tl.range(begin, stop, N):
        after = pages_of(table_ptr, start + N, end, PAGE, N)
        keys = start + tl.arange(0, N)
        inside = (cols < D)[None, :]
        held = keys >= 0
        if MASKED:
            held = keys < end  # past the end there may be NaN or a page that isn't the sequence's
            if TREE:  # the cache may have no key for a padding node
                node = tl.maximum(keys - prefix, 0)
                parent = tl.load(parents_ptr + node, mask=held & (keys >= prefix), other=-1)
                held = held & (parent != -2)
            inside = inside & held[:, None]
        in_page = page.to(tl.int64)
        slot = keys % PAGE
        k_at = k_ptr + (in_page * stride_kp + slot * stride_ks)[:, None] + cols[None, :]
        v_at = v_ptr + (in_page * stride_vp + slot * stride_vs)[:, None] + cols[None, :]
        if MASKED or D < D_PAD:
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if CODES:
            scale_at = (in_page * PAGE + slot) * tl.num_programs(1)
            s *= tl.load(k_scales_ptr + scale_at, mask=held, other=0.0)[None, :]
        if SOFTCAP:  # as in `scores`
            s = 1.0 - 2.0 / (1.0 + tl.exp2(s * cap_scale))
        if MASKED:
            seen = visible(
                rows[:, None], keys[None, :], queries, end, prefix, left, 0, bits_ptr, LEFT, True,
                TREE,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        weights, shrink, peak, total = softmax_step(s, peak, total, scale2, MASKED)
        if CODES:
            weights *= tl.load(v_scales_ptr + scale_at, mask=held, other=0.0)[None, :]
        v = v.to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        page = after
    return acc, peak, total, page


@triton.jit(do_not_specialize=["queries", "left", "max_pages"])
def decode_kernel(
    out_ptr,  # [B, T, H, splits, D]
    lse_ptr,  # [B, H, T, splits] float32
    q_ptr,
    k_ptr,  # [P, page, Hkv, D]
    v_ptr,
    k_scales_ptr,  # [P, page, Hkv] float32, read if CODES
    v_scales_ptr,
    table_ptr,  # [B, max_pages] int32
    lengths_ptr,  # [B] int32
    counts_ptr,  # [B] int32, read if COUNTS
    parents_ptr,  # [B, N] int32, read if TREE
    bits_ptr,  # [B, N, ceil(N / 32)] int32, read if TREE
    stride_qb, stride_qh, stride_qt,
    stride_kp, stride_ks, stride_kh,
    stride_vp, stride_vs, stride_vh,
    max_pages, queries, left, scale2, cap_scale,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr, COUNTS: tl.constexpr,
    LEFT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Process one piece of one sequence for the G query heads that share a KV head.

    Their queries are packed into the M rows of a tile, as row t * G + g, so each key is read once.
    """
    tiles = tl.cdiv(queries * GROUP, M)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    m0 = tl.program_id(0) % tiles * M
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    piece = tl.program_id(2)
    splits = tl.num_programs(2)

    # A length past the table would read page numbers from memory past the table.
    length = tl.minimum(tl.load(lengths_ptr + batch), max_pages * PAGE)
    count = queries
    if COUNTS:
        count = tl.load(counts_ptr + batch)
    prefix = length - count
    first_t = m0 // GROUP
    last_t = tl.minimum((m0 + M - 1) // GROUP, count - 1)
    # Some row sees keys begin … end - 1; every row sees keys whole_begin … whole_end - 1.
    begin, whole_begin = 0, 0
    if LEFT:
        begin = tl.maximum(prefix + first_t - left, 0)
        whole_begin = tl.maximum(prefix + last_t - left, 0)
    end = tl.where(first_t < count, prefix + last_t + 1, 0)
    whole_end = prefix + first_t + 1
    if TREE:
        whole_end = prefix
    size = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), N) * N
    begin += piece * size
    end = tl.minimum(begin + size, end)
    hot = begin + tl.cdiv(tl.maximum(tl.minimum(whole_begin, end) - begin, 0), N) * N
    cold = hot + tl.maximum(tl.minimum(whole_end, end) - hot, 0) // N * N

    row = m0 + tl.arange(0, M)
    stored = row < queries * GROUP
    t = tl.minimum(row // GROUP, queries - 1)
    head = kv_head * GROUP + row % GROUP
    cols = tl.arange(0, D_PAD)
    keep = stored[:, None] & (cols < D)[None, :]
    q_at = q_ptr + batch * stride_qb + (head * stride_qh + t * stride_qt)[:, None]
    q = tl.load(q_at + cols[None, :], mask=keep, other=0.0)
    answered = t < count
    if TREE:
        parents_ptr += batch * queries
        bits_ptr += batch * queries * tl.cdiv(queries, 32)
        answered = answered & (tl.load(parents_ptr + t) != -2)
    table_ptr += batch * max_pages
    k_ptr, v_ptr = k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh
    if CODES:
        k_scales_ptr, v_scales_ptr = k_scales_ptr + kv_head, v_scales_ptr + kv_head

    acc = tl.zeros([M, D_PAD], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    page = pages_of(table_ptr, begin, end, PAGE, N)
    bounds = begin, hot, cold, end
    for part in tl.static_range(0 if LEFT else 1, 3):  # only hot … cold - 1 needs no mask
        acc, peak, total, page = walk_pages(
            acc, peak, total, page, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
            bits_ptr, parents_ptr, bounds[part], bounds[part + 1], end, t, queries, prefix, left,
            scale2, cap_scale, stride_kp, stride_ks, stride_vp, stride_vs, PAGE, D, D_PAD, N,
            CODES, LEFT, TREE, SOFTCAP, part != 1,
        )  # fmt: skip

    # Padding rows weren't masked in the unmasked blocks.
    total = tl.where(answered, total, 0.0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = tl.where(empty[:, None], 0.0, acc / total[:, None])
    lse = tl.where(empty, float("-inf"), peak * LN2 + tl.log(total))
    at = ((batch * queries + t) * heads + head) * splits + piece
    tl.store(out_ptr + at[:, None] * D + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=keep)
    at = ((batch * heads + head) * queries + t) * splits + piece
    tl.store(lse_ptr + at, lse, mask=stored)


@triton.jit(do_not_specialize=["heads", "queries", "splits"])
def reduce_kernel(
    out_ptr,  # [B, T, H, D]
    lse_ptr,  # [B, H, T] float32
    part_ptr,  # [B, T, H, splits, D] float32
    part_lse_ptr,  # [B, H, T, splits] float32
    heads, queries, splits,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Compute one row of the result: its pieces, weighted by exp(piece's lse - row's lse)."""
    row = tl.program_id(0).to(tl.int64)  # (b * T + t) * H + h
    head = row % heads
    batch = row // heads // queries
    lse_row = (batch * heads + head) * queries + row // heads % queries
    part_ptr += row * splits * D
    part_lse_ptr += lse_row * splits
    offs_s = tl.arange(0, SPLITS_PAD)
    every = tl.load(part_lse_ptr + offs_s, mask=offs_s < splits, other=float("-inf"))
    peak = tl.max(every, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(every - peak), 0)
    empty = total == 0.0  # the row sees nothing
    total = tl.where(empty, 1.0, total)
    cols = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    for first in tl.range(0, splits, ADDED):
        piece = first + tl.arange(0, ADDED)
        lse = tl.load(part_lse_ptr + piece, mask=piece < splits, other=float("-inf"))
        keep = (piece < splits)[:, None] & (cols < D)[None, :]
        part = tl.load(part_ptr + piece[:, None] * D + cols[None, :], mask=keep, other=0.0)
        acc += tl.sum(tl.exp(lse - peak)[:, None] * part, 0)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + cols, out, mask=cols < D)
    tl.store(lse_ptr + lse_row, tl.where(empty, float("-inf"), peak + tl.log(total)))


def split_decode(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    pattern: Pattern,
    counts: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels with the arguments of `paged_attention`, which checks them.

    Returns out [B, H, T, D] in query's dtype and lse [B, H, T] in float32.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, dtype = key_pages.shape[2], query.dtype
    if device.interpreting() and dtype == torch.bfloat16:
        # The interpreter multiplies bfloat16 bit patterns, and truncates instead of rounding.
        query = query.float()
        if scales is None:
            key_pages, value_pages = key_pages.float(), value_pages.float()
    query, key_pages, value_pages = (_readable(x) for x in (query, key_pages, value_pages))
    out, lse = new_heads(query), new_lse(query)
    part, part_lse = out, lse
    if splits > 1:
        shape = (batch, queries, heads, splits, head_dim)
        part = query.new_empty(shape, dtype=torch.float32)
        part_lse = lse.new_empty((*lse.shape, splits))
    rows = heads // kv_heads * queries
    kind = kind_of(query.device)
    config = choose(rows, head_dim, query.element_size(), kind)
    # Four programs of four warps fill a multiprocessor's 65,536 registers. Without the number,
    # NVIDIA's assembler aims at five and spills.
    limit = {"maxnreg": 128} if config.warps == 4 and kind != "cdna" else {}
    # The interpreter uses NumPy, which would warn about inf and inf - inf; a GPU doesn't.
    with torch.cuda.device_of(query), np.errstate(all="ignore"):
        decode_kernel[(batch * triton.cdiv(rows, config.m), kv_heads, splits)](
            out_ptr=part,
            lse_ptr=part_lse,
            **_arguments(
                query, key_pages, value_pages, block_table, lengths, counts, scales, pattern
            ),
            M=config.m,
            N=config.n,
            num_warps=config.warps,
            num_stages=config.stages,
            **limit,
        )
        if splits > 1:
            reduce_kernel[(batch * queries * heads,)](
                out,
                lse,
                part,
                part_lse,
                heads,
                queries,
                splits,
                D=head_dim,
                D_PAD=padded(head_dim),
                SPLITS_PAD=max(FEWEST_PAD, triton.next_power_of_2(splits)),
                num_warps=1,
            )
    return out.to(dtype), lse


def _arguments(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    pattern: Pattern,
) -> dict[str, Any]:
    """Return decode_kernel's arguments by name, besides its results and its tile."""
    tree, cap = pattern.tree, pattern.softcap
    strides = {
        f"stride_{name}": stride
        for names, x in (("qb qh qt", query), ("kp ks kh", key_pages), ("vp vs vh", value_pages))
        for name, stride in zip(names.split(), x.stride(), strict=False)
    }
    return strides | {
        "q_ptr": query,
        "k_ptr": key_pages,
        "v_ptr": value_pages,
        "k_scales_ptr": None if scales is None else scales[0].contiguous(),
        "v_scales_ptr": None if scales is None else scales[1].contiguous(),
        "table_ptr": block_table.contiguous(),
        "lengths_ptr": lengths.contiguous(),
        "counts_ptr": None if counts is None else counts.contiguous(),
        "parents_ptr": None if tree is None else tree.contiguous(),
        "bits_ptr": None if tree is None else tree_bits(tree),
        "max_pages": block_table.shape[1],
        "queries": query.shape[2],
        "left": pattern.left or 0,
        "scale2": LOG2E * (pattern.scale if cap is None else cap),
        "cap_scale": 0.0 if cap is None else 2 * LOG2E * pattern.scale / cap,
        "GROUP": query.shape[1] // key_pages.shape[2],
        "PAGE": key_pages.shape[1],
        "D": query.shape[3],
        "D_PAD": padded(query.shape[3]),
        "CODES": scales is not None,
        "COUNTS": counts is not None,
        "LEFT": pattern.left is not None,
        "TREE": tree is not None,
        "SOFTCAP": cap is not None,
    }


def choose(rows: int, head_dim: int, element_size: int, kind: str) -> Config:
    """Return the tile for `rows` = G * T query rows of `element_size` bytes on a `kind` of GPU.

    kind: as in `configs`. A block of keys plus one of values takes at most 16 KiB per stage, so
    there's room for several programs with blocks on their way. 8-bit codes get the blocks of the
    query's dtype: twice as many keys would spill registers.
    """
    whole = element_size == 4  # exact products use many registers and no matrix unit
    most = MOST_ROWS // 2 if whole or kind == "cdna" else MOST_ROWS
    m = min(max(triton.next_power_of_2(rows), LEAST_ROWS), most)
    room = (1 << 12 if whole else 1 << 13) // (padded(head_dim) * element_size)
    return Config(
        m=m,
        n=max(16, min(64, room)),
        warps=4 if m == LEAST_ROWS and not whole else 8,
        stages={"cdna": 1, "ada": 3}.get(kind, 4),
    )


def _readable(x: Tensor) -> Tensor:
    """Return `x`, copied unless its columns are adjacent and each entry's offsets fit in 31 bits.

    The kernel indexes the first dimension (batch or page) in 64 bits and the others in 32.
    """
    last = sum(
        (size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
    )
    return x if x.stride(-1) == 1 and last < 1 << 31 else x.contiguous()
