"""Train a shipped model from its recipe, and export the folder to ship with its model card."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from labcore.checks import one_of
from labcore.clipping import clip_by_global_norm
from labcore.data import installed_sources
from labcore.models.checkpoint import from_pretrained, save_pretrained
from labcore.models.distilling import Distillation, greedy_agreement, own_words
from labcore.models.llama import Llama
from labcore.models.recipes import (
    END_OF_TEXT,
    RECIPES,
    corpus,
    learn_tokenizer,
    tokens_of,
)
from labcore.models.shipped import (
    HELD_OUT,
    PROMPTS,
    bits_per_byte,
    card_table,
    held_out,
    held_out_sha256,
    pretrained,
    prompts,
    write_card,
)
from labcore.models.states import HiddenStates, hidden_states, live_states
from labcore.models.tokenizer import Tokenizer
from labcore.models.training import Curve, train
from labcore.optim import AdamW

__all__ = ["checked_commit", "export", "trained"]

Schedule = Callable[[int], float]
Sources = Sequence[tuple[HiddenStates, int]]

BETAS = (0.9, 0.95)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_ABOUT = {
    "target": "The larger of two models: the one whose tokens speculative decoding gives.",
    "draft": "The smaller of two models: the one that guesses what the target will say. Trained on "
    "the corpus, then distilled on the target's own words.",
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
    optimizer = _optimizer(model, recipe.rate, recipe.decay)
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
    if recipe.distilled is not None:
        model.load_state_dict({key: one.bfloat16() for key, one in model.state_dict().items()})
        curve = distilled(name, model, tokens, folder, compiled=compiled, progress=progress)
    return model, curve


def distilled(
    name: str,
    model: Llama,
    tokens: Tensor,
    folder: Path,
    *,
    compiled: bool = False,
    progress: bool = True,
) -> Curve:
    """Distill the shipped target into a recipe's model, in place; return the curve.

    model: trained on the corpus. tokens: the corpus, integers [N]. `folder` keeps the target's own
    words, its states there (460 MB) and the checkpoint, so an interrupted training can resume.
    Raises ValueError for a recipe without this training.
    """
    recipe = RECIPES[one_of("shipped model", name, RECIPES)]
    told = recipe.distilled
    if told is None:
        raise ValueError("recipe must say how to distill, got None; set distilled")
    target = pretrained("target")
    words = own_words(
        target, tokens, folder / "own_words.safetensors", told.words, progress=progress
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        states = hidden_states(
            target,
            words,
            length=words.shape[1] - 1,
            ahead=1,
            path=folder / "states_own_words.bin",
            progress=progress,
        )
        own = states.part(0, len(states) - told.words.kept)
        long = live_states(target, tokens, length=told.long_length, ahead=1)
        head = (target.lm_head or target.embed_tokens).weight

        def learn(
            part: str, steps: int, rate: float, schedule: Schedule, sources: Sources
        ) -> Curve:
            lessons = Distillation(sources, head, seed=told.seed, compiled=compiled)
            return train(
                model,
                lessons.batches,
                _optimizer(model, rate, recipe.decay),
                steps=steps,
                accumulate=len(sources),
                loss=lessons.loss,
                clip=lambda parameters: clip_by_global_norm(parameters, recipe.clip).norm,
                schedule=schedule,
                checkpoint=folder / f"{name}{part}.pt",
                progress=progress,
            )

        learn("_short", told.steps, told.rate, told.schedule, [(own, told.batch)])
        both = [(own, told.batch // 2), (long, told.long_batch)]
        return learn("_long", told.long_steps, told.long_rate, told.long_schedule, both)


def _optimizer(model: Llama, rate: float, decay: float) -> AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    return AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}],
        lr=rate,
        betas=BETAS,
        weight_decay=decay,
    )


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
    later = []
    if recipe.distilled is not None:
        later = [_finished(name, folder, part)[1] for part in ("_short", "_long")]
        model, _ = _finished(name, folder, "_long")
    place = folder / name
    save_pretrained(model.to(torch.bfloat16), place)
    (place / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
    length = recipe.config.max_position_embeddings
    Tokenizer.from_pretrained(folder / "tokenizer.json").save(place, end=END_OF_TEXT, length=length)
    _write_json(
        place / "generation_config.json",
        {
            "bos_token_id": recipe.config.bos_token_id,
            "eos_token_id": recipe.config.eos_token_ids[0],
            "pad_token_id": recipe.config.eos_token_ids[0],
        },
    )
    told = _card(name, place, curve, commit)
    if later:
        told["distillation"] = _distillation(name, place, later)
    write_card(place, told, _as_text(told))
    return place


def _finished(name: str, folder: Path, part: str = "") -> tuple[Llama, Curve]:
    """Return the model of a finished training's checkpoint, and its curve.

    part: "" for the training on the corpus, "_short" and "_long" for the parts of a distillation.
    """
    recipe, file = RECIPES[name], folder / f"{name}{part}.pt"
    steps = recipe.steps
    if part and recipe.distilled is not None:
        steps = recipe.distilled.steps if part == "_short" else recipe.distilled.long_steps
    again = f"python -m labcore.models.ship {name} --out {folder}"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {file.name}; run `{again}` to train it")
    told = torch.load(file, map_location="cpu", weights_only=True)
    curve = Curve(**told["curve"])
    if len(curve.losses) != steps:
        raise ValueError(
            f"a model can be exported only after all of its {steps:,} steps, {file.name} "
            f"has {len(curve.losses):,}; run `{again}` to finish the training"
        )
    model = Llama(recipe.config)
    model.load_state_dict(told["model"])
    return model.eval(), curve


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


def _distillation(name: str, place: Path, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return what a card says about the second training, and the acceptance after it."""
    recipe = RECIPES[name].distilled
    if recipe is None:
        raise ValueError(f"recipe {name!r} must have a second training, got none")
    tokenizer = Tokenizer.from_pretrained(place)
    target, draft = pretrained("target"), from_pretrained(place, dtype=torch.float32)
    rows = {f"prompts, {kind}": [*map(tokenizer.encode, prompts(kind))] for kind in PROMPTS}
    for kind in HELD_OUT:
        rows[f"held-out {kind}"] = _windows(tokenizer.encode(held_out(kind)))
    for source in installed_sources():
        label = f"{source.package} {source.version}, {source.file}"
        rows[label] = _windows(tokenizer.encode(source.text))
    return {
        "what": "the target's own words: beginnings out of the corpus as it continues them, "
        "alternately greedily and at the temperature",
        "loss": "cross entropy against the target's distribution at each token",
        **asdict(recipe.words),
        "steps": recipe.steps,
        "tokens": sum(sum(curve.tokens) for curve in curves),
        "batch": recipe.batch,
        "rate": recipe.rate,
        "warmup": recipe.warmup,
        "long_steps": recipe.long_steps,
        "long_batch": recipe.long_batch,
        "long_length": recipe.long_length,
        "long_rate": recipe.long_rate,
        "seed": recipe.seed,
        "words_seed": recipe.words.seed,
        "last_losses_nats_per_token": [
            round(sum(curve.losses[-100:]) / len(curve.losses[-100:]), 4) for curve in curves
        ],
        "acceptance": {
            text: round(greedy_agreement(target, draft, given), 4) for text, given in rows.items()
        },
    }


def _windows(tokens: list[int], count: int = 16, length: int = 64) -> list[list[int]]:
    """Return `count` stretches of a text, equally far apart."""
    step = (len(tokens) - length) // count
    return [tokens[n * step : n * step + length] for n in range(count)]


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
        *_distilled_text(told.get("distillation")),
        "## Held-out text\n\nCode and prose that were written for the course, measured with the "
        "stored weights by `labcore.models.bits_per_byte`.",
        *(f"### {kind}\n\n{_rows(one)}" for kind, one in told["held_out"].items()),
        f"## Versions\n\n{_rows(told['versions'])}",
    ]
    return "\n\n".join(parts) + "\n"


def _distilled_text(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    plain = {key: value for key, value in told.items() if key != "acceptance"}
    return [
        "## Distillation\n\nThe last `long_steps` have half as many rows of own words, and "
        "`long_batch` rows of `long_length` tokens of the corpus, which keep the positions that "
        f"own words don't reach.\n\n{_rows(plain)}",
        "### Acceptance\n\nThe share of the target's greedy tokens that are the draft's first "
        "choice, over 64 tokens after each prompt; of a longer text, after 16 stretches of 64 "
        "tokens.\n\n" + _rows(told["acceptance"]),
    ]


def _rows(told: Mapping[str, Any]) -> str:
    return card_table({key.replace("_", " "): value for key, value in told.items()})


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
