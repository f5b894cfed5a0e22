"""Read and write Llama-family checkpoints in Hugging Face's format: config.json and safetensors."""

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
# Old Llama checkpoints store these, although the configuration determines them.
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
    """Load a model from a folder with config.json and safetensors, in evaluation mode.

    folder: a Llama, SmolLM2, TinyLlama or Qwen2 checkpoint, with its weights in one file or in
    shards with their index. dtype: dtype of the weights; None keeps the stored one.
    attention: as in `Llama`.
    Raises FileNotFoundError for a missing file, and ValueError that names the unsupported keys of
    config.json or the tensors that are missing, unexpected or have the wrong shape.
    """
    config = read_config(folder)
    model = Llama(config, attention=attention, device="meta")

    def take(_: str, stored: Any) -> Tensor:
        return stored[:].to(device=device, dtype=dtype)

    model.load_state_dict(read_state(folder, config, shapes_of(model), take), assign=True)
    return model.eval()


def read_config(folder: str | Path) -> LlamaConfig:
    """Read the configuration in a checkpoint's config.json. Errors as in `from_pretrained`."""
    return LlamaConfig.from_hugging_face(_json(Path(folder) / "config.json"))


def shapes_of(model: Llama) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the model's state, by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_state(
    folder: str | Path,
    config: LlamaConfig,
    shapes: Mapping[str, tuple[int, ...]],
    take: Callable[[str, Any], Tensor],
) -> dict[str, Tensor]:
    """Return what `take` keeps of each stored tensor, by its name in a `Llama`'s state.

    config: the checkpoint's configuration.
    shapes: the shapes of the whole model, which the stored tensors must have.
    take: called as `take(name, stored)`, where `stored[rows, columns]` reads from the file. If a
    tied checkpoint also stores its head, `take` is called for it too, although it isn't in shapes.
    Raises the same errors as `from_pretrained`.
    """
    folder = Path(folder)
    keys = {name: _stored_name(name) for name in shapes}
    names = {key: name for name, key in keys.items()}
    wanted = {key: shapes[name] for key, name in names.items()}
    if config.tie_word_embeddings:
        # A tied checkpoint may also store its head, which must equal the embedding.
        names[_HEAD], wanted[_HEAD] = _HEAD, (config.vocab_size, config.hidden_size)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - the file isn't a dictionary
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
        raise ValueError(f"the weights in {folder} don't match its config.json: {_few(problems)}")
    return {name: found[key] for name, key in keys.items()}


def save_pretrained(
    model: Llama, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and the weights in the format that transformers and `from_pretrained` read.

    Each file is written under a temporary name and then moved into place. Weight files of an
    earlier save that this one doesn't replace are deleted.
    max_shard_bytes: larger weights are split into several files with an index. A tensor is never
    split.
    Raises ValueError, before writing anything, for a configuration that no model family has, or for
    tensors that don't match the configuration, such as one rank's part of a model.
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
                f"save_pretrained needs a whole model, got {name} of shape {shape} where config "
                f"has {whole[name]}; if the model is split among ranks, load "
                "labcore.parallel.llama.gathered_state(model) into a Llama(config) and save that"
            )


def _stored_name(name: str) -> str:
    return name if name == _HEAD else f"model.{name}"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} holds no {path.name}; pass the folder of a checkpoint, such as "
            "huggingface_hub.snapshot_download(…) returns"
        )
    told = json.loads(path.read_text("utf-8"))
    if not isinstance(told, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(told).__name__}")
    return told


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files: the single file, or those that the index names."""
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {_WHOLE} nor {_INDEX}; convert weights in another format "
            "(pytorch_model.bin) to safetensors first"
        )
    names = sorted(set(_json(folder / _INDEX)["weight_map"].values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{_INDEX} must name files in its own folder, got {_few(strange)}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{_INDEX} names {_few(absent)}, missing from {folder}")
    return [folder / name for name in names]


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in shards of at most `limit` bytes or a single tensor."""
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
