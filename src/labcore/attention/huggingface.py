"""The kernels as an attention function of Hugging Face's `transformers`, from release 5.17.

Call `register()`, and then load or build a model with `attn_implementation="labcore"`.
Letters: B batch, H query heads, Hkv key and value heads, T queries, S keys, D head dimension.
Source: https://huggingface.co/docs/transformers/attention_interface.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from labcore.attention.op import flash_attention, flash_attention_varlen
from labcore.device import Backend

__all__ = ["NAME", "attention_function", "padding_mask", "register"]

# Without "flash": transformers takes every name with that word for the flash-attn package.
NAME = "labcore"
# Keyword arguments that change the result, which some models and the paged cache pass.
UNSUPPORTED = ("s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "block_table")


def register(*, backend: Backend = "auto") -> str:
    """Register `attention_function` with transformers, and return its name, "labcore".

    backend: as in `flash_attention`. A second call replaces the first.
    Raises ImportError without transformers.
    """
    import transformers

    function = functools.partial(attention_function, backend=backend)
    transformers.AttentionInterface.register(NAME, function)
    transformers.AttentionMaskInterface.register(NAME, padding_mask)
    return NAME


def padding_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,  # noqa: ARG001
) -> Tensor | None:
    """Return a bool mask [B, S] of the keys that aren't padding, or None without padding.

    transformers calls this function once per forward pass, and passes the result to
    `attention_function`. The causal mask and the window aren't part of it.
    attention_mask: bool [B, tokens seen so far]. q_offset, kv_offset: the positions of the first
    query and of the first key. local_size: the width of a window or of a chunk. The other arguments
    of transformers aren't read.
    Raises ValueError for a mask that the kernels don't compute, or for padding inside a sequence.
    """
    if not allow_is_causal_skip or local_size not in (
        None,
        getattr(config, "sliding_window", None),
    ):
        raise ValueError(
            f"attn_implementation={NAME!r} computes causal attention with an optional sliding "
            "window, but the model needs another mask (bidirectional, chunked, packed sequences or "
            "a static cache); use attn_implementation='sdpa'"
        )
    # A static cache's empty slots come after the last query.
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"attn_implementation={NAME!r} needs the last key to belong to the last query, got "
            f"{q_length} queries from position {q_offset} and {kv_length} keys from position "
            f"{kv_offset}; use cache_implementation='dynamic'"
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, -kv_length:]
    if real.all():
        return None
    if (real.int().diff().abs().sum(1) > 1).any():
        raise ValueError(
            f"attn_implementation={NAME!r} needs the padding of a row on one side of its tokens, "
            f"got attention_mask {attention_mask.int().tolist()}; pad on the left for generation"
        )
    return real


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    backend: Backend = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention with `flash_attention`, with the arguments of transformers.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D], where S counts the keys of the cache as well.
    attention_mask: the result of `padding_mask`.
    sliding_window: a query sees that many keys, including its own. is_causal: default
    `module.is_causal`, or True if the module doesn't say. The last key belongs to the last query.
    Returns out [B, T, H, D] and None in place of the weights, which aren't stored. A query that is
    padding gets zeros. Gradients flow to query, key and value.
    Raises ValueError for dropout, a 4-dimensional mask and arguments that `flash_attention` lacks.
    """
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout, got dropout={dropout}; set the config's "
            "attention_dropout to 0 or call model.eval()"
        )
    found = [name for name in UNSUPPORTED if others.get(name) is not None]
    if found or (attention_mask is not None and attention_mask.dim() != 2):
        what = found or f"an attention mask of shape {tuple(attention_mask.shape)}"  # type: ignore[union-attr]
        raise ValueError(
            f"attn_implementation={NAME!r} doesn't support {what}; pass attention_mask as [B, S] "
            "or use attn_implementation='sdpa'"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "is_causal": causal,
        "causal_alignment": "bottom_right",
        "scale": scaling,
        "enable_gqa": True,
        "window": None if sliding_window is None else (sliding_window - 1, None),
        "softcap": softcap,
        "backend": backend,
    }
    if attention_mask is None:
        return flash_attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    return _without_padding(query, key, value, attention_mask, options), None


def _without_padding(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor, options: dict[str, Any]
) -> Tensor:
    """Pack the tokens that aren't padding, attend, and return out [B, T, H, D].

    real: bool [B, S]. Packing changes no distance, because the padding is on one side.
    """
    real_queries = real[:, -query.shape[2] :]
    ends = (torch.nn.functional.pad(x.sum(1).cumsum(0), (1, 0)).int() for x in (real_queries, real))
    packed = (
        x.transpose(1, 2)[mask] for x, mask in ((query, real_queries), (key, real), (value, real))
    )
    done = flash_attention_varlen(*packed, *ends, **options)
    out = done.new_zeros(query.transpose(1, 2).shape)
    out[real_queries] = done
    return out
