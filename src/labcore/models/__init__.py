"""A small Llama that loads and saves Hugging Face checkpoints, its cache, tokenizers, training."""

from labcore.models.cache import DenseCache, KVCache, tree_mask
from labcore.models.checkpoint import from_pretrained, save_pretrained
from labcore.models.config import Llama3Scaling, LlamaConfig
from labcore.models.llama import Llama, LlamaOutput, causal_attention
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
    "causal_attention",
    "from_pretrained",
    "next_token_loss",
    "pad_rows",
    "save_pretrained",
    "train",
    "tree_mask",
    "windows",
]
