"""The shapes of a Llama's parameters, also where tensor parallelism splits them."""

from __future__ import annotations

from collections.abc import Mapping

from labcore.models.config import LlamaConfig

__all__ = ["Shape", "adapter_shapes", "layer_shapes", "parameter_shapes", "share"]

Shape = tuple[int, ...]


def share(whole: int, shares: int) -> int:
    """Return the largest of `shares` shares."""
    return -(-whole // shares)


def layer_shapes(config: LlamaConfig, shares: int = 1) -> dict[str, Shape]:
    """Return one layer's parameters: products split by output, o_proj and down_proj by input."""
    width, wide = config.hidden_size, share(config.intermediate_size, shares)
    queries = share(config.num_attention_heads, shares) * config.head_size
    keys = share(config.kv_heads, shares) * config.head_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (width,)}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = (rows, width)
        if config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (width, queries)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    shapes["post_attention_layernorm.weight"] = (width,)
    shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (wide, width)
    shapes["mlp.down_proj.weight"] = (width, wide)
    return shapes


def adapter_shapes(layer: Mapping[str, Shape], rank: int) -> dict[str, Shape]:
    """Return LoRA's two factors, A [rank, I] and B [O, rank], for each matrix [O, I] of a layer.

    Source: Hu et al., 2021, arXiv 2106.09685.
    """
    found: dict[str, Shape] = {}
    for name, shape in layer.items():
        if len(shape) == 2 and rank:
            stem = name.removesuffix("weight")
            found |= {f"{stem}A": (rank, shape[1]), f"{stem}B": (shape[0], rank)}
    return found


def parameter_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return the name and shape of every parameter of `Llama(config)`; a tied head adds none."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embed_tokens.weight": table}
    for layer in range(config.num_hidden_layers):
        one = layer_shapes(config)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in one.items()}
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes
