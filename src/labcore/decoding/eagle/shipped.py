"""The shipped EAGLE-like head for the target, its training, and its card."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from labcore.decoding.eagle.head import EagleHead, load_eagle, save_eagle
from labcore.decoding.eagle.training import eagle_accuracies, fitted_sharpness, train_eagle
from labcore.decoding.medusa.shipped import RECIPE as WORDS
from labcore.decoding.medusa.shipped import own_words
from labcore.decoding.medusa.training import HeadsCurve, HiddenStates, hidden_states, live_states
from labcore.models import Llama, held_out, held_out_sha256, pretrained, shipped_tokenizer
from labcore.models.recipes import corpus, tokens_of

__all__ = [
    "RECIPE",
    "EagleRecipe",
    "eagle_card",
    "export_eagle",
    "pretrained_eagle",
    "trained_eagle",
]

FILES = Path(__file__).parent / "files"
_TARGET = FILES.parents[2] / "models" / "files" / "target" / "model.safetensors"
_HELD_OUT = ("code", "prose")


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
    told: dict[str, Any] = json.loads((FILES / "card.json").read_text("utf-8"))
    return told


def trained_eagle(
    folder: Path, recipe: EagleRecipe = RECIPE, *, progress: bool = True
) -> tuple[EagleHead, list[HeadsCurve], HiddenStates]:
    """Train a head by a recipe; return it, both curves, and the rows kept from training.

    `folder` keeps texts and checkpoints, so an interrupted training can resume.
    """
    backbone = pretrained("target")
    own = folder / "own_words.safetensors"
    words = own_words(
        backbone, tokens_of(corpus(), shipped_tokenizer()), own, WORDS, progress=progress
    )
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
    greedy, warm = (_own_part(kept, turn) for turn in (0, 1))
    stored.sharpness = fitted_sharpness(stored, greedy)
    save_eagle(stored.to(torch.bfloat16), folder)
    stored = load_eagle(folder, backbone)
    count = sum(p.numel() for p in stored.parameters())
    told = {
        "about": "An EAGLE-like head for the target of the course: one decoder layer that drafts "
        "from the target's states and its own features, and leaves the target as it is.",
        "license": "BSD-3-Clause",
        "commit": commit,
        "parameters": count,
        "bytes": 2 * count,
        "data": "the target's own words after beginnings out of its corpus",
        "recipe": asdict(recipe),
        "tokens": [len(curve.losses) * recipe.batch * WORDS.length for curve in curves],
        "last_losses_nats_per_token": [_mean(curve.per_head[-50:]) for curve in curves],
        "sharpness": stored.sharpness,
        "accuracies": {
            "own words, greedy": _rounded(eagle_accuracies(stored, greedy)),
            f"own words, temperature {WORDS.temperature}": _rounded(eagle_accuracies(stored, warm)),
            **{
                kind: _rounded(eagle_accuracies(stored, _held_out(backbone, kind)))
                for kind in _HELD_OUT
            },
        },
        "target_sha256": hashlib.sha256(_TARGET.read_bytes()).hexdigest(),
        "held_out_sha256": {kind: held_out_sha256(kind) for kind in _HELD_OUT},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    text = json.dumps(told, indent=2) + "\n"
    (folder / "card.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(_as_text(told), encoding="utf-8")


def _own_part(kept: HiddenStates, turn: int) -> HiddenStates:
    """Return what the backbone itself wrote, for every other text."""
    rows = kept.tokens[turn::2]
    hidden, first = HiddenStates(rows, None, kept.ahead, kept.backbone), WORDS.prompt - 1
    states = torch.cat([hidden.rows(index)[0] for index in torch.arange(len(rows)).split(32)])
    return HiddenStates(rows[:, first:], states[:, first:], kept.ahead)


def _held_out(backbone: Llama, kind: str) -> HiddenStates:
    return hidden_states(backbone, shipped_tokenizer().encode(held_out(kind)))


def _rounded(shares: Sequence[float]) -> list[float]:
    return [round(one, 4) for one in shares]


def _mean(per_step: list[list[float]]) -> list[float]:
    return _rounded(torch.tensor(per_step).mean(0).tolist())


def _as_text(told: Mapping[str, Any]) -> str:
    """Return the card as Markdown, with the header that model hubs read."""
    plain = {key: value for key, value in told.items() if not isinstance(value, dict)}
    table = "| what | value |\n|---|---|"
    parts = [
        "---\nlicense: bsd-3-clause\nlanguage: en\n---",
        f"# An EAGLE-like head for labcore target\n\n{told['about']}",
        "\n".join(
            [table, *(f"| {key.replace('_', ' ')} | {value} |" for key, value in plain.items())]
        ),
        "## Recipe\n\n"
        + "\n".join([table, *(f"| {key} | {value} |" for key, value in told["recipe"].items())]),
        "## Top-1 accuracy of each step\n\nShares of positions at which the head's likeliest token "
        "is the text's. Step s has the head's own features in place of the last s states.\n\n"
        + "\n".join(
            ["| text | steps |\n|---|---|"]
            + [
                f"| {kind} | {', '.join(f'{share:.3f}' for share in shares)} |"
                for kind, shares in told["accuracies"].items()
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"
