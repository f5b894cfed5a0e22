"""The weights of one block in the fused form.

Letters: H attention heads, Hkv key and value heads, G = H / Hkv, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from labcore.models.llama import Llama
from labcore.models.packed import PackedMatrix

__all__ = ["FusedLayer", "normed_gain"]


class FusedLayer:
    """One block's weights. Each norm's gain also divides by the scale of the matrix after it."""

    def __init__(self, model: Llama, index: int) -> None:
        config = model.config
        source: Any = model.layers[index]
        heads, kv, size = config.num_attention_heads, config.kv_heads, config.head_size
        attention, mlp = source.self_attn, source.mlp
        # Inside a head, pair (i, i + D / 2) becomes adjacent, as a complex number. Query heads are
        # ordered by their index in the group first, so attention's output needs no rearranging.
        pairs = torch.arange(size).view(2, size // 2).T.flatten()
        order = torch.arange(heads).view(kv, heads // kv).T.flatten()
        every = torch.arange(heads * size).view(heads, size)
        queries, keys = every[order][:, pairs].flatten(), every[:kv][:, pairs].flatten()
        rows = (
            (attention.q_proj, queries),
            (attention.k_proj, keys),
            (attention.v_proj, slice(None)),
        )
        biases = [projection.bias[chosen] for projection, chosen in rows if config.qkv_bias]
        self.qkv = PackedMatrix(
            torch.cat([projection.weight[chosen] for projection, chosen in rows]),
            torch.cat(biases) if biases else None,
        )
        self.out = PackedMatrix(attention.o_proj.weight[:, every[order].flatten()])
        self.out_bias = attention.o_proj.bias.clone() if config.output_bias else None
        self.gate_up = PackedMatrix(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self.down = PackedMatrix(mlp.down_proj.weight)
        self.before_attention = normed_gain(source.input_layernorm.weight, self.qkv.scale)
        self.before_mlp = normed_gain(source.post_attention_layernorm.weight, self.gate_up.scale)

    def matrices(self) -> tuple[PackedMatrix, ...]:
        """Return all of the block's matrices."""
        return self.qkv, self.out, self.gate_up, self.down


def normed_gain(weight: Tensor, scale: float) -> Tensor:
    """Return the factors for a unit-length vector that apply RMSNorm and undo a matrix's scale."""
    return weight * (math.sqrt(weight.numel()) / scale)
