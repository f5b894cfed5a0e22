"""One block in the fused form: its weights and what they do to rows.

Letters: R rows, C hidden_size, H attention heads, Hkv key and value heads, G = H / Hkv, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labcore.models.config import LlamaConfig
from labcore.models.llama import inverse_frequencies
from labcore.models.packed import PackedMatrix

__all__ = ["FusedLayer", "Norm", "Turns"]


class Norm:
    """RMSNorm in four calls, because PyTorch's takes twice as long on a CPU.

    scale: of the matrix that reads the result, which the norm's gain undoes.
    """

    def __init__(self, norm: Any, config: LlamaConfig, scale: float = 1.0) -> None:
        self.gain: Tensor = norm.weight * (math.sqrt(config.hidden_size) / scale)
        # rms(x)**2 + eps = (|x|**2 + C eps) / C
        self._floor = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed x, fp32 [R, C]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self._floor)).mul_(self.gain)


class FusedLayer:
    """One block's weights.

    attention, mlp: have the projections. before_attention, before_mlp: RMSNorms.
    """

    def __init__(
        self, config: LlamaConfig, attention: Any, mlp: Any, before_attention: Any, before_mlp: Any
    ) -> None:
        heads, kv, size = config.num_attention_heads, config.kv_heads, config.head_size
        # Inside a head, pair (i, i + D / 2) becomes adjacent, as a complex number. Query heads are
        # ordered by their index in the group first, so attention's output needs no rearranging.
        pairs = torch.arange(size).view(2, size // 2).T.flatten()
        order = torch.arange(heads).view(kv, heads // kv).T.flatten()
        every = torch.arange(heads * size).view(heads, size)
        queries, keys = every[order][:, pairs].flatten(), every[:kv][:, pairs].flatten()
        rows: tuple[tuple[nn.Linear, Any], ...] = (
            (attention.q_proj, queries),
            (attention.k_proj, keys),
            (attention.v_proj, slice(None)),
        )
        biases = [one.bias[chosen] for one, chosen in rows if one.bias is not None]
        self.qkv = PackedMatrix(
            torch.cat([one.weight[chosen] for one, chosen in rows]),
            torch.cat(biases) if biases else None,
        )
        out, bias = attention.o_proj, attention.o_proj.bias
        self.out = PackedMatrix(out.weight[:, every[order].flatten()])
        self.out_bias = None if bias is None else bias.clone()
        self.gate_up = PackedMatrix(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self.down = PackedMatrix(mlp.down_proj.weight)
        self.before_attention = Norm(before_attention, config, self.qkv.scale)
        self.before_mlp = Norm(before_mlp, config, self.gate_up.scale)

    def __call__(self, x: Tensor, turns: Tensor, attend: Callable[[Tensor], Tensor]) -> None:
        """Change x, fp32 [R, C], in place.

        turns: complex [R, (H + 2 Hkv) D / 2]. attend: from rotated qkv [R, (H + 2 Hkv) D], queries
        ordered [G, Hkv, D], to [R, H D].
        """
        qkv = self.qkv(self.before_attention(x))
        qkv.view(torch.complex64).mul_(turns)
        x.add_(self.out(attend(qkv)), alpha=1 / self.out.scale)
        if self.out_bias is not None:
            x.add_(self.out_bias)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=1)
        x.add_(self.down(nn.functional.silu(gate) * up), alpha=1 / self.down.scale)

    def matrices(self) -> tuple[PackedMatrix, ...]:
        """Return all of the block's matrices."""
        return self.qkv, self.out, self.gate_up, self.down


class Turns:
    """The rotations of qkv at each position, in a table that grows."""

    def __init__(self, config: LlamaConfig) -> None:
        self._frequencies = inverse_frequencies(config)
        self._turning, self._still = config.num_attention_heads + config.kv_heads, config.kv_heads
        self._table = torch.empty(0, 0, dtype=torch.complex64)

    def up_to(self, positions: int) -> Tensor:
        """Return cos + i sin for at least `positions`, 1 for values: [.., (H + 2 Hkv) D / 2]."""
        if positions > len(self._table):
            longer = max(positions, 2 * len(self._table), 256)
            angles = torch.arange(longer).float()[:, None] * self._frequencies
            turns = torch.complex(angles.cos(), angles.sin()).repeat(1, self._turning)
            ones = torch.ones(longer, self._still * self._frequencies.numel())
            self._table = torch.cat((turns, ones), 1)
        return self._table
