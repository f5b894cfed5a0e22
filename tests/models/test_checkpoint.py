"""Saved and loaded models are the same; a folder that does not fit is described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from labcore.models import Llama, from_pretrained, save_pretrained
from tests.models.shapes import CONFIGS, model_of

EMBEDDING = "model.embed_tokens.weight"


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("limit", [5_000_000_000, 4_000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_bit_for_bit(
    limit: int, dtype: torch.dtype, tmp_path: Path, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS["qwen2"], generator).to(dtype)
    save_pretrained(model, tmp_path, max_shard_bytes=limit)
    again = from_pretrained(tmp_path)
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].dtype == dtype
        assert torch.equal(again.state_dict()[name], tensor)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == {5_000_000_000: 1, 1: len(model.state_dict())}.get(limit, len(files))
    assert limit == 5_000_000_000 or len(files) > 1
    assert not list(tmp_path.glob("*.part"))
    assert from_pretrained(tmp_path, dtype=torch.float64).norm.weight.dtype == torch.float64
    assert all(p.requires_grad for p in again.parameters()) and not again.training


def test_a_second_save_leaves_no_shard_of_the_first(
    tmp_path: Path, generator: torch.Generator
) -> None:
    first, second = (model_of(CONFIGS["grouped"], generator) for _ in range(2))
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    for limits in [(1, 10**9), (10**9, 1), (1, 4_000)]:
        for model, limit in zip((first, second), limits, strict=True):
            save_pretrained(model, tmp_path, max_shard_bytes=limit)
        assert torch.equal(from_pretrained(tmp_path).norm.weight, second.norm.weight)
        whole = (tmp_path / "model.safetensors").exists()
        assert whole != (tmp_path / "model.safetensors.index.json").exists()
    assert other.exists()


def test_missing_unexpected_and_misshapen_tensors_are_named(
    tmp_path: Path, generator: torch.Generator
) -> None:
    save_pretrained(model_of(CONFIGS["grouped"], generator), tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(1)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 40)

    edit(tmp_path, spoil)
    with pytest.raises(ValueError) as caught:
        from_pretrained(tmp_path)
    said = str(caught.value)
    assert "model.norm.weight is missing" in said
    assert "model.layers.9.extra is unexpected" in said
    shape = "model.layers.1.mlp.up_proj.weight must have shape (40, 24), got (24, 40)"
    assert said.count("up_proj") == 1 and shape in said


def test_a_head_that_is_tied_may_be_stored_and_must_agree(
    tmp_path: Path, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS["tied"], generator)
    save_pretrained(model, tmp_path)

    def store(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    edit(tmp_path, store)
    assert torch.equal(from_pretrained(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        from_pretrained(tmp_path)


def test_an_untied_head_must_be_there(tmp_path: Path, generator: torch.Generator) -> None:
    save_pretrained(model_of(CONFIGS["plain"], generator), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        from_pretrained(tmp_path)


def test_missing_files_and_strange_indexes_are_told(
    tmp_path: Path, generator: torch.Generator
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config.json.*snapshot_download"):
        from_pretrained(tmp_path)
    save_pretrained(model_of(CONFIGS["plain"], generator), tmp_path, max_shard_bytes=10_000)
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    shard = tmp_path / sorted(set(told["weight_map"].values()))[0]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        from_pretrained(tmp_path)
    shard.write_bytes(kept)
    told["weight_map"][EMBEDDING] = "../elsewhere.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(ValueError, match="its own folder"):
        from_pretrained(tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        from_pretrained(tmp_path)


def test_fresh_weights_are_the_generators(seed: int) -> None:
    config = CONFIGS["biased"]
    one, same, other = (
        Llama(config, generator=torch.Generator().manual_seed(s)) for s in (seed, seed, seed + 1)
    )
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name])
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    drawn = torch.cat(
        [p.detach().flatten() for n, p in one.named_parameters() if "proj.weight" in n]
    )
    # The spread of n draws has a relative error of 1 / sqrt(2 n).
    assert abs(float(drawn.std()) / 0.02 - 1) < 6 / (2 * drawn.numel()) ** 0.5
