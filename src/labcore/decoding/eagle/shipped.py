"""The shipped EAGLE-like head for the target, its training, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labcore.decoding.cards import card_of_heads, readme_of_heads
from labcore.decoding.eagle.head import EagleHead, load_eagle, save_eagle
from labcore.decoding.eagle.training import eagle_accuracies, fitted_sharpness, train_eagle
from labcore.decoding.medusa.shipped import RECIPE as WORDS
from labcore.decoding.medusa.training import HeadsCurve, HiddenStates, live_states
from labcore.models import Llama, pretrained, shipped_tokenizer
from labcore.models.distilling import own_part, own_words
from labcore.models.recipes import corpus, tokens_of
from labcore.models.shipped import read_card, write_card

__all__ = [
    "RECIPE",
    "EagleRecipe",
    "eagle_card",
    "export_eagle",
    "pretrained_eagle",
    "trained_eagle",
]

FILES = Path(__file__).parent / "files"


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleRecipe:
    """The training of the shipped head, twice in a row on the target's own words.

    The words are those of the Medusa heads' recipe: prompts from the target's corpus, continued
    alternately greedily and at a temperature. The first training unrolls nothing: every pair has
    the target's state. The second is training-time test over `unroll` steps. The last `calibration`
    rows aren't trained on; sharpness and accuracies are measured there.
    """

    batch: int = 8
    decay: float = 0.8
    seed: int = 3
    steps: int = 500
    rate: float = 2e-3
    warmup: int = 30
    unroll: int = 3
    unrolled_steps: int = 750
    unrolled_rate: float = 1.5e-3
    unrolled_warmup: int = 20
    calibration: int = 256


RECIPE = EagleRecipe()


def pretrained_eagle(
    backbone: Llama | None = None, *, dtype: torch.dtype = torch.float32
) -> EagleHead:
    """Return the shipped head, in evaluation mode; it's stored in bfloat16.

    backbone: the shipped target, whose embedding and projection it shares; None loads it.
    Raises FileNotFoundError for an installation without the weights.
    """
    if not (FILES / "eagle_config.json").is_file():
        raise FileNotFoundError(
            "this installation has no EAGLE-like head; run `python -m "
            "labcore.decoding.eagle.train --out FOLDER --commit COMMIT` and copy the files in "
            f"FOLDER/head to {FILES}"
        )
    return load_eagle(FILES, backbone or pretrained("target", dtype=dtype), dtype=dtype)


def eagle_card() -> dict[str, Any]:
    """Return what is known about the shipped head: data, training, accuracies, license.

    accuracies: for each step, the share of positions at which its likeliest token is the text's, on
    the target's own words that were kept from training and on the held-out texts. README.md next to
    the weights says the same.
    """
    return read_card(FILES)


def trained_eagle(
    folder: Path, recipe: EagleRecipe = RECIPE, *, progress: bool = True
) -> tuple[EagleHead, list[HeadsCurve], HiddenStates]:
    """Train a head by a recipe; return it, both curves, and the rows kept from training.

    `folder` keeps texts and checkpoints, so an interrupted training can resume.
    """
    backbone = pretrained("target")
    own = folder / "own_words.safetensors"
    text = tokens_of(corpus(), shipped_tokenizer())
    words = own_words(backbone, text, own, WORDS.own_words, progress=progress)
    head, split = EagleHead(backbone), len(words) - recipe.calibration
    states = live_states(backbone, words[:split], length=WORDS.length, ahead=WORDS.ahead)
    curves = []
    for turn, (unroll, steps, rate, warmup) in enumerate(
        (
            (1, recipe.steps, recipe.rate, recipe.warmup),
            (recipe.unroll, recipe.unrolled_steps, recipe.unrolled_rate, recipe.unrolled_warmup),
        )
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            curve = train_eagle(
                head,
                states,
                steps=steps,
                unroll=unroll,
                batch=recipe.batch,
                rate=rate,
                warmup=warmup,
                decay=recipe.decay,
                seed=recipe.seed + turn,
                checkpoint=folder / f"eagle_{unroll}.pt",
                progress=progress,
            )
        curves.append(curve)
    kept = live_states(backbone, words[split:], length=WORDS.length, ahead=WORDS.ahead)
    return head, curves, kept


def export_eagle(
    head: EagleHead,
    curves: Sequence[HeadsCurve],
    kept: HiddenStates,
    folder: Path,
    *,
    commit: str,
    recipe: EagleRecipe = RECIPE,
) -> None:
    """Write the shipped form of a trained head to `folder`: bf16 weights and their card.

    Sharpness and accuracies are those of the written weights. commit: of the training code.
    """
    save_eagle(head.to(torch.bfloat16), folder)
    backbone = pretrained("target")
    stored = load_eagle(folder, backbone)
    stored.sharpness = fitted_sharpness(stored, own_part(kept, 0, WORDS.own_words))
    save_eagle(stored.to(torch.bfloat16), folder)
    stored = load_eagle(folder, backbone)
    told = card_of_heads(
        stored,
        [curve.per_head for curve in curves],
        lambda states: [round(one, 4) for one in eagle_accuracies(stored, states)],
        kept,
        WORDS.own_words,
        about="An EAGLE-like head for the target of the course: one decoder layer that drafts "
        "from the target's states and its own features, and leaves the target as it is.",
        data="the target's own words after beginnings out of its corpus",
        commit=commit,
        recipe=recipe,
        sharpness=stored.sharpness,
    )
    text = readme_of_heads(
        told,
        title="An EAGLE-like head",
        each="step",
        shares="Shares of positions at which the head's likeliest token is the text's. Step s has "
        "the head's own features in place of the last s states.",
    )
    write_card(folder, told, text)
