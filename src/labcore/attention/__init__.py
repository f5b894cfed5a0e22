"""FlashAttention, from textbook softmax attention to the Triton kernels.

`reference` stores all scores, `online` works tile by tile in plain PyTorch, and `forward` and
`backward` are the kernels. `flash_attention` is the public function that selects among them. To
use it in a model, pass `functools.partial(flash_attention, is_causal=True, enable_gqa=True)`;
`huggingface.register` makes it an attention function of transformers.
"""

from labcore.attention import huggingface, traffic
from labcore.attention.kv_codes import quantize_kv
from labcore.attention.online import merge_states, tiled_backward, tiled_forward
from labcore.attention.op import flash_attention, flash_attention_varlen
from labcore.attention.paged import paged_attention
from labcore.attention.pattern import Pattern, allowed, tree_bits
from labcore.attention.reference import naive_attention, safe_attention

__all__ = [
    "Pattern",
    "allowed",
    "flash_attention",
    "flash_attention_varlen",
    "huggingface",
    "merge_states",
    "naive_attention",
    "paged_attention",
    "quantize_kv",
    "safe_attention",
    "tiled_backward",
    "tiled_forward",
    "traffic",
    "tree_bits",
]
