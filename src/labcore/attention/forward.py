"""The forward kernel: each program holds a tile of queries and loops over the keys they see.

Letters: B batch, H heads, Hkv key and value heads, T queries, S keys, D head dimension, M and N
rows of a tile of queries and of keys. Scores stay in registers. The kernel writes the output and
one number per row, lse = log(sum(exp(scores))), which the backward kernels use to recompute the
weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labcore import device
from labcore.attention import descriptors
from labcore.attention.configs import FORWARD, Config, choose, kind_of
from labcore.attention.launch import arguments, launch, new_heads, new_lse, readable, strides
from labcore.attention.pattern import Pattern
from labcore.attention.tiling import (
    LN2,
    NUMBERS,
    load_rows,
    scores,
    sequence,
    softmax_step,
    store_rows,
    tiles,
    visible,
)


@triton.jit
def walk(
    acc, p, shrink, peak, total, q, k_base, v_base, stride_kt, stride_vt, start, stop, rows, q_len,
    k_len, shift, left, right, bits_ptr, scale2, cap_scale, D: tl.constexpr, D_PAD: tl.constexpr,
    N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Process tiles of keys start … stop - 1; p [M, N] holds the previous tile's weights.

    Each step computes its tile's scores and multiplies the previous tile's weights by its values.
    That product doesn't depend on the current tile, so the matrix unit can run it while other units
    compute the exponentials.
    """
    offs_n = tl.arange(0, N)
    for j in tl.range(start, stop, num_stages=1 if FIRST else None):
        begin = j * N
        k_at = k_base + tl.cast(begin, tl.int64) * stride_kt
        k = load_rows(k_at, stride_kt, offs_n, k_len - begin, D, D_PAD, MASKED)
        s = scores(q, k, cap_scale, SOFTCAP)
        v_at = v_base + tl.cast(begin - N, tl.int64) * stride_vt
        before = tl.where(j == start, 0, N)  # the very first tile has no previous one
        v = load_rows(v_at, stride_vt, offs_n, before, D, D_PAD, FIRST)
        acc = tl.dot(p.to(v.dtype, bitcast=True), v, acc * shrink[:, None], input_precision="ieee")
        if MASKED:
            keys = (begin + offs_n)[None, :]
            s = tl.where(
                visible(
                    rows[:, None], keys, q_len, k_len, shift, left, right, bits_ptr, LEFT, RIGHT,
                    TREE,
                ),
                s,
                float("-inf"),
            )  # fmt: skip
        weights, shrink, peak, total = softmax_step(s, peak, total, scale2, MASKED)
        # Carried as bits: Triton may route a floating-point operand between steps through shared
        # memory.
        p = weights.to(v.dtype).to(p.dtype, bitcast=True)
    return acc, p, shrink, peak, total


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bits_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    stride_lb, stride_lh,
    heads, group, max_q, q_len, k_len, left, right, scale2, cap_scale,
    D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute out [B, H, T, D] and lse [B, H, T] from q [B, H, T, D], k and v [B, Hkv, S, D]."""
    blocks = tl.cdiv(max_q, M)
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block  # each head's longest loops start first and its short ones last
    head = (tl.program_id(0) // blocks) % heads
    batch = tl.program_id(0) // blocks // heads
    q_first, q_len = sequence(batch, cu_q_ptr, q_len, VARLEN)
    k_first, k_len = sequence(batch, cu_k_ptr, k_len, VARLEN)
    m0 = block * M
    if m0 >= q_len:
        return
    shift = 0
    if BOTTOM_RIGHT:
        shift = k_len - q_len
    first, hot, cold, last = tiles(
        m0, tl.minimum(m0 + M, q_len), k_len, q_len, shift, left, right, N, LEFT, RIGHT, TREE
    )

    # In 64 bits, because an index times a stride may exceed 2^31 elements.
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    q_row, k_row = (q_first + m0).to(tl.int64), k_first.to(tl.int64)
    q_base = q_ptr + batch * stride_qb + head * stride_qh + q_row * stride_qt
    k_base = k_ptr + batch * stride_kb + head // group * stride_kh + k_row * stride_kt
    v_base = v_ptr + batch * stride_vb + head // group * stride_vh + k_row * stride_vt
    out_base = out_ptr + batch * stride_ob + head * stride_oh + q_row * stride_ot
    lse_base = lse_ptr + batch * stride_lb + head * stride_lh + q_row
    if TREE:
        bits_ptr += batch * q_len * tl.cdiv(q_len, 32)

    offs_m = tl.arange(0, M)
    rows = m0 + offs_m
    q = load_rows(q_base, stride_qt, offs_m, q_len - m0, D, D_PAD, True)
    acc = tl.zeros([M, D_PAD], tl.float32)
    p = tl.zeros([M, N], tl.int32 if q_ptr.dtype.element_ty == tl.float32 else tl.int16)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc, p, shrink, peak, total = walk(
        acc, p, total, peak, total, q, k_base, v_base, stride_kt, stride_vt, first, first + 1,
        rows, q_len, k_len, shift, left, right, bits_ptr, scale2, cap_scale,
        D, D_PAD, N, LEFT, RIGHT, TREE, SOFTCAP, True, True,
    )  # fmt: skip
    # Only a window's left edge masks more tiles before the whole ones. The very first tile stands
    # alone: in a loop with it, a Hopper GPU's matrix instructions would wait for each other.
    if LEFT:
        acc, p, shrink, peak, total = walk(
            acc, p, shrink, peak, total, q, k_base, v_base, stride_kt, stride_vt, first + 1, hot,
            rows, q_len, k_len, shift, left, right, bits_ptr, scale2, cap_scale,
            D, D_PAD, N, LEFT, RIGHT, TREE, SOFTCAP, True, False,
        )  # fmt: skip
    acc, p, shrink, peak, total = walk(
        acc, p, shrink, peak, total, q, k_base, v_base, stride_kt, stride_vt, hot, cold,
        rows, q_len, k_len, shift, left, right, bits_ptr, scale2, cap_scale,
        D, D_PAD, N, LEFT, RIGHT, TREE, SOFTCAP, False, False,
    )  # fmt: skip
    acc, p, shrink, peak, total = walk(
        acc, p, shrink, peak, total, q, k_base, v_base, stride_kt, stride_vt, cold, last + 1,
        rows, q_len, k_len, shift, left, right, bits_ptr, scale2, cap_scale,
        D, D_PAD, N, LEFT, RIGHT, TREE, SOFTCAP, True, False,
    )  # fmt: skip
    # The loop leaves out the last tile's values.
    v_at = v_base + tl.cast(last * N, tl.int64) * stride_vt
    v = load_rows(v_at, stride_vt, tl.arange(0, N), k_len - last * N, D, D_PAD, True)
    acc = tl.dot(p.to(v.dtype, bitcast=True), v, acc * shrink[:, None], input_precision="ieee")

    empty = total == 0.0
    if TREE:  # padding rows saw the prefix in the unmasked tiles
        empty = empty | ~visible(
            rows, rows + shift, q_len, k_len, shift, left, right, bits_ptr, LEFT, RIGHT, TREE
        )
    out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, float("-inf"), peak * LN2 + tl.log(tl.where(empty, 1.0, total)))
    store_rows(out_base, stride_ot, offs_m, q_len - m0, out, D, D_PAD)
    tl.store(lse_base + offs_m, lse, mask=rows < q_len)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    config: Config | None = None,
    **lengths: Any,
) -> tuple[Tensor, Tensor]:
    """Run a kernel; return out [B, H, T, D] in q's dtype and lse [B, H, T] in float32.

    q [B, H, T, D], k and v [B, Hkv, S, D] share a dtype (float16, bfloat16 or float32) and have any
    strides, D at most 256 and H a multiple of Hkv.
    lengths: cu_q, cu_k, max_q and max_k of packed sequences, as in `launch.arguments`.
    config: a tile to use instead of the device's default, in the kernel of this module. Without
    it, a Hopper or Blackwell GPU runs that of `descriptors` where it can.
    lse is the natural logarithm of the sum of exp(score). A row that sees no key has out 0 and lse
    -inf.
    Source: Dao, "FlashAttention-2", arXiv 2307.08691.
    """
    if q.dtype == torch.bfloat16 and device.interpreting():
        # The interpreter multiplies bfloat16 bit patterns as if they were integers.
        wide = flash_forward(
            q.float(), k.float(), v.float(), pattern=pattern, config=config, **lengths
        )
        return new_heads(q).copy_(wide[0]), wide[1]
    q, k, v = readable(q), readable(k), readable(v)
    out, lse = new_heads(q), new_lse(q)
    kind, tree = kind_of(q.device), pattern.tree is not None
    if config is None and lengths.get("cu_q") is None:  # noqa: SIM102 (hashed in this form)
        if descriptors.suits(q, k, v, pattern, kind):
            descriptors.described_forward(q, k, v, out, lse, pattern=pattern)
            return out, lse
    given = arguments(q, k, v, pattern=pattern, **lengths)
    config = config or choose(FORWARD, kind, q.shape[3], q.dtype, tree=tree)
    launch(
        forward_kernel,
        triton.cdiv(given["max_q"], config.m) * q.shape[1] * given["sequences"],
        q,
        out_ptr=out,
        lse_ptr=lse,
        **given,
        **config.options(),
        **strides(given["VARLEN"], o=out, l=lse),
    )
    return out, lse
