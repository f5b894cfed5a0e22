"""Llama-family checkpoints in the format of Hugging Face: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
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
    config = read_config(folder)
    model = Llama(config, attention=attention, device="meta")

    def take(_: str, stored: Any) -> Tensor:
        return stored[:].to(device=device, dtype=dtype)

    model.load_state_dict(read_state(folder, config, shapes_of(model), take), assign=True)
    return model.eval()


def read_config(folder: str | Path) -> LlamaConfig:
    """The configuration in a checkpoint's config.json. Errors as in `from_pretrained`."""
    return LlamaConfig.from_hugging_face(_json(Path(folder) / "config.json"))


def shapes_of(model: Llama) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model's state, by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_state(
    folder: str | Path,
    config: LlamaConfig,
    shapes: Mapping[str, tuple[int, ...]],
    take: Callable[[str, Any], Tensor],
) -> dict[str, Tensor]:
    """What `take` keeps of each stored tensor, by its name in a `Llama`'s state.

    config: of the checkpoint. shapes: that the stored tensors must have, those of the whole model.
    take: is called as `take(name, stored)`, where `stored[rows, columns]` reads from the file; with
    a name that shapes lacks for the head that a tied checkpoint may store too.
    Raises FileNotFoundError and ValueError as `from_pretrained` does.
    """
    folder = Path(folder)
    keys = {name: _stored_name(name) for name in shapes}
    names = {key: name for name, key in keys.items()}
    wanted = {key: shapes[name] for key, name in names.items()}
    if config.tie_word_embeddings:
        # A tied checkpoint may store its head too; another one than the embedding would be lost.
        names[_HEAD], wanted[_HEAD] = _HEAD, (config.vocab_size, config.hidden_size)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - the file is no dictionary
                if _DERIVED.fullmatch(key):
                    continue
                stored = opened.get_slice(key)
                shape, needed = tuple(stored.get_shape()), wanted.get(key)
                if key in found:
                    problems.append(f"{key} stands in two files")
                elif needed is None:
                    problems.append(f"{key} is unexpected")
                elif shape != needed:
                    problems.append(f"{key} must have shape {needed}, got {shape}")
                else:
                    found[key] = take(names[key], stored)
    told = {problem.split(" ")[0] for problem in problems}
    problems += [f"{key} is missing" for key in keys.values() if key not in {*found, *told}]
    head, embedding = found.get(_HEAD), found.get(_EMBEDDING)
    tied = config.tie_word_embeddings and head is not None and embedding is not None
    if tied and not torch.equal(head, embedding):  # type: ignore[arg-type]
        problems.append(f"{_HEAD} differs from {_EMBEDDING}, which config.json ties it to")
    if problems:
        raise ValueError(f"{folder} does not hold the model of its config.json: {_few(problems)}")
    return {name: found[key] for name, key in keys.items()}


def save_pretrained(
    model: Llama, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and the weights so that transformers and `from_pretrained` read them.

    max_shard_bytes: weights above it go into several files with an index; one tensor is never
    split. Each file is written beside its place and then moved there; weights of an earlier save
    that this one does not replace are removed.
    Raises ValueError for a configuration that no family of checkpoints has, and, before anything is
    written, for tensors that are not those of the configuration: a part of a divided model.
    """
    positive_int("max_shard_bytes", max_shard_bytes)
    told = model.config.to_hugging_face()
    _check_whole(model)
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


def _check_whole(model: Llama) -> None:
    whole = shapes_of(Llama(model.config, device="meta"))
    for name, shape in shapes_of(model).items():
        if shape != whole.get(name, shape):
            raise ValueError(
                f"save_pretrained saves whole models, got {name} of shape {shape} where config has "
                f"{whole[name]}; of a model that is divided among ranks take "
                "labcore.parallel.llama.gathered_state(model) first, and save a Llama(config) "
                "that has loaded it"
            )


def _stored_name(name: str) -> str:
    return name if name == _HEAD else f"model.{name}"


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
