"""The backward kernels, which recompute the scores from q, k and lse instead of storing them.

With p = exp(scale * q·k - lse), the gradient of a row's scores is ds = p * (dp - delta), where
dp = grad_out · v and delta = sum(out * grad_out). Then dv = pᵀ grad_out, dk = scale * dsᵀ q and
dq = scale * ds k. One kernel holds a tile of keys and loops over queries for dk and dv; another
holds queries and loops over keys for dq. One program computes each sum in a fixed order, so results
are bitwise reproducible. In fused mode, the first kernel also adds its share of dq to memory, which
saves two of seven products but makes the order of those sums nondeterministic. Where registers
can't hold both dk and dv, the first kernel runs once for each and computes an eighth product. See
`forward` for the dimension letters.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labcore import device
from labcore.attention.configs import KEYS, QUERIES, Config, choose, kind_of
from labcore.attention.delta import launch_delta
from labcore.attention.launch import arguments, launch, new_heads, readable, strides
from labcore.attention.pattern import Pattern
from labcore.attention.tiling import (
    NUMBERS,
    load_rows,
    scores,
    sequence,
    store_rows,
    tiles,
    visible,
)

FUSED_DIM = 128


@triton.jit
def _load_lse(base, rows, limit, GUARD: tl.constexpr):
    """Load lse of `rows` in base 2; +inf, which makes weights 0, for rows that see no key."""
    if GUARD:
        lse = tl.load(base + rows, mask=rows < limit, other=float("-inf"))
    else:
        lse = tl.load(base + rows)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def _slope(s, SOFTCAP: tl.constexpr):
    """Derivative of the capped scores s, which are values of tanh, by tanh's argument."""
    return 1.0 - s * s if SOFTCAP else 1.0


@triton.jit
def row_tiles(
    n0, q_len, k_len, shift, left, right,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Tiles of queries that see a key of n0 … n0 + N - 1: (first, hot, cold, stop).

    Tiles hot … cold - 1 need no mask; the others in first … stop - 1 do.
    """
    n1 = tl.minimum(n0 + N, k_len)
    begin, end = n0 * 0, q_len  # rows that see some key
    whole_begin, whole_end = begin, q_len  # rows that see every key
    if RIGHT:
        begin = tl.maximum(begin, n0 - shift - right)
        whole_begin = tl.maximum(begin, n1 - 1 - shift - right)
    if LEFT:
        end = tl.minimum(end, n1 - shift + left)
        whole_end = tl.minimum(whole_end, n0 - shift + left + 1)
    whole = n0 + N <= k_len
    if TREE:
        whole = whole & (n1 <= shift)
    whole_begin = tl.where(whole, whole_begin, q_len)
    first = begin // M
    stop = tl.maximum(tl.cdiv(tl.maximum(end, 0), M), first)
    hot = tl.minimum(tl.maximum(tl.cdiv(whole_begin, M), first), stop)
    cold = tl.minimum(tl.maximum(tl.maximum(whole_end, 0) // M, hot), stop)
    return first, hot, cold, stop


@triton.jit
def _walk_queries(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, dq_base, stride_qt,
    stride_dot, stride_dqt, start, stop, hot, cold, keys, q_len, k_len, shift, left, right,
    bits_ptr, scale2, cap_scale, scale, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    FUSED: tl.constexpr, TRANSPOSED: tl.constexpr, ONLY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add tiles of queries start … stop - 1 to dk and dv [N, D]; scores are transposed, [N, M].

    In fused mode, MASKED leaves out tiles hot … cold - 1.
    """
    offs_m = tl.arange(0, M)
    skipped = cold - hot if FUSED and MASKED else 0
    for i in tl.range(start, stop - skipped):
        m0 = (tl.where(i < hot, i, i + skipped) if FUSED and MASKED else i) * M
        skip = tl.cast(m0, tl.int64)
        inside = q_len - m0
        q = load_rows(q_base + skip * stride_qt, stride_qt, offs_m, inside, D, D_PAD, MASKED)
        s = scores(k, q, cap_scale, SOFTCAP)
        slope = _slope(s, SOFTCAP)
        if MASKED:
            seen = visible(
                (m0 + offs_m)[None, :], keys[:, None], q_len, k_len, shift, left, right, bits_ptr,
                LEFT, RIGHT, TREE,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        lse = _load_lse(lse_base + skip, offs_m, inside, MASKED)
        p = tl.exp2(s * scale2 - lse[None, :])
        do = load_rows(do_base + skip * stride_dot, stride_dot, offs_m, inside, D, D_PAD, MASKED)
        if ONLY != "dk":
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        if ONLY != "dv":
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            delta = tl.load(delta_base + skip + offs_m, mask=offs_m < inside, other=0.0)
            ds = (p * (dp - delta[None, :]) * slope).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
        if FUSED:
            if TRANSPOSED:
                dq = tl.dot(tl.trans(k), ds, input_precision="ieee")
                rows, cols = offs_m[None, :], tl.arange(0, D_PAD)[:, None]
            else:
                dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
                rows, cols = offs_m[:, None], tl.arange(0, D_PAD)[None, :]
            # The brackets keep a tile's offsets in 32 bits, which halves the registers they need.
            at = dq_base + skip * stride_dqt + (rows * stride_dqt + cols)
            tl.atomic_add(at, scale * dq, mask=(rows < inside) & (cols < D), sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr,
    bits_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_dob, stride_doh, stride_dot,
    stride_dkb, stride_dkh, stride_dkt,
    stride_dvb, stride_dvh, stride_dvt,
    stride_dqb, stride_dqh, stride_dqt,
    stride_lb, stride_lh,
    heads, group, max_k, q_len, k_len, left, right, scale2, cap_scale, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, FUSED: tl.constexpr, TRANSPOSED: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Compute each query head's share of dk and dv, [B, H, S, D], or of the one that ONLY names."""
    blocks = tl.cdiv(max_k, N)
    n0 = tl.program_id(0) % blocks * N
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    q_first, q_len = sequence(batch, cu_q_ptr, q_len, VARLEN)
    k_first, k_len = sequence(batch, cu_k_ptr, k_len, VARLEN)
    if n0 >= k_len:
        return
    shift = 0
    if BOTTOM_RIGHT:
        shift = k_len - q_len
    first, hot, cold, stop = row_tiles(
        n0, q_len, k_len, shift, left, right, M, N, LEFT, RIGHT, TREE
    )
    if TREE:
        bits_ptr += batch * q_len * tl.cdiv(q_len, 32)

    offs_n = tl.arange(0, N)
    keys = n0 + offs_n
    q_row, k_row = q_first.to(tl.int64), (k_first + n0).to(tl.int64)
    k_base = k_ptr + batch * stride_kb + head // group * stride_kh + k_row * stride_kt
    v_base = v_ptr + batch * stride_vb + head // group * stride_vh + k_row * stride_vt
    q_base = q_ptr + batch * stride_qb + head * stride_qh + q_row * stride_qt
    do_base = do_ptr + batch * stride_dob + head * stride_doh + q_row * stride_dot
    dq_base = dq_ptr
    if FUSED:
        dq_base += batch * stride_dqb + head * stride_dqh + q_row * stride_dqt
    lse_base = lse_ptr + batch * stride_lb + head * stride_lh + q_row
    delta_base = delta_ptr + batch * stride_lb + head * stride_lh + q_row
    k = load_rows(k_base, stride_kt, offs_n, k_len - n0, D, D_PAD, True)
    v = load_rows(v_base, stride_vt, offs_n, k_len - n0, D, D_PAD, True)
    dk = tl.zeros([N, D_PAD], tl.float32)
    dv = tl.zeros([N, D_PAD], tl.float32)
    # In fused mode, a third loop would spill registers, so the last does the first's work, too.
    for part in tl.static_range(1 if FUSED else 0, 3):
        if part == 0:
            start, end = first, hot
        elif part == 1:
            start, end = hot, cold
        else:
            start, end = first if FUSED else cold, stop
        dk, dv = _walk_queries(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, dq_base, stride_qt, stride_dot,
            stride_dqt, start, end, hot, cold, keys, q_len, k_len, shift, left, right, bits_ptr,
            scale2, cap_scale, scale, D, D_PAD, M, LEFT, RIGHT, TREE, SOFTCAP, FUSED, TRANSPOSED,
            ONLY, part != 1,
        )  # fmt: skip
    dk_base = dk_ptr + batch * stride_dkb + head * stride_dkh + k_row * stride_dkt
    dv_base = dv_ptr + batch * stride_dvb + head * stride_dvh + k_row * stride_dvt
    if ONLY != "dv":
        store_rows(dk_base, stride_dkt, offs_n, k_len - n0, scale * dk, D, D_PAD)
    if ONLY != "dk":
        store_rows(dv_base, stride_dvt, offs_n, k_len - n0, dv, D, D_PAD)


@triton.jit
def _walk_keys(
    dq, q, do, lse, delta, k_base, v_base, stride_kt, stride_vt,
    start, stop, rows, q_len, k_len, shift, left, right, bits_ptr, scale2, cap_scale,
    D: tl.constexpr, D_PAD: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add tiles of keys start … stop - 1 to dq [M, D]."""
    offs_n = tl.arange(0, N)
    for j in tl.range(start, stop):
        n0 = j * N
        skip = tl.cast(n0, tl.int64)
        k = load_rows(k_base + skip * stride_kt, stride_kt, offs_n, k_len - n0, D, D_PAD, MASKED)
        s = scores(q, k, cap_scale, SOFTCAP)
        slope = _slope(s, SOFTCAP)
        if MASKED:
            keys = (n0 + offs_n)[None, :]
            seen = visible(
                rows[:, None], keys, q_len, k_len, shift, left, right, bits_ptr, LEFT, RIGHT, TREE
            )
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s * scale2 - lse[:, None])
        v = load_rows(v_base + skip * stride_vt, stride_vt, offs_n, k_len - n0, D, D_PAD, MASKED)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None]) * slope).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, bits_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_dob, stride_doh, stride_dot,
    stride_dqb, stride_dqh, stride_dqt,
    stride_lb, stride_lh,
    heads, group, max_q, q_len, k_len, left, right, scale2, cap_scale, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute dq [B, H, T, D] with the forward kernel's loop and a known lse."""
    blocks = tl.cdiv(max_q, M)
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block  # start the longest loops first, as in `forward_kernel`
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
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
    if TREE:
        bits_ptr += batch * q_len * tl.cdiv(q_len, 32)
    q_row, k_row = (q_first + m0).to(tl.int64), k_first.to(tl.int64)
    q_base = q_ptr + batch * stride_qb + head * stride_qh + q_row * stride_qt
    do_base = do_ptr + batch * stride_dob + head * stride_doh + q_row * stride_dot
    k_base = k_ptr + batch * stride_kb + head // group * stride_kh + k_row * stride_kt
    v_base = v_ptr + batch * stride_vb + head // group * stride_vh + k_row * stride_vt
    of_row = batch * stride_lb + head * stride_lh + q_row

    offs_m = tl.arange(0, M)
    inside = q_len - m0
    rows = m0 + offs_m
    q = load_rows(q_base, stride_qt, offs_m, inside, D, D_PAD, True)
    do = load_rows(do_base, stride_dot, offs_m, inside, D, D_PAD, True)
    lse = _load_lse(lse_ptr + of_row, offs_m, inside, True)
    delta = tl.load(delta_ptr + of_row + offs_m, mask=offs_m < inside, other=0.0)
    dq = tl.zeros([M, D_PAD], tl.float32)
    dq = _walk_keys(
        dq, q, do, lse, delta, k_base, v_base, stride_kt, stride_vt, first, hot, rows, q_len,
        k_len, shift, left, right, bits_ptr, scale2, cap_scale, D, D_PAD, N, LEFT, RIGHT, TREE,
        SOFTCAP, True,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse, delta, k_base, v_base, stride_kt, stride_vt, hot, cold, rows, q_len,
        k_len, shift, left, right, bits_ptr, scale2, cap_scale, D, D_PAD, N, LEFT, RIGHT, TREE,
        SOFTCAP, False,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse, delta, k_base, v_base, stride_kt, stride_vt, cold, last + 1, rows, q_len,
        k_len, shift, left, right, bits_ptr, scale2, cap_scale, D, D_PAD, N, LEFT, RIGHT, TREE,
        SOFTCAP, True,
    )  # fmt: skip
    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh + q_row * stride_dqt
    store_rows(dq_base, stride_dqt, offs_m, inside, scale * dq, D, D_PAD)


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    pattern: Pattern,
    grad_lse: Tensor | None = None,
    fused: bool = False,
    config: tuple[Config, Config] | None = None,
    **lengths: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in the dtype and shape of q [B, H, T, D], k and v [B, Hkv, S, D].

    out, lse: the results of `flash_forward` for the same arguments.
    grad_out, grad_lse: their gradients, [B, H, T, D] and [B, H, T] float32.
    If heads share keys, each query head's part of dk and dv is stored in float32 before the sum.
    fused: compute five products instead of seven and sum dq in float32 with atomic additions, which
    makes its last bits differ between runs. Without it, results are bitwise reproducible.
    config: the tiles of the two kernels, first the one for dk and dv.
    Source: Dao, "FlashAttention-2", arXiv 2307.08691.
    """
    if fused and q.shape[3] > FUSED_DIM:
        raise ValueError(
            f"the fused backward supports head dimensions up to {FUSED_DIM}, past which it spills "
            f"registers, got {q.shape[3]}; use fused=False"
        )
    if q.dtype == torch.bfloat16 and device.interpreting():
        wide = flash_backward(
            grad_out.float(), q.float(), k.float(), v.float(), out.float(), lse, pattern=pattern,
            grad_lse=grad_lse, fused=fused, config=config, **lengths,
        )  # fmt: skip
        return wide[0].to(q.dtype), wide[1].to(q.dtype), wide[2].to(q.dtype)
    q, k, v, grad_out = readable(q), readable(k), readable(v), readable(grad_out)
    delta = torch.empty_like(lse)
    dq = new_heads(q)
    if fused:
        dq = torch.zeros_like(dq, dtype=torch.float32)
    group = q.shape[1] // k.shape[1]
    # A program that looped over the heads of a group would spill registers.
    dk, dv = (new_heads(k) if group == 1 else _shares(k, group) for _ in range(2))
    given = arguments(q, k, v, pattern=pattern, **lengths)
    given |= {"do_ptr": grad_out, "lse_ptr": lse, "delta_ptr": delta}
    given |= {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "FUSED": fused}
    given |= strides(given["VARLEN"], do=grad_out, dq=dq, dk=dk, dv=dv, l=lse)
    launch_delta(out, grad_out, grad_lse, delta)
    kind, tree = kind_of(q.device), pattern.tree is not None
    if fused and kind == "ampere":
        kind = "ada"  # its smaller tile leaves registers for dq
    by_keys, by_queries = config or (
        choose(table, kind, q.shape[3], q.dtype, tree=tree) for table in (KEYS, QUERIES)
    )
    # Hopper's and Blackwell's matrix units need 64 rows: dq's M, or transposed its D.
    given["TRANSPOSED"] = fused and kind in ("hopper", "blackwell") and by_keys.m < 64
    programs = triton.cdiv(given["max_k"], by_keys.n) * q.shape[1] * given["sequences"]
    # Where a thread's sums would take over 128 registers, dk and dv take a launch each.
    wide = not fused and 2 * by_keys.n * given["D_PAD"] > 128 * 32 * by_keys.warps
    for only in ("dv", "dk") if wide else (None,):
        launch(dkdv_kernel, programs, q, **given, ONLY=only, **by_keys.options())
    if not fused:
        programs = triton.cdiv(given["max_q"], by_queries.m) * q.shape[1] * given["sequences"]
        launch(dq_kernel, programs, q, **given, **by_queries.options())
    if group > 1:
        dk, dv = (new_heads(k).copy_(x.unflatten(1, (-1, group)).sum(2)) for x in (dk, dv))
    return dq.to(q.dtype), dk, dv


def _shares(k: Tensor, group: int) -> Tensor:
    """Return an empty [B, H, S, D] in float32 for the query heads' shares of a gradient."""
    batch, heads, tokens, dim = k.shape
    shape = (batch, tokens, heads * group, dim)
    return k.new_empty(shape, dtype=torch.float32).transpose(1, 2)
