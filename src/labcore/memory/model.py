"""The memory chapter's model: a Llama with two million parameters on Python's documentation.

Every method is measured on it, with the same initial weights for a seed, the same batches and the
same held-out text. Tokens are bytes, so losses are in nats per byte.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.data import python_text
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.models.tokenizer import ByteTokenizer
from labcore.models.training import Batches, next_token_loss, windows

__all__ = [
    "CONFIG",
    "HELD_OUT_LENGTH",
    "HELD_OUT_ROWS",
    "MAX_BYTES",
    "batches",
    "fresh",
    "held_out_loss",
    "held_out_rows",
]

WIDTH = 192
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=WIDTH,
    intermediate_size=3 * WIDTH,
    num_hidden_layers=4,
    num_attention_heads=6,
    max_position_embeddings=1024,
    initializer_range=WIDTH**-0.5,
)
MAX_BYTES = {"train": 1_000_000, "held_out": 200_000}
HELD_OUT_ROWS, HELD_OUT_LENGTH = 32, 256


def fresh(seed: int, *, dtype: torch.dtype = torch.float32) -> Llama:
    """Return the model, with weights that depend only on `seed`.

    dtype: of the parameters; every dtype rounds the seed's float32 weights.
    """
    return Llama(CONFIG, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def _corpus(part: str) -> Tensor:
    """Byte tokens [N] of Python's documentation."""
    text = python_text(part, max_bytes=MAX_BYTES[part]).text
    return torch.tensor(ByteTokenizer().encode(text), dtype=torch.int64)


def batches(seed: int, *, batch: int = 8, length: int = 256) -> Batches:
    """Return a function from n to training batch n: (tokens int64 [batch, length + 1], None)."""
    return windows(_corpus("train"), batch=batch, length=length, seed=seed)


def held_out_rows(rows: int = HELD_OUT_ROWS) -> Tensor:
    """Return fixed windows from files that training never sees: int64 [rows, 257]."""
    positive_int("rows", rows)
    draw = windows(_corpus("held_out"), batch=rows, length=HELD_OUT_LENGTH)
    return draw(0)[0]


@torch.no_grad()
def held_out_loss(model: Llama) -> float:
    """Return the loss in nats per byte over the 32 held-out windows of 256 bytes."""
    total, count = next_token_loss(model, held_out_rows().to(model.embed_tokens.weight.device))
    return total.item() / count
