"""The shipped Medusa heads for the target, their training, and their card."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labcore.decoding.medusa.heads import MedusaHeads, load_heads, save_heads
from labcore.decoding.medusa.training import (
    HeadsCurve,
    HiddenStates,
    head_accuracies,
    hidden_states,
    train_heads,
)
from labcore.models import Llama, held_out, held_out_sha256, pretrained, shipped_tokenizer
from labcore.models.distilling import OwnWords
from labcore.models.distilling import own_words as continued
from labcore.models.recipes import corpus, tokens_of

__all__ = [
    "RECIPE",
    "HeadsRecipe",
    "export_heads",
    "heads_card",
    "own_words",
    "pretrained_heads",
    "trained_heads",
]

FILES = Path(__file__).parent / "files"
_TARGET = FILES.parents[2] / "models" / "files" / "target" / "model.safetensors"
_HELD_OUT = ("code", "prose")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsRecipe:
    """The shape and the training of the shipped heads, which are trained twice in a row.

    The first training reads the backbone's corpus, in rows of `length` tokens. The second reads the
    backbone's own text, which is what the heads will have to predict: `rows` prompts of `prompt`
    tokens from the corpus, continued alternately greedily and at `temperature`. The last
    `calibration` rows of each are not trained on; the accuracies that choose a tree are measured
    there.
    """

    heads: int = 4
    layers: int = 1
    projection: str = "full"
    rank: int = 64
    length: int = 256
    ahead: int = 5
    batch: int = 16
    decay: float = 0.8
    seed: int = 3
    steps: int = 1_200
    rate: float = 3e-3
    warmup: int = 100
    rows: int = 3_456
    prompt: int = 64
    temperature: float = 0.7
    own_steps: int = 600
    own_rate: float = 1e-3
    own_warmup: int = 20
    calibration: int = 256


RECIPE = HeadsRecipe()
OWN_WORDS = ("own words, greedy", "own words, temperature 0.7")
"""Names of the accuracies that trees are made from, one for each kind of continuation in turn."""


def pretrained_heads(
    backbone: Llama | None = None, *, dtype: torch.dtype = torch.float32
) -> MedusaHeads:
    """Return the shipped heads, in evaluation mode; they are stored in bfloat16.

    backbone: the shipped target, whose projection they share; None loads it.
    Raises FileNotFoundError for an installation without the weights.
    """
    if not (FILES / "medusa_config.json").is_file():
        raise FileNotFoundError(
            "this installation has no Medusa heads; run `python -m labcore.decoding.medusa.train "
            f"--out FOLDER --commit COMMIT` and copy the files in FOLDER/heads to {FILES}"
        )
    return load_heads(FILES, backbone or pretrained("target", dtype=dtype), dtype=dtype)


def heads_card() -> dict[str, Any]:
    """Return what is known about the shipped heads: data, training, accuracies, license.

    accuracies: for each head, the shares of positions at which its token of rank 0, 1, ... is the
    text's. They are measured on the target's own text that was held out from training, from which
    trees are made, and on the held-out texts. README.md next to the weights says the same.
    """
    told: dict[str, Any] = json.loads((FILES / "card.json").read_text("utf-8"))
    return told


def trained_heads(
    folder: Path, recipe: HeadsRecipe = RECIPE, *, progress: bool = True
) -> tuple[MedusaHeads, list[HeadsCurve], HiddenStates]:
    """Train heads by a recipe; return them, both curves, and the held-out rows of own text.

    `folder` keeps texts, states (2.5 GB) and checkpoints, so an interrupted training can resume.
    """
    backbone = pretrained("target")
    heads = MedusaHeads(
        backbone,
        heads=recipe.heads,
        layers=recipe.layers,
        projection=recipe.projection,
        rank=recipe.rank,
    )
    corpus_tokens = tokens_of(corpus(), shipped_tokenizer())
    own = own_words(
        backbone, corpus_tokens, folder / "own_words.safetensors", recipe, progress=progress
    )
    curves, kept = [], None
    for name, tokens, steps, rate, warmup in (
        ("corpus", corpus_tokens, recipe.steps, recipe.rate, recipe.warmup),
        ("own_words", own, recipe.own_steps, recipe.own_rate, recipe.own_warmup),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            states = hidden_states(
                backbone,
                tokens,
                length=recipe.length,
                ahead=recipe.ahead,
                path=folder / f"states_{name}.bin",
                progress=progress,
            )
            read, kept = _parts(states, recipe.calibration)
            curve = train_heads(
                heads,
                read,
                steps=steps,
                batch=recipe.batch,
                rate=rate,
                warmup=warmup,
                decay=recipe.decay,
                seed=recipe.seed,
                checkpoint=folder / f"heads_{name}.pt",
                progress=progress,
            )
        curves.append(curve)
    if kept is None:
        raise RuntimeError("a recipe has two trainings, got none")
    return heads, curves, kept


def own_words(
    backbone: Llama,
    corpus_tokens: Tensor,
    path: Path,
    recipe: HeadsRecipe,
    *,
    progress: bool = True,
) -> Tensor:
    """Return prompts from the corpus as the backbone continues them: int64 [rows, length + ahead].

    corpus_tokens: integers [N]. path: the file that has the texts, or will.
    """
    asked = OwnWords(
        rows=recipe.rows,
        prompt=recipe.prompt,
        width=recipe.length + recipe.ahead,
        temperature=recipe.temperature,
        seed=recipe.seed,
        kept=recipe.calibration,
    )
    return continued(backbone, corpus_tokens, path, asked, progress=progress)


def export_heads(
    heads: MedusaHeads,
    curves: Sequence[HeadsCurve],
    calibration: HiddenStates,
    folder: Path,
    *,
    commit: str,
    recipe: HeadsRecipe = RECIPE,
) -> None:
    """Write the shipped form of trained heads to `folder`: bf16 weights and their card.

    Accuracies are those of the written weights. commit: of the training code.
    """
    save_heads(heads.to(torch.bfloat16), folder)
    backbone = pretrained("target")
    stored = load_heads(folder, backbone)
    told = {
        "about": "Medusa heads for the target of the course: they say the tokens 2 to "
        f"{recipe.heads + 1} places ahead from its state, and leave the target as it is.",
        "license": "BSD-3-Clause",
        "commit": commit,
        "parameters": sum(p.numel() for p in stored.parameters()),
        "bytes": sum(2 * p.numel() for p in stored.parameters()),
        "data": "the corpus of the target, then the target's own words behind beginnings out of it",
        "recipe": asdict(recipe),
        "tokens": [len(curve.losses) * recipe.batch * recipe.length for curve in curves],
        "last_losses_nats_per_token": [_mean(curve.per_head[-50:]) for curve in curves],
        "accuracies": {
            **{
                name: _rounded(head_accuracies(stored, _own_part(calibration, turn, recipe)))
                for turn, name in enumerate(OWN_WORDS)
            },
            **{kind: _rounded(_on_held_out(stored, backbone, kind)) for kind in _HELD_OUT},
        },
        "target_sha256": hashlib.sha256(_TARGET.read_bytes()).hexdigest(),
        "held_out_sha256": {kind: held_out_sha256(kind) for kind in _HELD_OUT},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    text = json.dumps(told, indent=2) + "\n"
    (folder / "card.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(_as_text(told), encoding="utf-8")


def _parts(states: HiddenStates, calibration: int) -> tuple[HiddenStates, HiddenStates]:
    """Split off the last `calibration` rows."""
    if states.hidden is None:
        raise ValueError("states must be stored to be split, got live ones; use hidden_states")
    split = len(states) - calibration
    tokens, hidden = states.tokens, states.hidden
    return (
        HiddenStates(tokens[:split], hidden[:split], states.ahead),
        HiddenStates(tokens[split:], hidden[split:], states.ahead),
    )


def _own_part(kept: HiddenStates, turn: int, recipe: HeadsRecipe) -> HiddenStates:
    """Return what the backbone itself wrote, for every other text."""
    if kept.hidden is None:
        raise ValueError("states must be stored to be split, got live ones; use hidden_states")
    first = recipe.prompt - 1
    return HiddenStates(kept.tokens[turn::2, first:], kept.hidden[turn::2, first:], kept.ahead)


def _on_held_out(heads: MedusaHeads, backbone: Llama, kind: str) -> Tensor:
    tokens = shipped_tokenizer().encode(held_out(kind))
    return head_accuracies(heads, hidden_states(backbone, tokens, ahead=heads.heads + 1))


def _rounded(accuracies: Tensor) -> list[list[float]]:
    return [[round(one, 5) for one in row] for row in accuracies.tolist()]


def _mean(per_head: list[list[float]]) -> list[float]:
    return [round(one, 4) for one in torch.tensor(per_head).mean(0).tolist()]


def _as_text(told: Mapping[str, Any]) -> str:
    """Return the card as Markdown, with the header that model hubs read."""
    plain = {key: value for key, value in told.items() if not isinstance(value, dict)}
    rows = [f"| {key.replace('_', ' ')} | {value} |" for key, value in plain.items()]
    recipe = [f"| {key} | {value} |" for key, value in told["recipe"].items()]
    top = [
        f"| {kind} | {', '.join(f'{row[0]:.3f}' for row in found)} |"
        for kind, found in told["accuracies"].items()
    ]
    table = "| what | value |\n|---|---|"
    return (
        "\n\n".join(
            [
                "---\nlicense: bsd-3-clause\nlanguage: en\n---",
                f"# Medusa heads for labcore target\n\n{told['about']}",
                "\n".join([table, *rows]),
                "## Recipe\n\n" + "\n".join([table, *recipe]),
                "## Top-1 accuracy of each head\n\nShares of places at which the head's first "
                "token is the text's: of the target's own words that were kept from training, and "
                "of texts that were written for the course.\n\n"
                + "\n".join(["| text | heads |\n|---|---|", *top]),
            ]
        )
        + "\n"
    )
