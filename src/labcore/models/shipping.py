"""Train a shipped model from its recipe, and export the folder to ship with its model card."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

from labcore.checks import one_of
from labcore.clipping import clip_by_global_norm
from labcore.models.checkpoint import from_pretrained, save_pretrained
from labcore.models.llama import Llama
from labcore.models.recipes import (
    END_OF_TEXT,
    RECIPES,
    ModelRecipe,
    corpus,
    learn_tokenizer,
    tokens_of,
)
from labcore.models.shipped import HELD_OUT, bits_per_byte, held_out, held_out_sha256
from labcore.models.tokenizer import Tokenizer
from labcore.models.training import Curve, train
from labcore.optim import AdamW

__all__ = ["checked_commit", "export", "trained"]

BETAS = (0.9, 0.95)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_ABOUT = {
    "target": "The larger of two models: the one whose tokens speculative decoding gives.",
    "draft": "The smaller of two models: the one that guesses what the target will say.",
}


def checked_commit(commit: str) -> str:
    """Return the commit. Raises ValueError unless it's 7 to 40 hexadecimal digits, as in Git."""
    if not _COMMIT.fullmatch(commit):
        raise ValueError(
            f"commit must be 7 to 40 hexadecimal digits, got {commit!r}; `git rev-parse HEAD` "
            "prints the commit of the training code"
        )
    return commit


def trained(
    name: str, folder: Path, *, compiled: bool = False, progress: bool = True
) -> tuple[Llama, Curve]:
    """Train a recipe's model, resuming from the checkpoint `<name>.pt` in `folder` if there is one.

    Uses the folder's tokenizer.json, or learns it from the corpus if there is none.
    compiled: use torch.compile, which needs a C++ compiler.
    """
    recipe = RECIPES[one_of("shipped model", name, RECIPES)]
    texts = corpus()
    file = folder / "tokenizer.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        learn_tokenizer(texts).save(str(file))
    tokens = tokens_of(texts, Tokenizer.from_pretrained(file))
    model = Llama(recipe.config, generator=torch.Generator().manual_seed(recipe.seed))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}],
        lr=recipe.rate,
        betas=BETAS,
        weight_decay=recipe.decay,
    )
    if compiled:
        model.compile()
    # Autocast's cache would keep the first step's rounded weights until the context ends.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        curve = train(
            model,
            recipe.batches(tokens),
            optimizer,
            steps=recipe.steps,
            clip=lambda parameters: clip_by_global_norm(parameters, recipe.clip).norm,
            schedule=recipe.schedule,
            checkpoint=folder / f"{name}.pt",
            progress=progress,
        )
    return model, curve


def export(name: str, folder: Path, *, commit: str) -> Path:
    """Write the folder to ship, `<folder>/<name>`, from the finished checkpoint, and return it.

    The folder holds config.json, model.safetensors in bfloat16 and the tokenizer in the format of
    transformers, and the model card as card.json and README.md. The card's held-out bits per byte
    are measured with the written weights. Its corpus size is counted in the running Python, so
    export with the Python version used for training.
    commit: the commit of the training code, for the card.
    Raises ValueError for an unfinished training or an invalid commit, and FileNotFoundError if
    there is no checkpoint.
    """
    recipe = RECIPES[one_of("shipped model", name, RECIPES)]
    checked_commit(commit)
    model, curve = _finished(name, folder)
    place = folder / name
    save_pretrained(model.to(torch.bfloat16), place)
    (place / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
    _write_tokenizer(folder / "tokenizer.json", place, recipe)
    _write_json(
        place / "generation_config.json",
        {
            "bos_token_id": recipe.config.bos_token_id,
            "eos_token_id": recipe.config.eos_token_ids[0],
            "pad_token_id": recipe.config.eos_token_ids[0],
        },
    )
    told = _card(name, place, curve, commit)
    (place / "README.md").write_text(_as_text(told), encoding="utf-8")
    _write_json(place / "card.json", told)
    return place


def _finished(name: str, folder: Path) -> tuple[Llama, Curve]:
    """Return the model of a finished training's checkpoint, and its curve."""
    recipe, file = RECIPES[name], folder / f"{name}.pt"
    again = f"python -m labcore.models.ship {name} --out {folder}"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {file.name}; run `{again}` to train it")
    told = torch.load(file, map_location="cpu", weights_only=True)
    curve = Curve(**told["curve"])
    if len(curve.losses) != recipe.steps:
        raise ValueError(
            f"a model can be exported only after all of its {recipe.steps:,} steps, {file.name} "
            f"has {len(curve.losses):,}; run `{again}` to finish the training"
        )
    model = Llama(recipe.config)
    model.load_state_dict(told["model"])
    return model.eval(), curve


def _write_tokenizer(file: Path, place: Path, recipe: ModelRecipe) -> None:
    shutil.copyfile(file, place / "tokenizer.json")
    _write_json(
        place / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.config.max_position_embeddings,
        },
    )


def _card(name: str, place: Path, curve: Curve, commit: str) -> dict[str, Any]:
    """Return the contents of a model's card.json."""
    recipe = RECIPES[name]
    tokenizer = Tokenizer.from_pretrained(place)
    texts = corpus()
    tokens = tokens_of(texts, tokenizer).numel()
    model = from_pretrained(place, dtype=torch.float32)
    last = curve.losses[-100:]
    return {
        "name": name,
        "about": _ABOUT[name],
        "license": "BSD-3-Clause",
        "commit": commit,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": {
            "what": "the sources of the standard library of Python, without its tests, and its "
            "docstrings once more as prose (labcore.data, part 'train')",
            "source_files": len(texts) - 1,
            "bytes": sum(len(text.encode("utf-8")) for text in texts),
            "tokens": tokens,
            "python": platform.python_version(),
            "license": "PSF-2.0",
        },
        "training": {
            "steps": recipe.steps,
            "tokens": sum(curve.tokens),
            "passes": round(sum(curve.tokens) / tokens, 2),
            "batch": recipe.batch,
            "length": recipe.length,
            "long_steps": recipe.long_steps,
            "long_length": recipe.long_length,
            "optimizer": "AdamW",
            "rate": recipe.rate,
            "betas": list(BETAS),
            "decay": recipe.decay,
            "clip": recipe.clip,
            "warmup": recipe.warmup,
            "seed": recipe.seed,
            "precision": "fp32 weights, bf16 autocast",
            "last_loss_nats_per_token": round(sum(last) / len(last), 4),
        },
        "held_out": {
            kind: {
                "file": HELD_OUT[kind],
                "sha256": held_out_sha256(kind),
                "bits_per_byte": round(bits_per_byte(model, held_out(kind), tokenizer), 4),
            }
            for kind in HELD_OUT
        },
        "versions": {"torch": torch.__version__, "tokenizers": tokenizers.__version__},
    }


def _as_text(told: Mapping[str, Any]) -> str:
    """Return the card as Markdown, with the header that model hubs read."""
    config = RECIPES[told["name"]].config
    parts = [
        "---\nlicense: bsd-3-clause\nlanguage: en\nlibrary_name: transformers\n---",
        f"# labcore {told['name']}",
        f"{told['about']} {told['parameters']:,} parameters, stored in bfloat16: a Llama of "
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, with tied embeddings. "
        "Made for a course; it writes text that looks like Python, and knows nothing.",
        f"License of the weights: {told['license']}. Trained by commit `{told['commit']}`.",
        "## Data\n\nThe tokenizer, a byte-level BPE, was learned from the same texts.",
        _rows(told["data"]),
        "## Training\n\nThe rate rises over the warm-up and falls by a cosine to a tenth; the last "
        "`long_steps` have rows of `long_length` tokens, as many tokens a step as the others.",
        _rows(told["training"]),
        "## Held-out text\n\nCode and prose that were written for the course, measured with the "
        "stored weights by `labcore.models.bits_per_byte`.",
        *(f"### {kind}\n\n{_rows(one)}" for kind, one in told["held_out"].items()),
        f"## Versions\n\n{_rows(told['versions'])}",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(told: Mapping[str, Any]) -> str:
    lines = [f"| {key.replace('_', ' ')} | {value} |" for key, value in told.items()]
    return "\n".join(["| what | value |", "|---|---|", *lines])


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
