"""What the doors of attention check before anything runs; each error says what to do."""

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
    """The three in autocast's dtype where it is on; float64 stays, as in torch's attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        floating(name, x)
    kind = autocast_device(query)
    if not torch.is_autocast_enabled(kind) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def autocast_device(tensor: Tensor) -> str:
    """The device type whose autocast concerns `tensor`: "cpu" for a meta tensor, which has none."""
    kind = tensor.device.type
    return kind if torch.amp.is_autocast_available(kind) else "cpu"


def no_tangents(name: str, *tensors: Tensor) -> None:
    """Raise where forward-mode derivatives are asked for: an operator of ours would drop them."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative, and jvp or a dual tensor asked for one; use "
            "labcore.attention.safe_attention, or differentiate by backward"
        )


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, packed: bool = False
) -> None:
    """Raise unless the three are [B, H, T, D], or packed [tokens, H, D], and fit each other."""
    form = "[tokens, heads, D]" if packed else "[batch, heads, tokens, D]"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}")
        if x.dtype not in DTYPES or x.dtype != query.dtype or x.device != query.device:
            raise TypeError(
                "query, key and value must share one device and one dtype of float16, bfloat16, "
                f"float32 and float64, got {query.dtype} on {query.device} and for {name} "
                f"{x.dtype} on {x.device}; convert them with .to(query)"
            )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {shapes}")
    if not 1 <= query.shape[-1] <= WIDEST_HEAD or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must share a head dimension D of 1 to {WIDEST_HEAD}, got {shapes}; "
            "use torch's scaled_dot_product_attention for wider heads"
        )
    if not packed and query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have one batch size B, got {shapes}")
    heads, kv_heads = (x.shape[1] for x in (query, key))  # in both forms
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"query and key must have as many heads, got {shapes}; set enable_gqa=True where query "
            "heads share a key head"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the query's heads must be a multiple of the key's, got {heads} and {kv_heads}; "
            "leave out heads or repeat them"
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
    """The pattern of checked arguments; others: is_causal and tree as they are."""
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
            "window must be a tuple (left, right) of whole numbers of at least 0, got "
            f"{window!r}; None is no bound on a side"
        )


def checked_tree(
    tree: Tensor | None, query: Tensor, key: Tensor, *, restricted: bool
) -> Tensor | None:
    """The parents as int32 on the query's device."""
    if tree is None:
        return None
    if restricted:
        raise ValueError(
            "a tree says who sees whom and must come alone, got one with is_causal or window; "
            "leave those out"
        )
    if not isinstance(tree, Tensor) or tree.dtype not in (torch.int32, torch.int64):
        came = tree.dtype if isinstance(tree, Tensor) else type(tree).__name__
        raise TypeError(f"tree must be a tensor of int32 or int64, got {came}")
    batch, _, q_len, _ = query.shape
    if tree.shape != (batch, q_len) or key.shape[2] < q_len:
        raise ValueError(
            "tree must hold a parent for each query, [B, T], and the last T keys must be those of "
            f"its nodes, got tree {tuple(tree.shape)}, query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}"
        )
    return tree.to(device=query.device, dtype=torch.int32)


def check_parents(tree: Tensor) -> None:
    """Raise ValueError for parents that are no tree; on a GPU, where it would wait, nothing."""
    if tree.device.type != "cpu":
        return
    wrong = (tree < -2) | (tree >= torch.arange(tree.shape[1], device=tree.device))
    if not bool(wrong.any()):
        wrong = (tree >= 0) & (tree.gather(1, tree.long().clamp(min=0)) == -2)
    if bool(wrong.any()):
        raise ValueError(
            "tree must hold for each node an earlier node that is no padding, -1 (a child of the "
            f"prefix) or -2 (padding), got {tree.tolist()}; order the nodes so that parents come "
            "first and padding last"
        )


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raise unless a mask can be applied to the scores [B, H, T, S]."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask must be a tensor, bool or floating point, got {came}")
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
    """Raise unless both can be cumulative lengths; their values are read in `library`."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor) or cu.dtype != torch.int32 or cu.device != query.device:
            came = f"{cu.dtype} on {cu.device}" if isinstance(cu, Tensor) else type(cu).__name__
            raise TypeError(f"{name} must be a tensor of int32 on {query.device}, got {came}")
    if cu_q.dim() != 1 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have one shape [sequences + 1], got "
            f"{tuple(cu_q.shape)} and {tuple(cu_k.shape)}"
        )
