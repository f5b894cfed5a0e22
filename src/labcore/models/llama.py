"""The decoder-only transformer of Llama, SmolLM2, TinyLlama and Qwen2 checkpoints.

Letters: B rows, T tokens, C hidden_size, H attention heads, Hkv key and value heads, D head_dim,
V vocab_size, N nodes of a tree. Modules have the same names as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.models.cache import StepCache, tree_mask
from labcore.models.config import LlamaConfig

__all__ = [
    "Attention",
    "Llama",
    "LlamaOutput",
    "RMSNorm",
    "apply_rotary",
    "causal_attention",
    "inverse_frequencies",
]

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run PyTorch's causal attention on q [B, H, T, D] and k, v [B, Hkv, T, D]: [B, H, T, D]."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, with the mean in at least fp32.

    Source: Zhang and Sennrich, 2019, arXiv 1910.07467.
    """

    def __init__(
        self, size: int, eps: float, *, device: object = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] of any floating dtype; return the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def inverse_frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Return the radians per token of each rotated pair, with Llama 3's scaling: fp32 [D / 2].

    Source: Su et al., 2021, arXiv 2104.09864, with Llama 3.1's scaling.
    """
    steps = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
    plain = 1.0 / config.rope_theta**steps
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_position_embeddings / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair x[..., i], x[..., i + D / 2] by its angle.

    x: [B, H, T, D]; cos, sin: [B, 1, T, D / 2] in x's dtype. Returns [B, H, T, D].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The data that all layers of one forward share."""

    cos: Tensor  # [B, 1, T, D / 2]
    sin: Tensor
    counts: Tensor | None  # int32 [B], only with a cache
    cache: StepCache | None
    tree: Tensor | None  # int32 [B, N]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, computed by the KV cache or `attention`."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        attention: AttentionFunction,
        *,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.attention, self.head_dim = layer, attention, config.head_size
        width, made = config.hidden_size, {"device": device, "dtype": dtype}
        queries = config.num_attention_heads * config.head_size
        keys = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias, **made)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias, **made)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias, **made)
        self.o_proj = nn.Linear(queries, width, bias=config.output_bias, **made)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, T, D]

    def forward(self, x: Tensor, step: _Step) -> Tensor:
        """Apply attention to x [B, T, C]; return [B, T, C]."""
        q = apply_rotary(self._heads(self.q_proj(x)), step.cos, step.sin)
        k = apply_rotary(self._heads(self.k_proj(x)), step.cos, step.sin)
        v = self._heads(self.v_proj(x))
        if step.cache is None or step.counts is None:
            mixed = self.attention(q, k, v)
        else:
            step.cache.write(self.layer, k, v, step.counts)
            mixed = step.cache.attend(self.layer, q, step.counts, step.tree)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer, 2020, arXiv 2002.05202."""

    def __init__(self, config: LlamaConfig, **made: object) -> None:
        super().__init__()
        narrow, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(narrow, wide, bias=False, **made)
        self.up_proj = nn.Linear(narrow, wide, bias=False, **made)
        self.down_proj = nn.Linear(wide, narrow, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(
        self, config: LlamaConfig, layer: int, attention: AttentionFunction, **made: object
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, **made)  # type: ignore[arg-type]
        self.self_attn = Attention(config, layer, attention, **made)  # type: ignore[arg-type]
        self.post_attention_layernorm = RMSNorm(width, eps, **made)  # type: ignore[arg-type]
        self.mlp = _SwiGLU(config, **made)

    def forward(self, x: Tensor, step: _Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaOutput:
    """The output of a forward pass, where logits = head(hidden).

    logits: [B, T, V]. hidden: [B, T, C], after the final norm.
    """

    logits: Tensor
    hidden: Tensor


class Llama(nn.Module):
    """A decoder-only transformer of the Llama family.

    attention: a causal `f(q [B, H, T, D], k [B, Hkv, T, D], v) -> [B, H, T, D]`, called by a
    forward without a KV cache.
    generator: draws the weights, on `device`; None means PyTorch's default generator.
    Sources: Touvron et al., 2023, arXiv 2302.13971; Ainslie et al., 2023, arXiv 2305.13245.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: AttentionFunction = causal_attention,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **made)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(
            _Layer(config, layer, attention, **made) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **made)  # type: ignore[arg-type]
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **made)
        # Not a buffer, because .to(torch.bfloat16) would round it along with the weights.
        self._frequencies: dict[torch.device, Tensor] = {}
        self._draw_weights(generator)

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden [..., C]; tied models use the embedding's weights."""
        return F.linear(hidden, (self.lm_head or self.embed_tokens).weight)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cos and sin of every angle: [B, 1, T, D / 2]."""
        if positions.device not in self._frequencies:
            found = inverse_frequencies(self.config, positions.device)
            self._frequencies[positions.device] = found
        frequencies = self._frequencies[positions.device]
        angles = positions[:, None, :, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        tokens: Tensor,
        *,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        cache: StepCache | None = None,
        tree: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> LlamaOutput:
        """Return the logits for the token after each token.

        tokens: integers [B, T], right-padded. Ignore the results at padding.
        counts: integers [B], the valid tokens of each row; None means T, or a tree's nodes.
        positions: integers [B, T]; None continues from `cache.lengths`, or by depth in a tree.
        cache: the KV cache to write, attend to and advance; requires a forward without gradients.
        tree: parents, int32 [B, T]. -1 is a child of the prefix and -2 is padding, which must be at
        the end of a row. A node comes after its parent. Requires a cache.
        logits_at: integers [N], places b * T + t. Only their logits [N, V] and hidden [N, C] are
        computed and returned.
        Raises ValueError or TypeError for invalid shapes and dtypes.
        """
        self._check(tokens, counts=counts, positions=positions, cache=cache, tree=tree)
        batch, width = tokens.shape
        if cache is not None and counts is None:
            if tree is None:
                counts = torch.full((batch,), width, dtype=torch.int32, device=tokens.device)
            else:
                counts = (tree != -2).sum(1, dtype=torch.int32)
        if positions is None:
            positions = _positions(tokens, cache, tree)
        x = self.embed_tokens(tokens)
        cos, sin = self._rotation(positions, x.dtype)
        step = _Step(cos=cos, sin=sin, counts=counts, cache=cache, tree=tree)
        for layer in self.layers:
            x = layer(x, step)
        if cache is not None and counts is not None:
            cache.advance(counts)
        if logits_at is not None:
            x = x.flatten(0, 1).index_select(0, logits_at)
        hidden = self.norm(x)
        return LlamaOutput(logits=self.head(hidden), hidden=hidden)

    def _check(
        self,
        tokens: Tensor,
        *,
        cache: StepCache | None,
        tree: Tensor | None,
        **others: Tensor | None,
    ) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be integers [B, T], got {tokens.dtype} {tuple(tokens.shape)}"
            )
        batch, width = tokens.shape
        fitting = {"counts": (batch,), "positions": (batch, width), "tree": (batch, width)}
        for name, tensor in {**others, "tree": tree}.items():
            if tensor is not None and tensor.is_floating_point():
                raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
            if tensor is not None and tuple(tensor.shape) != fitting[name]:
                raise ValueError(
                    f"{name} must have shape {fitting[name]} for tokens of shape "
                    f"{(batch, width)}, got {tuple(tensor.shape)}"
                )
        if tree is not None and cache is None:
            raise ValueError(
                "a tree needs a cache with its prefix, got cache=None; pass cache=DenseCache(…)"
            )
        if cache is not None and cache.lengths.shape != (batch,):
            raise ValueError(
                f"cache must have a row for each of the {batch} rows of tokens, "
                f"got {cache.lengths.shape[0]}"
            )


def _positions(tokens: Tensor, cache: StepCache | None, tree: Tensor | None) -> Tensor:
    """Return positions [B, T], computed on the tokens' device."""
    if tree is not None:
        steps = tree_mask(tree).sum(-1) - 1  # a node's depth: its number of ancestors
    else:
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return steps if cache is None else cache.lengths[:, None] + steps
