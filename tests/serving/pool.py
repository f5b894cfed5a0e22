"""Pools of blocks full of NaN, a packed forward over them, and the same logits without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labcore.models import Llama
from labcore.models.fused import FusedLlama
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.packed import PackedStep

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # in double precision: what is left is rounding
SIZES = (1, 3, 16)


def stored(cache: PagedCache) -> list[Tensor]:
    """Keys and values of all layers: [P + 1, block_size, Hkv, D]."""
    return [*cache.keys, *cache.values]


def poisoned(model: Llama, block_size: int, *, rows: int = 4, most: int = 24) -> PagedCache:
    """A cache with NaN in every slot, the idle rows' block too."""
    each = -(-most // block_size)
    cache = PagedCache.of(
        model, num_blocks=rows * each + 3, block_size=block_size, rows=rows, max_blocks=each
    )
    for blocks in stored(cache):
        blocks.fill_(math.nan)
    return cache


def scattered(cache: PagedCache, rows: int, generator: torch.Generator) -> list[list[int]]:
    """Blocks in random order for each row, as many as a row may have."""
    order = torch.randperm(cache.num_blocks, generator=generator).tolist()
    each = cache.block_table.shape[1]
    return [order[row * each :][:each] for row in range(rows)]


def forward(
    model: Llama | FusedLlama, cache: PagedCache, segments: Sequence[Segment]
) -> list[Tensor]:
    """The logits after each segment's tokens: [T, V] each."""
    step = PackedStep(cache, segments)
    with torch.inference_mode():
        if isinstance(model, FusedLlama):
            out = model.rows(step.tokens, step.positions, step.reach, step.mix_fused)
            logits = out.logits
        else:
            positions = step.positions[None]
            logits = model(step.tokens[None], positions=positions, cache=step).logits[0]
    return [logits[list(span)] for span in step.spans]


def alone(model: Llama, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of one request without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([[*tokens]])).logits[0]
