"""Small models of every kind that a checkpoint can have."""

from __future__ import annotations

import torch

from labcore.models import Llama, Llama3Scaling, LlamaConfig

SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
BASE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "plain": LlamaConfig(**BASE),
    "grouped": LlamaConfig(**BASE, num_key_value_heads=2),
    "one-key-head": LlamaConfig(**BASE, num_key_value_heads=1, rms_norm_eps=1e-5),
    "tied": LlamaConfig(**BASE, num_key_value_heads=3, tie_word_embeddings=True),
    "wide-heads": LlamaConfig(**BASE, num_key_value_heads=2, head_dim=10),
    "scaled": LlamaConfig(
        **BASE, num_key_value_heads=2, rope_theta=500.0, rope_scaling=SCALING, eos_token_ids=(3, 5)
    ),
    "biased": LlamaConfig(**BASE, num_key_value_heads=2, qkv_bias=True, output_bias=True),
    "qwen2": LlamaConfig(
        **BASE,
        num_key_value_heads=2,
        qkv_bias=True,
        tie_word_embeddings=True,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
}


def model_of(config: LlamaConfig, generator: torch.Generator) -> Llama:
    """A model whose every parameter is random, biases and norms too: zeros would hide a fault."""
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            parameter.normal_(middle, 0.2, generator=generator)
    return model.eval()


def tokens_of(config: LlamaConfig, shape: tuple[int, int], generator: torch.Generator):
    return torch.randint(config.vocab_size, shape, generator=generator)
