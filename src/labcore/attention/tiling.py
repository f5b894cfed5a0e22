"""Device functions of several attention kernels: which tiles to visit, and what to do with one.

See `forward` for the dimension letters.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# Triton must not compile anew for other values of these.
NUMBERS = [
    *("heads", "group", "max_q", "max_k", "q_len", "k_len", "left", "right"),
    *("stride_lb", "stride_lh"),
]


@triton.jit
def sequence(batch, cu_ptr, length, VARLEN: tl.constexpr):
    """First row and length of a sequence; for a packed one, from the cumulative lengths."""
    first = batch * 0
    if VARLEN:
        first = tl.load(cu_ptr + batch)
        length = tl.load(cu_ptr + batch + 1) - first
    return first, length


@triton.jit
def load_rows(base, stride, rows, limit, D: tl.constexpr, D_PAD: tl.constexpr, GUARD: tl.constexpr):
    """Load a tile [rows, D_PAD]; zeros from column D and, if GUARD, from row `limit`."""
    cols = tl.arange(0, D_PAD)
    at = base + rows[:, None] * stride + cols[None, :]
    if GUARD and D < D_PAD:
        return tl.load(at, mask=(rows < limit)[:, None] & (cols < D)[None, :], other=0)
    elif GUARD:
        return tl.load(at, mask=(rows < limit)[:, None], other=0)
    elif D < D_PAD:
        return tl.load(at, mask=(cols < D)[None, :], other=0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, stride, rows, limit, x, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store tile x [rows, D_PAD] up to, but not including, column D and row `limit`."""
    cols = tl.arange(0, D_PAD)
    keep = (rows < limit)[:, None] & (cols < D)[None, :]
    at = base + rows[:, None] * stride + cols[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=keep)


@triton.jit
def visible(
    rows, keys, q_len, k_len, shift, left, right, bits_ptr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Whether queries `rows` see `keys`; the shapes broadcast, such as [M, 1] and [1, N]."""
    seen = keys < k_len
    if RIGHT:
        seen = seen & (keys <= rows + shift + right)
    if LEFT:
        seen = seen & (keys >= rows + shift - left)
    if TREE:
        node = keys - shift  # the last T keys are the T nodes of the tree
        word_ptr = bits_ptr + rows * tl.cdiv(q_len, 32) + (node >> 5)
        word = tl.load(word_ptr, mask=seen & (node >= 0) & (rows < q_len), other=0)
        seen = seen & ((node < 0) | (((word >> (node & 31)) & 1) != 0))
    return seen


@triton.jit
def scores(a, b, cap_scale, SOFTCAP: tl.constexpr):
    """a [M, D] times b [N, D] transposed: [M, N] float32, capped but not yet scaled."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee")
    if SOFTCAP:
        # tanh from exp2, which every target has.
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * cap_scale))
    return s


@triton.jit
def softmax_step(s, peak, total, scale2, MASKED: tl.constexpr):
    """Return the weights of scores s [M, N], a factor for earlier sums, and the new peak and total.

    peak [M] is the largest scale2 * s so far; the weights are 2^(scale2 * s - new peak), and total
    [M] sums them over all tiles. When the peak grows, earlier sums shrink by 2^(peak - new peak),
    which is 0 for a row's first keys. scale2 must be positive.
    """
    # scale2 includes log2(e), so the softmax's exponential is one multiply-add and one exp2.
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale2)
    safe = new_peak
    if MASKED:  # a row may have seen nothing yet, and -inf - -inf is NaN
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(s * scale2 - safe[:, None])
    shrink = tl.exp2(peak - safe)
    return p, shrink, new_peak, total * shrink + tl.sum(p, 1)


@triton.jit
def tiles(
    m0, m1, k_len, q_len, shift, left, right,
    N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Tiles of keys that rows m0 … m1 - 1 see: (first, hot, cold, last).

    Tiles hot … cold - 1 need no mask; the others in first … last do. `last` is at least `first`,
    so rows that see no key still process one tile.
    """
    begin, end = 0, k_len  # keys that some row sees
    whole_begin, whole_end = 0, k_len  # keys that every row sees
    if RIGHT:
        end = tl.maximum(tl.minimum(end, m1 + shift + right), 0)
        whole_end = tl.minimum(whole_end, m0 + shift + right + 1)
    if LEFT:
        begin = tl.minimum(tl.maximum(begin, m0 + shift - left), end)
        whole_begin = tl.maximum(whole_begin, m1 - 1 + shift - left)
    if TREE:
        whole_end = tl.minimum(whole_end, k_len - q_len)
    first = begin // N
    last = tl.maximum(tl.cdiv(end, N) - 1, first)
    # The first tile always gets a mask.
    hot = tl.minimum(tl.maximum(tl.cdiv(whole_begin, N), first + 1), last + 1)
    cold = tl.minimum(tl.maximum(whole_end, 0) // N, last + 1)
    return first, hot, tl.maximum(cold, hot), last
