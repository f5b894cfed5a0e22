"""A small Llama with awkward sizes, caches of ragged prompts, and what they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labcore.models import DenseCache, Llama, LlamaConfig
from labcore.parallel.llama import local_cache

CONFIG = LlamaConfig(
    vocab_size=36,
    hidden_size=20,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    qkv_bias=True,
)
ROWS, CAPACITY, SIZES = 8, 13, (1, 2, 4, 8)


def made(seed: int, **changed: Any) -> Llama:
    generator = torch.Generator().manual_seed(seed)
    return Llama(CONFIG, generator=generator, **changed).eval()


def prefilled(model: Llama, seed: int, rows: int = ROWS) -> DenseCache:
    """A cache of ragged prompts, the first of them empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, 7), generator=generator)[:rows]
    counts = torch.randint(8, (ROWS,), generator=generator, dtype=torch.int32)[:rows]
    counts[0] = 0
    weight = model.embed_tokens.weight
    cache = local_cache(model, batch=rows, capacity=CAPACITY, dtype=weight.dtype)
    with torch.no_grad():
        model(tokens, counts=counts, cache=cache)
    return cache


def contents(cache: DenseCache) -> list[Tensor]:
    """What rows hold, without the slot that takes padding."""
    stored = [tensor[:, :, :CAPACITY].clone() for tensor in (*cache._keys, *cache._values)]
    return [*stored, cache.lengths.clone()]


@torch.no_grad()
def plain(model: Llama, cache: DenseCache, tokens: Tensor) -> Tensor:
    return model(tokens[:, None], cache=cache).logits[:, 0]
