"""Llamas whose sizes four ranks divide, and each rank's part of them by name alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labcore.models import Llama, LlamaConfig
from labcore.parallel.llama import ParallelLlama, parallelize
from labcore.parallel.regions import rank_and_size
from tests.models.shapes import SCALING, model_of

LAYERS = 2
BASE = {
    "vocab_size": 44,
    "hidden_size": 22,  # the only width that nothing divides
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "head_dim": 6,
}
CONFIGS = {
    "plain": LlamaConfig(**BASE),
    "grouped": LlamaConfig(**BASE, num_key_value_heads=4, rope_scaling=SCALING),
    "tied": LlamaConfig(**BASE, num_key_value_heads=4, tie_word_embeddings=True),
    "biased": LlamaConfig(**BASE, num_key_value_heads=4, qkv_bias=True, output_bias=True),
    "qwen2": LlamaConfig(
        **BASE, num_key_value_heads=4, qkv_bias=True, tie_word_embeddings=True, rope_theta=1e6
    ),
}
B, T, SHORT = 3, 8, 7
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj.weight", "down_proj.weight")


def mine(x: Tensor, dim: int) -> Tensor:
    rank, ranks = rank_and_size()
    return x.tensor_split(ranks, dim)[rank]


def own_part(name: str, whole: Tensor) -> Tensor:
    """This rank's part of a parameter, by its name alone."""
    if any(f"{column}." in name for column in COLUMNS):
        return mine(whole, 0)
    return mine(whole, 1) if name.endswith(ROWS) else whole


def gradients(
    model: nn.Module, part: Callable[[str, Tensor], Tensor] = lambda _, gradient: gradient
) -> dict[str, Tensor]:
    """The part of each parameter's gradient; a bias stands as one more column of its weight.

    A bias of all keys moves a row's scores nearly alike, and softmax takes that out: what is left
    of its gradient is small beside the rounding of its summands.
    """
    found = {name: part(name, p.grad) for name, p in model.named_parameters()}
    for name in [name for name in found if name.endswith(".bias")]:
        weight = name.replace(".bias", ".weight")
        found[weight] = torch.cat((found[weight], found.pop(name)[:, None]), 1)
    return found


def pair_of(
    config: LlamaConfig, dtype: torch.dtype, g: torch.Generator, **options: Any
) -> tuple[Llama, ParallelLlama]:
    whole = model_of(config, g).to(dtype)
    return whole, parallelize(copy.deepcopy(whole), **options)
