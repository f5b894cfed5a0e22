"""A small Llama that reads and writes Hugging Face checkpoints, trained models, and training."""

from labcore.models.cache import DenseCache, KVCache, tree_mask
from labcore.models.checkpoint import from_pretrained, save_pretrained
from labcore.models.config import Llama3Scaling, LlamaConfig
from labcore.models.llama import Llama, LlamaOutput, causal_attention
from labcore.models.shipped import (
    bits_per_byte,
    card,
    held_out,
    held_out_sha256,
    pretrained,
    prompts,
    shipped_tokenizer,
)
from labcore.models.tokenizer import ByteTokenizer, Tokenizer, pad_rows
from labcore.models.training import Curve, next_token_loss, train, windows

__all__ = [
    "ByteTokenizer",
    "Curve",
    "DenseCache",
    "KVCache",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "LlamaOutput",
    "Tokenizer",
    "bits_per_byte",
    "card",
    "causal_attention",
    "from_pretrained",
    "held_out",
    "held_out_sha256",
    "next_token_loss",
    "pad_rows",
    "pretrained",
    "prompts",
    "save_pretrained",
    "shipped_tokenizer",
    "train",
    "tree_mask",
    "windows",
]
