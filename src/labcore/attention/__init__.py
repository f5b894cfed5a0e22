"""FlashAttention: the rungs from softmax attention as it is written to the Triton kernels.

`reference` holds all scores, `online` goes tile by tile in plain torch, `forward` and `backward`
are the kernels, and `flash_attention` is the door to all of them. A model takes it as
`functools.partial(flash_attention, is_causal=True, enable_gqa=True)`.
"""

from labcore.attention import traffic
from labcore.attention.online import merge, tiled_backward, tiled_forward
from labcore.attention.op import flash_attention, flash_attention_varlen
from labcore.attention.paged import paged_attention
from labcore.attention.pattern import Pattern, allowed, tree_bits
from labcore.attention.reference import naive_attention, safe_attention

__all__ = [
    "Pattern",
    "allowed",
    "flash_attention",
    "flash_attention_varlen",
    "merge",
    "naive_attention",
    "paged_attention",
    "safe_attention",
    "tiled_backward",
    "tiled_forward",
    "traffic",
    "tree_bits",
]
