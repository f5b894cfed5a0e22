"""The public attention functions, with the argument names and layout of PyTorch's attention.

See `pattern` for the dimension letters.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from labcore.attention import library
from labcore.attention.arguments import (
    autocast,
    autocast_device,
    check_lengths,
    check_mask,
    check_parents,
    check_tensors,
    checked_tree,
    make_pattern,
    no_tangents,
)
from labcore.attention.pattern import Pattern
from labcore.attention.reference import safe_attention
from labcore.checks import fraction, one_of, positive_int
from labcore.device import Backend

__all__ = ["flash_attention", "flash_attention_varlen"]

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    tree: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | Any:  # a pair if return_lse
    """Compute softmax(scale * query @ key^T) @ value without storing the T * S scores.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D]; fp16, bf16, fp32 or fp64 (PyTorch backend
    only), D up to 256, any strides. H = Hkv; with `enable_gqa`, H may be a multiple of Hkv.
    is_causal: query i sees the keys up to i + shift.
    causal_alignment: shift is 0 for "top_left" (PyTorch) and S - T for "bottom_right" (flash-attn).
    window: (left, right); query i sees the keys i + shift - left … i + shift + right. None means
    no bound on that side. With is_causal, no query sees past i + shift.
    scale: D**-0.5 if None. softcap: c turns a score s into c * tanh(s / c). In the kernels, this
    adds an error of about 1e-7 c to a score.
    tree: parents, integers [B, T]. The last T keys belong to the queries, which are the nodes of a
    tree; the keys before them are its prefix. A parent is an earlier node, -1 for a child of the
    prefix or -2 for padding. A node sees the prefix, its ancestors and itself. Can't be combined
    with is_causal or window.
    attn_mask: broadcasts to [B, H, T, S]. A bool mask is True where a key is seen; a floating-point
    mask is added to the scores after the softcap. dropout_p: the fraction of weights dropped, drawn
    with PyTorch's default generator. Either one runs `safe_attention`, in O(T * S) memory.
    backend: "triton", "torch" (tiles in plain PyTorch) or "auto" (Triton on a supported GPU).
    Returns out [B, H, T, D] and, with return_lse, the log-sum-exp of each row's scores, [B, H, T]
    in at least fp32. A row that sees no key gets zeros, -inf and no gradient. Both results are
    differentiable once. Under autocast, query, key and value are cast to its dtype.
    Raises ValueError or TypeError for invalid arguments, and RuntimeError for a second derivative
    or a forward-mode derivative.
    Sources: Dao et al., 2022, arXiv 2205.14135; Dao, 2023, arXiv 2307.08691.
    """
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, enable_gqa=enable_gqa)
    pattern = make_pattern(
        query,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        window=window,
        softcap=softcap,
        tree=checked_tree(tree, query, key, restricted=is_causal or window is not None),
    )
    one_of("backend", backend, ("auto", "triton", "torch"))
    fraction("dropout_p", dropout_p)
    if attn_mask is None and not dropout_p:
        out, lse = _call(query, key, value, pattern, backend=backend)
    else:
        if backend == "triton":
            raise ValueError(
                "the kernels support neither attn_mask nor dropout_p, got backend='triton' with "
                "one; use backend='auto' or 'torch', or express the mask as is_causal, window or "
                "tree"
            )
        if attn_mask is not None:
            check_mask(attn_mask, query, key)
        if pattern.tree is not None and not torch.compiler.is_compiling():
            check_parents(pattern.tree)  # reads values, which would cause a graph break
        with torch.autocast(autocast_device(query), enabled=False):
            out, lse = safe_attention(
                query, key, value, pattern=pattern, attn_mask=attn_mask, dropout_p=dropout_p
            )
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | Any:  # a pair if return_lse
    """Run `flash_attention` on sequences of different lengths, packed one after another.

    query: [sum of T, H, D]; key, value: [sum of S, Hkv, D].
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1]: the start of each sequence, then the total.
    Their values aren't checked on a GPU.
    max_seqlen_q, max_seqlen_k: the longest length; None computes it, which synchronizes with a GPU.
    With "bottom_right", each sequence has a separate shift.
    Returns out [sum of T, H, D] and, with return_lse, lse [H, sum of T]. See `flash_attention` for
    the other arguments.
    """
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, enable_gqa=enable_gqa, packed=True)
    check_lengths(cu_seqlens_q, cu_seqlens_k, query)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None:
            positive_int(name, longest)
    one_of("backend", backend, ("auto", "triton", "torch"))
    pattern = make_pattern(
        query,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        scale=scale,
        window=window,
        softcap=softcap,
        tree=None,
    )
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, lse = _call(
        query,
        key,
        value,
        pattern,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        backend=backend,
    )
    packed = out[0].transpose(0, 1)
    return (packed, lse[0]) if return_lse else packed


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    backend: str,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    no_tangents("flash_attention", query, key, value)
    settings = library.Settings(
        tree=pattern.tree,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=max_q,
        max_k=max_k,
        scale=pattern.scale,
        softcap=pattern.softcap,
        is_causal=pattern.is_causal,
        bottom_right=pattern.bottom_right,
        left=pattern.left,
        right=pattern.right,
        backend=backend,
    )
    out, lse = library.forward(query, key, value, *settings)
    return out, lse
