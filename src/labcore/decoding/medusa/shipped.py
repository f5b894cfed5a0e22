"""The shipped Medusa heads for the target, their training, and their card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labcore.decoding.cards import card_of_heads, readme_of_heads
from labcore.decoding.medusa.heads import MedusaHeads, load_heads, save_heads
from labcore.decoding.medusa.training import (
    HeadsCurve,
    HiddenStates,
    head_accuracies,
    hidden_states,
    train_heads,
)
from labcore.models import Llama, pretrained, shipped_tokenizer
from labcore.models.distilling import OwnWords, own_words
from labcore.models.recipes import corpus, tokens_of
from labcore.models.shipped import read_card, write_card

__all__ = [
    "RECIPE",
    "HeadsRecipe",
    "export_heads",
    "heads_card",
    "pretrained_heads",
    "trained_heads",
]

FILES = Path(__file__).parent / "files"


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

    @property
    def own_words(self) -> OwnWords:
        """What the backbone continues for the second training."""
        return OwnWords(
            rows=self.rows,
            prompt=self.prompt,
            width=self.length + self.ahead,
            temperature=self.temperature,
            seed=self.seed,
            kept=self.calibration,
        )


RECIPE = HeadsRecipe()


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
    return read_card(FILES)


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
    file = folder / "own_words.safetensors"
    own = own_words(backbone, corpus_tokens, file, recipe.own_words, progress=progress)
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
            split = len(states) - recipe.calibration
            kept = states.part(split, len(states))
            curve = train_heads(
                heads,
                states.part(0, split),
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
    stored = load_heads(folder, pretrained("target"))
    told = card_of_heads(
        stored,
        [curve.per_head for curve in curves],
        lambda states: [
            [round(one, 5) for one in row] for row in head_accuracies(stored, states).tolist()
        ],
        calibration,
        recipe.own_words,
        about="Medusa heads for the target of the course: they say the tokens 2 to "
        f"{recipe.heads + 1} places ahead from its state, and leave the target as it is.",
        data="the corpus of the target, then the target's own words behind beginnings out of it",
        commit=commit,
        recipe=recipe,
    )
    text = readme_of_heads(
        told,
        title="Medusa heads",
        each="head",
        shares="Shares of places at which the head's first token is the text's: of the target's "
        "own words that were kept from training, and of texts that were written for the course.",
    )
    write_card(folder, told, text)
