"""Llama-family checkpoints in the format of Hugging Face: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from labcore.checks import positive_int
from labcore.models.config import LlamaConfig
from labcore.models.llama import AttentionFunction, Llama, causal_attention

__all__ = ["from_pretrained", "save_pretrained"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Old Llama checkpoints store what the configuration says already.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attention: AttentionFunction = causal_attention,
) -> Llama:
    """The model that a folder of config.json and safetensors holds, in evaluation mode.

    folder: of a Llama, SmolLM2, TinyLlama or Qwen2 checkpoint; one file of weights, or shards
    with their index. dtype: of the weights; None keeps what is stored.
    Raises FileNotFoundError for a missing file; ValueError that names the keys of config.json
    that are not supported, and the tensors that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    config = LlamaConfig.from_hugging_face(_json(folder / "config.json"))
    model = Llama(config, attention=attention, device="meta")
    wanted = {_stored_name(name): tensor for name, tensor in model.state_dict().items()}
    files = _weight_files(folder)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the file is no dictionary
                if _DERIVED.fullmatch(name):
                    continue
                shape = tuple(opened.get_slice(name).get_shape())
                needed = _shape_of(name, wanted, config)
                if name in found:
                    problems.append(f"{name} stands in two files")
                elif needed is None:
                    problems.append(f"{name} is unexpected")
                elif shape != needed:
                    problems.append(f"{name} must have shape {needed}, got {shape}")
                else:
                    found[name] = opened.get_tensor(name).to(device=device, dtype=dtype)
    refused = {problem.split(" ")[0] for problem in problems}
    problems += [f"{name} is missing" for name in wanted if name not in {*found, *refused}]
    # A tied checkpoint may store its head too; another one than the embedding would be lost.
    head, embedding = found.get(_HEAD), found.get(_EMBEDDING)
    tied = config.tie_word_embeddings and head is not None and embedding is not None
    if tied and not torch.equal(head, embedding):  # type: ignore[arg-type]
        problems.append(f"{_HEAD} differs from {_EMBEDDING}, which config.json ties it to")
    if problems:
        raise ValueError(f"{folder} does not hold the model of its config.json: {_few(problems)}")
    state = {name: found[_stored_name(name)] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    return model.eval()


def save_pretrained(
    model: Llama, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and the weights so that transformers and `from_pretrained` read them.

    max_shard_bytes: weights above it go into several files with an index; one tensor is never
    split. Each file is written beside its place and then moved there; weights of an earlier save
    that this one does not replace are removed.
    Raises ValueError for a configuration that no family of checkpoints has.
    """
    positive_int("max_shard_bytes", max_shard_bytes)
    told = model.config.to_hugging_face()
    tensors = {
        _stored_name(name): tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    told["torch_dtype"] = str(tensors[_EMBEDDING].dtype).removeprefix("torch.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        names = [_WHOLE]
    else:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        beside = folder / f"{name}.part"
        save_file(shard, beside, metadata={"format": "pt"})
        os.replace(beside, folder / name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / _INDEX, index)
    _write_json(folder / "config.json", told)
    for path in folder.iterdir():
        ours = path.name == _WHOLE or _SHARD.fullmatch(path.name)
        if (ours and path.name not in names) or (path.name == _INDEX and len(shards) == 1):
            path.unlink()


def _stored_name(name: str) -> str:
    return name if name == _HEAD else f"model.{name}"


def _shape_of(
    name: str, wanted: Mapping[str, Tensor], config: LlamaConfig
) -> tuple[int, ...] | None:
    """The shape that the model needs of a stored tensor; None where it needs none."""
    if name in wanted:
        return tuple(wanted[name].shape)
    if name == _HEAD and config.tie_word_embeddings:
        return (config.vocab_size, config.hidden_size)
    return None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} holds no {path.name}; pass the folder of a checkpoint, as "
            "huggingface_hub.snapshot_download(…) returns it"
        )
    told = json.loads(path.read_text("utf-8"))
    if not isinstance(told, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(told).__name__}")
    return told


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files: one, or those that the index names."""
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {_WHOLE} nor {_INDEX}; weights in another format "
            "(pytorch_model.bin) must be converted to safetensors first"
        )
    names = sorted(set(_json(folder / _INDEX)["weight_map"].values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{_INDEX} must name files of its own folder, got {_few(strange)}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{_INDEX} names {_few(absent)}, which {folder} does not hold")
    return [folder / name for name in names]


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many to a shard as fit below the limit, at least one."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _few(items: list[str]) -> str:
    shown = "; ".join(items[:8])
    return shown if len(items) <= 8 else f"{shown}; and {len(items) - 8} more"
