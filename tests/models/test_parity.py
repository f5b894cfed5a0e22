"""Our logits are those of transformers, in both directions of the checkpoint format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from labcore.models import DenseCache, Llama, from_pretrained, save_pretrained
from tests.models.shapes import CONFIGS, model_of, tokens_of


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to 5e-5 of the largest value: ten times what another order of summation costs."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5 * float(theirs.abs().max()))


def peer_of(folder: Path) -> transformers.PreTrainedModel:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    peers = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}
    return peers[kind].from_pretrained(folder, local_files_only=True).eval()


@pytest.fixture(params=CONFIGS)
def pair(request, tmp_path: Path, generator: torch.Generator):
    """Our model and the peer that read its checkpoint."""
    model = model_of(CONFIGS[request.param], generator)
    save_pretrained(model, tmp_path)
    return model, peer_of(tmp_path)


@torch.inference_mode()
def test_logits_and_hidden_equal_those_of_transformers(pair, generator: torch.Generator) -> None:
    model, peer = pair
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    for shape in [(1, 1), (3, 31), (2, 64)]:
        tokens = tokens_of(model.config, shape, generator)
        ours, theirs = model(tokens), peer(tokens, output_hidden_states=True)
        assert_close(ours.logits, theirs.logits)
        assert_close(ours.hidden, theirs.hidden_states[-1])
        torch.testing.assert_close(model.head(ours.hidden), ours.logits, rtol=0, atol=0)


@torch.inference_mode()
def test_cached_steps_equal_the_whole_of_transformers(pair, generator: torch.Generator) -> None:
    model, peer = pair
    tokens = tokens_of(model.config, (2, 29), generator)
    cache = DenseCache(model.config, batch=2, capacity=29)
    steps = [model(part, cache=cache).logits for part in tokens.split([5, *[1] * 24], 1)]
    assert_close(torch.cat(steps, 1), peer(tokens).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("shard", ["5GB", "8KB"])
@torch.inference_mode()
def test_a_checkpoint_of_transformers_loads(
    family: str, shard: str, tmp_path: Path, generator: torch.Generator
) -> None:
    shape = {
        "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": shard == "8KB",
    }  # fmt: skip
    if family == "llama":
        scaled = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 2.0, "original_max_position_embeddings": 32}  # fmt: skip
        told = transformers.LlamaConfig(**shape, rope_scaling=scaled, head_dim=6)
        peer = transformers.LlamaForCausalLM(told)
    else:
        peer = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    peer.eval()
    for parameter in peer.parameters():
        parameter.normal_(0.1, 0.2, generator=generator)
    peer.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "8KB")
    model = from_pretrained(tmp_path)
    tokens = tokens_of(model.config, (2, 50), generator)
    assert_close(model(tokens).logits, peer(tokens).logits)


def test_gradients_equal_those_of_transformers(tmp_path: Path, generator: torch.Generator) -> None:
    model = model_of(CONFIGS["tied"], generator)
    save_pretrained(model, tmp_path)
    peer = peer_of(tmp_path)
    tokens = tokens_of(model.config, (2, 13), generator)
    (model(tokens).logits.square().mean()).backward()
    (peer(tokens).logits.square().mean()).backward()
    theirs = {name.removeprefix("model."): p.grad for name, p in peer.named_parameters()}
    for name, parameter in model.named_parameters():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=0, atol=1e-5 * scale + 1e-7)


@torch.inference_mode()
def test_angles_stay_exact_in_half_precision(generator: torch.Generator) -> None:
    """A frequency rounded to bf16 is off by up to 0.4 radians at position 100."""
    seen = []

    def attention(q, k, v):
        seen.append(q.float())
        return q

    config = CONFIGS["scaled"]
    model = Llama(config, attention=attention, generator=generator)
    tokens = tokens_of(config, (2, 100), generator)
    model(tokens)
    model.to(torch.bfloat16)(tokens)
    truth, half = seen[0], seen[config.num_hidden_layers]
    error = (half - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert float(error.mean()) < 2e-2
