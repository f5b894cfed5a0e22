"""What attention kernels are launched with: new results, strides, lengths, the pattern's numbers.

All implementations, with or without a kernel, store their results as `new_heads` and `new_lse` do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labcore.attention.configs import padded
from labcore.attention.pattern import Pattern, tree_bits

__all__ = ["arguments", "launch", "new_heads", "new_lse", "readable", "strides"]

LOG2E = math.log2(math.e)
LONGEST_ROW = 1 << 23  # elements, so that the offsets of a tile's 256 rows fit in 31 bits


def new_heads(like: Tensor) -> Tensor:
    """Return an empty [B, H, T, D] with the dtype and device of `like`, stored as [B, T, H, D].

    With this layout, joining the heads with `.transpose(1, 2).flatten(2)` copies nothing.
    """
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def new_lse(query: Tensor) -> Tensor:
    """Return an empty contiguous log-sum-exp [B, H, T], at least fp32, for `query` [B, H, T, D]."""
    return query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


def readable(x: Tensor) -> Tensor:
    """Return `x` [B, H, T, D], copied unless columns are adjacent and rows not too far apart."""
    return x if x.stride(3) == 1 and x.stride(2) < LONGEST_ROW else x.contiguous()


def strides(packed: bool, **tensors: Tensor) -> dict[str, int]:
    """Return strides of tensors [B, H, T, …] by kernel argument: stride_qb, stride_qh, stride_qt.

    packed: the batch stride is 0, because packed sequences differ only in where they begin.
    """
    named = {}
    for name, x in tensors.items():
        of_batch = 0 if packed else x.stride(0)
        for axis, stride in zip("bht", (of_batch, x.stride(1), x.stride(2)), strict=True):
            named[f"stride_{name}{axis}"] = stride
    return named


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> dict[str, Any]:
    """Return the arguments that the forward and backward kernels share, by the kernels' names.

    q [B, H, T, D], k and v [B, Hkv, S, D] as returned by `readable`. Packed sequences are views
    [1, H, total, D]; cu_q and cu_k, int32 [sequences + 1], say where each begins, and max_q and
    max_k are the longest lengths.
    """
    left, right = pattern.left, pattern.right
    cap = pattern.softcap
    packed = cu_q is not None
    return strides(packed, q=q, k=k, v=v) | {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "cu_q_ptr": None if cu_q is None else cu_q.contiguous(),
        "cu_k_ptr": None if cu_k is None else cu_k.contiguous(),
        "sequences": q.shape[0] if cu_q is None else len(cu_q) - 1,
        "bits_ptr": None if pattern.tree is None else tree_bits(pattern.tree),
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "max_q": q.shape[2] if max_q is None else max_q,
        "max_k": k.shape[2] if max_k is None else max_k,
        "q_len": q.shape[2],
        "k_len": k.shape[2],
        "left": 0 if left is None else left,
        "right": 0 if right is None else right,
        # exp(scale * s) is 2^(scale2 * s). A cap's tanh(x) is 1 - 2 / (1 + 2^(2 x log2(e))).
        "scale": pattern.scale,
        "scale2": LOG2E * (pattern.scale if cap is None else cap),
        "cap_scale": 0.0 if cap is None else 2 * LOG2E * pattern.scale / cap,
        "D": q.shape[3],
        "D_PAD": padded(q.shape[3]),
        "LEFT": left is not None,
        "RIGHT": right is not None or pattern.tree is not None,
        "BOTTOM_RIGHT": pattern.bottom_right or pattern.tree is not None,
        "TREE": pattern.tree is not None,
        "SOFTCAP": cap is not None,
        "VARLEN": packed,
    }


def launch(kernel: Any, programs: int, where: Tensor, **given: Any) -> None:
    """Run `programs` programs of `kernel` on the device of `where`, dropping unknown arguments."""
    known = {*kernel.arg_names, "num_warps", "num_stages"}
    # The interpreter uses NumPy, which would warn about inf - inf; a GPU doesn't.
    with torch.cuda.device_of(where), np.errstate(all="ignore"):
        kernel[(programs,)](**{name: value for name, value in given.items() if name in known})
