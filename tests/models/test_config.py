"""Configurations: what is read, what is refused by name, what comes back as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from labcore.models import Llama, LlamaConfig
from tests.models.shapes import BASE, CONFIGS, SCALING

# The keys of published checkpoints, with the sizes left out.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.04,
    "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "transformers.js_config": {"dtype": "q4"}, "use_cache": True,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 7,
    "eos_token_id": 7, "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 24,
    "max_position_embeddings": 131072, "model_type": "qwen2", "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
LLAMA3 = {
    "model_type": "llama", "head_dim": 64, "eos_token_id": [8, 9], "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip


def test_the_configurations_of_published_families_are_read() -> None:
    smol = LlamaConfig.from_hugging_face(BASE | SMOLLM2)
    assert (smol.rope_theta, smol.tie_word_embeddings, smol.kv_heads) == (1e5, True, 3)
    assert (smol.qkv_bias, smol.head_size, smol.eos_token_ids) == (False, 4, (2,))
    qwen = LlamaConfig.from_hugging_face(BASE | QWEN2)
    assert (qwen.qkv_bias, qwen.output_bias, qwen.rope_theta) == (True, False, 1e6)
    three = LlamaConfig.from_hugging_face(BASE | LLAMA3)
    assert three.rope_scaling is not None
    assert (three.rope_scaling.factor, three.head_size, three.eos_token_ids) == (32, 64, (8, 9))
    new = {"rope_theta": 9.0, **LLAMA3["rope_scaling"]}
    told = {k: v for k, v in (BASE | LLAMA3).items() if not k.startswith("rope_")}
    again = LlamaConfig.from_hugging_face({**told, "rope_parameters": new})
    assert (again.rope_theta, again.rope_scaling) == (9.0, three.rope_scaling)


# Whole files of published checkpoints, and the number of weights that their authors state.
_COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
PUBLISHED = {
    "SmolLM2-135M": (134_515_008, _COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 0,
        "eos_token_id": 0, "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "transformers_version": "4.40.1", "vocab_size": 49152,
    }),
    "TinyLlama-1.1B": (1_100_048_384, _COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "transformers_version": "4.35.0", "vocab_size": 32000,
    }),
    "Qwen2.5-0.5B": (494_032_768, _COMMON | {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "transformers_version": "4.40.1", "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    }),
    "Llama-3.2-1B": (1_235_814_400, _COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3["rope_scaling"],
        "rope_theta": 500000.0, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0", "vocab_size": 128256,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_gives_the_stated_number_of_weights(name: str) -> None:
    stated, told = PUBLISHED[name]
    with torch.device("meta"):
        model = Llama(LlamaConfig.from_hugging_face(told))
    assert sum(weight.numel() for weight in model.parameters()) == stated


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back_as_it_was(name: str) -> None:
    config = CONFIGS[name]
    assert LlamaConfig.from_hugging_face(config.to_hugging_face()) == config


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"logit_scale": 2.0, "clip_qkv": 8.0}, "logit_scale=2.0.*clip_qkv=8.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type.*'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, r"missing: \['hidden_size'\]"),
    ],
)
def test_what_the_model_does_not_do_is_refused_by_name(changed: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LlamaConfig.from_hugging_face(BASE | {"model_type": "llama"} | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size must be a multiple"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a finite number above 0"),
    ],
)
def test_numbers_that_are_no_model_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**(BASE | changed))


def test_a_misspelt_field_and_an_unsavable_bias_are_refused() -> None:
    with pytest.raises(TypeError, match="n_heads"):
        LlamaConfig(**BASE, n_heads=2)
    with pytest.raises(ValueError, match="output projection alone"):
        LlamaConfig(**BASE, output_bias=True).to_hugging_face()
    with pytest.raises(ValueError, match="high_freq_factor must be above"):
        dataclasses.replace(SCALING, low_freq_factor=4.0)
