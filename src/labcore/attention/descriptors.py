"""The forward kernel for Hopper and newer GPUs, whose tiles are copied by tensor descriptors.

A descriptor holds the shape and strides of a tensor. The GPU's tensor memory accelerator (TMA)
copies a whole tile by it, with zeros past the edge, so the loop over keys computes no address.
The registers that this frees make room for tiles of 128 keys. Without a mask, a program stays on
its multiprocessor and takes one block of queries after another, by a fixed assignment. Under a
causal mask blocks take different times, so each gets a program of its own, and the GPU gives the
next one to a multiprocessor that is free. Letters are those of `forward`, but D is the padded head
dimension, since a descriptor knows the true one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from labcore.attention.configs import DESCRIBED, Config, padded
from labcore.attention.launch import LOG2E, launch
from labcore.attention.pattern import Pattern
from labcore.attention.tiling import LN2, softmax_step

CACHED = 32 << 20  # bytes of keys and values that stay in the L2 cache beside everything else
# No recompilation if one of these is 1 or a multiple of 16.
NUMBERS = ["all_heads", "heads", "group", "section", "q_len", "k_len", "shift"]


@triton.jit
def place(item, blocks, section, all_heads, LONGEST_FIRST: tl.constexpr):
    """Return the block of queries and the head, counted over the batch, of an item of work.

    A section of heads comes before the next, so that its keys stay in the L2 cache. Within it,
    every head's longest block comes first. Of P programs, program p takes items p, p + P, p + 2P
    and so on. That evens out the work of blocks that take the same time: see `traffic.busy_share`.
    """
    first = item // (section * blocks) * section
    count = tl.minimum(section, all_heads - first)
    within = item - first * blocks
    block = within // count
    if LONGEST_FIRST:
        block = blocks - 1 - block
    return block, first + within % count


@triton.jit
def walk_described(
    acc, peak, total, q, k_desc, v_desc, batch, kv_head, start, stop, last_seen, k_len, scale2,
    D: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys from `start` up to `stop` to the running softmax.

    last_seen [M]: the last key that each query sees. As compiled for Hopper, a warp waits for both
    products before each softmax, so a softmax overlaps only with the products of other warps.
    """
    for begin in tl.range(start, stop, N):
        k = k_desc.load([batch, kv_head, begin, 0]).reshape([N, D])  # from [1, 1, N, D]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            keys = begin + tl.arange(0, N)
            seen = (keys < k_len)[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= last_seen[:, None])
            s = tl.where(seen, s, float("-inf"))
        weights, shrink, peak, total = softmax_step(s, peak, total, scale2, MASKED)
        v = v_desc.load([batch, kv_head, begin, 0]).reshape([N, D])
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=NUMBERS)
def described_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr,
    all_heads, heads, group, section, q_len, k_len, shift, scale2,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute out and a contiguous lse [B, H, T], with no mask or a causal one.

    section: how many heads to finish before the next ones. shift: query i sees the keys up to
    i + shift; it may be negative.
    """
    blocks = tl.cdiv(q_len, M)
    for item in tl.range(tl.program_id(0), all_heads * blocks, tl.num_programs(0)):
        block, flat_head = place(item, blocks, section, all_heads, CAUSAL)
        batch, head = flat_head // heads, flat_head % heads
        m0 = block * M
        # Tiles before `unmasked` are seen whole by every query of the block.
        unmasked, stop = k_len // N * N, k_len
        if CAUSAL:
            unmasked = tl.maximum(tl.minimum(unmasked, (m0 + shift + 1) // N * N), 0)
            stop = tl.maximum(tl.minimum(stop, m0 + M + shift), unmasked)
        rows = m0 + tl.arange(0, M)
        q = q_desc.load([batch, head, m0, 0]).reshape([M, D])
        acc = tl.zeros([M, D], tl.float32)
        peak = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc, peak, total = walk_described(
            acc, peak, total, q, k_desc, v_desc, batch, head // group, 0, unmasked, rows + shift,
            k_len, scale2, D, N, CAUSAL, False,
        )  # fmt: skip
        acc, peak, total = walk_described(
            acc, peak, total, q, k_desc, v_desc, batch, head // group, unmasked, stop, rows + shift,
            k_len, scale2, D, N, CAUSAL, True,
        )  # fmt: skip
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        out = (acc / total[:, None]).to(out_desc.dtype)
        out_desc.store([batch, head, m0, 0], out.reshape([1, 1, M, D]))
        lse = tl.where(empty, float("-inf"), peak * LN2 + tl.log(total))
        at = tl.cast(flat_head, tl.int64) * q_len + rows
        tl.store(lse_ptr + at, lse, mask=rows < q_len)


def suits(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kind: str) -> bool:
    """Return whether this kernel takes a call on a kind of GPU; see `configs`.

    It takes 16 bits, D up to 128, no mask or a causal one, and rows that start at multiples of
    16 bytes.
    """
    return (
        kind in ("hopper", "blackwell")
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] <= max(DESCRIBED)
        and q.shape[3] % 8 == 0  # the result's rows, too, must start at multiples of 16 bytes
        and pattern.left is None
        and pattern.right in (None, 0)
        and pattern.softcap is None
        and pattern.tree is None
        and all(_describable(x) for x in (q, k, v))
    )


def _describable(x: Tensor) -> bool:
    """Return whether the address and strides of `x` [B, H, T, D] are multiples of 16 bytes."""
    steps = (stride * x.element_size() for stride in x.stride()[:3])
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def described_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    pattern: Pattern,
    config: Config | None = None,
) -> None:
    """Fill out and lse, which are new; the other arguments are as in `forward.flash_forward`."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    columns = padded(head_dim)
    config = config or DESCRIBED[max(64, columns)]
    group, tiles = heads // kv_heads, triton.cdiv(q_len, config.m) * batch * heads
    fit = CACHED // (2 * k_len * columns * k.element_size())
    causal = pattern.right is not None
    programs = 4  # for the interpreter
    if causal:
        programs = tiles
    elif q.is_cuda:
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count

    def described(x: Tensor, rows: int) -> Any:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])

    launch(
        described_kernel,
        min(programs, tiles),
        q,
        q_desc=described(q, config.m),
        k_desc=described(k, config.n),
        v_desc=described(v, config.n),
        out_desc=described(out, config.m),
        lse_ptr=lse,
        all_heads=batch * heads,
        heads=heads,
        group=group,
        section=min(batch * heads, group * max(1, fit)),
        q_len=q_len,
        k_len=k_len,
        shift=pattern.shift(q_len, k_len),
        scale2=LOG2E * pattern.scale,
        D=columns,
        CAUSAL=causal,
        **config.options(),
    )
