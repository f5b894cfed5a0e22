"""Argument checks for the public attention functions; each error says what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from labcore.attention.pattern import Pattern
from labcore.checks import floating, one_of, positive

__all__ = [
    "autocast",
    "autocast_device",
    "check_lengths",
    "check_mask",
    "check_parents",
    "check_tensors",
    "checked_tree",
    "make_pattern",
    "no_tangents",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDEST_HEAD = 256


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the three tensors to autocast's dtype if it's on; float64 stays, as in PyTorch."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        floating(name, x)
    kind = autocast_device(query)
    if not torch.is_autocast_enabled(kind) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def autocast_device(tensor: Tensor) -> str:
    """Return the device type whose autocast applies to `tensor`; meta has none, so it's "cpu"."""
    kind = tensor.device.type
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def no_tangents(name: str, *tensors: Tensor) -> None:
    """Raise RuntimeError if a tensor has a forward-mode tangent, which a custom op would drop."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative, but jvp or a dual tensor needs one; use "
            "labcore.attention.safe_attention, or differentiate with backward()"
        )


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, packed: bool = False
) -> None:
    """Raise unless the tensors are [B, H, T, D], or packed [tokens, H, D], and match each other."""
    form = "[tokens, heads, D]" if packed else "[batch, heads, tokens, D]"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}")
        if x.dtype not in DTYPES or x.dtype != query.dtype or x.device != query.device:
            raise TypeError(
                "query, key and value must share one device and one dtype of float16, bfloat16, "
                f"float32 and float64, got {query.dtype} on {query.device} for query, and for "
                f"{name} {x.dtype} on {x.device}; convert them with .to(query)"
            )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape, got {shapes}")
    if not 1 <= query.shape[-1] <= WIDEST_HEAD or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must share a head dimension D of 1 to {WIDEST_HEAD}, got {shapes}; "
            "use torch's scaled_dot_product_attention for wider heads"
        )
    if not packed and query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch size B, got {shapes}")
    heads, kv_heads = (x.shape[1] for x in (query, key))  # dimension 1 in both layouts
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"query and key must have the same number of heads, got {shapes}; set enable_gqa=True "
            "if query heads share key heads"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the query's heads must be a multiple of the key's, got {heads} and {kv_heads}; "
            "drop or repeat heads"
        )


def make_pattern(
    query: Tensor,
    *,
    causal_alignment: str,
    scale: float | None,
    window: Any,
    softcap: float | None,
    **others: Any,
) -> Pattern:
    """Check the arguments and build the pattern; others: is_causal and tree, passed through."""
    one_of("causal_alignment", causal_alignment, ("top_left", "bottom_right"))
    if softcap is not None:
        positive("softcap", softcap, "leave it out for scores without a cap")
    if window is not None:
        _check_window(window)
    return Pattern(
        scale=query.shape[-1] ** -0.5 if scale is None else float(positive("scale", scale)),
        softcap=None if softcap is None else float(softcap),
        bottom_right=causal_alignment == "bottom_right",
        window=window,
        **others,
    )


def _check_window(window: Any) -> None:
    def fits(bound: Any) -> bool:
        whole = isinstance(bound, int) and not isinstance(bound, bool)
        return bound is None or (whole and bound >= 0)

    if not (isinstance(window, tuple) and len(window) == 2 and all(fits(b) for b in window)):
        raise ValueError(
            "window must be a tuple (left, right) of integers of at least 0, got "
            f"{window!r}; pass None for a side without a bound"
        )


def checked_tree(
    tree: Tensor | None, query: Tensor, key: Tensor, *, restricted: bool
) -> Tensor | None:
    """Return the parents as int32 on the query's device."""
    if tree is None:
        return None
    if restricted:
        raise ValueError(
            "tree can't be combined with is_causal or window, got both; leave out is_causal and "
            "window, because the tree already says which keys a query sees"
        )
    if not isinstance(tree, Tensor) or tree.dtype not in (torch.int32, torch.int64):
        came = tree.dtype if isinstance(tree, Tensor) else type(tree).__name__
        raise TypeError(f"tree must be a tensor of int32 or int64, got {came}")
    batch, _, q_len, _ = query.shape
    if tree.shape != (batch, q_len) or key.shape[2] < q_len:
        raise ValueError(
            "tree must hold a parent for each query, [B, T], and the last T keys must belong to "
            f"its nodes, got tree {tuple(tree.shape)}, query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}"
        )
    return tree.to(device=query.device, dtype=torch.int32)


def check_parents(tree: Tensor) -> None:
    """Raise ValueError for parents that don't form a tree; skipped on a GPU to avoid a sync."""
    if tree.device.type != "cpu":
        return
    wrong = (tree < -2) | (tree >= torch.arange(tree.shape[1], device=tree.device))
    if not bool(wrong.any()):
        wrong = (tree >= 0) & (tree.gather(1, tree.long().clamp(min=0)) == -2)
    if bool(wrong.any()):
        raise ValueError(
            "each parent in tree must be an earlier node that isn't padding, -1 (a child of the "
            f"prefix) or -2 (padding), got {tree.tolist()}; order the nodes so that parents come "
            "first and padding last"
        )


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raise unless a mask can be applied to the scores [B, H, T, S]."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask must be a bool or floating-point tensor, got {came}")
    if mask.device != query.device:
        raise ValueError(
            f"attn_mask must be on the query's device, {query.device}, got {mask.device}; move it "
            "there"
        )
    wanted = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4 and all(
        have in (1, want) for have, want in zip(mask.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to [B, H, T, S] = {wanted}, got {tuple(mask.shape)}"
        )


def check_lengths(cu_q: Tensor, cu_k: Tensor, query: Tensor) -> None:
    """Raise unless both can be cumulative lengths; `library` checks their values."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor) or cu.dtype != torch.int32 or cu.device != query.device:
            came = f"{cu.dtype} on {cu.device}" if isinstance(cu, Tensor) else type(cu).__name__
            raise TypeError(f"{name} must be a tensor of int32 on {query.device}, got {came}")
    if cu_q.dim() != 1 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same shape [sequences + 1], got "
            f"{tuple(cu_q.shape)} and {tuple(cu_k.shape)}"
        )
