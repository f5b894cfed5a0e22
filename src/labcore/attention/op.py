"""`flash_attention`: the public door, with the names and layout of torch's own attention.

Letters as in `pattern`.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

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


class Options(TypedDict, total=False):
    """What both functions take by name, besides `return_lse`, which decides what comes back."""

    is_causal: bool
    causal_alignment: Alignment
    scale: float | None
    enable_gqa: bool
    window: Window | None
    softcap: float | None
    backend: Backend


class DenseOptions(Options, total=False):
    """What only `flash_attention` takes."""

    tree: Tensor | None
    attn_mask: Tensor | None
    dropout_p: float


class PackedOptions(Options, total=False):
    """What only `flash_attention_varlen` takes."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Tensor: ...


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T) @ value without holding the T * S scores.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D]; fp16, bf16, fp32 or fp64 (torch form only),
    D up to 256, any strides. H = Hkv unless `enable_gqa`, then H is a multiple of Hkv.
    is_causal: query i sees the keys up to i + shift; causal_alignment: shift is 0 at "top_left"
    (torch) and S - T at "bottom_right" (flash-attn). window: (left, right), query i sees the keys
    i + shift - left … i + shift + right, None for no bound; with is_causal nothing past i + shift.
    scale: D**-0.5 if None. softcap: c turns a score s into c * tanh(s / c); in the kernels a score
    then errs by about 1e-7 c.
    tree: parents, integers [B, T]: the last T keys are the queries, nodes of a tree behind the
    prefix that the other keys are; -1 is a child of the prefix, -2 padding, else an earlier node.
    A node sees the prefix, its ancestors and itself; there is neither is_causal nor window.
    attn_mask: broadcasts to [B, H, T, S]; bool, True where a key is seen, or floating point, added
    to the scores after the softcap. dropout_p: the share of weights dropped, by torch's own
    generator. Either runs `safe_attention`, in O(T * S) memory.
    backend: "triton", "torch" (tiles in plain torch) or "auto", Triton on a GPU that it knows.
    Returns out [B, H, T, D], with return_lse also each row's log-sum-exp of its scores [B, H, T]
    in at least fp32. A row that sees nothing gives zeros, -inf and no gradient. Both results can
    be differentiated, once. Under autocast the three tensors take its dtype.
    Raises ValueError or TypeError for arguments that do not fit, RuntimeError for a second or a
    forward-mode derivative. Sources: Dao et al., 2022, arXiv 2205.14135; Dao, 2023, arXiv
    2307.08691.
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
                "the kernels have neither attn_mask nor dropout_p, got backend='triton' with one; "
                "use backend='auto' or 'torch', or say the mask as is_causal, window or tree"
            )
        if attn_mask is not None:
            check_mask(attn_mask, query, key)
        if pattern.tree is not None and not torch.compiler.is_compiling():
            check_parents(pattern.tree)  # reads values, which would break a graph
        with torch.autocast(autocast_device(query), enabled=False):
            out, lse = safe_attention(
                query, key, value, pattern=pattern, attn_mask=attn_mask, dropout_p=dropout_p
            )
    return (out, lse) if return_lse else out


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PackedOptions],
) -> Tensor: ...


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of sequences of different lengths, packed one behind the other.

    query: [sum of T, H, D]; key, value: [sum of S, Hkv, D].
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each begins, the total last; on a GPU
    their values are trusted. max_seqlen_q, max_seqlen_k: the longest length; None has it found,
    which on a GPU waits for the device. A shift at "bottom_right" is each sequence's own.
    Returns out [sum of T, H, D], with return_lse also lse [H, sum of T]. The rest is
    `flash_attention`'s.
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
