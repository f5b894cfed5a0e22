"""Cards of the shipped heads that draft for the target."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from labcore.models import shipped
from labcore.models.distilling import OwnWords, own_part
from labcore.models.shipped import card_table
from labcore.models.states import HiddenStates, hidden_states

__all__ = ["card_of_heads", "readme_of_heads"]


def card_of_heads(
    heads: nn.Module,
    losses: Sequence[Sequence[Sequence[float]]],
    measure: Callable[[HiddenStates], object],
    kept: HiddenStates,
    words: OwnWords,
    *,
    about: str,
    data: str,
    commit: str,
    recipe: Any,
    **more: object,
) -> dict[str, Any]:
    """Return the card of bf16 heads that were trained on the shipped target's own words.

    losses: of each training, step by step, each head's mean nats per token. measure: returns the
    accuracies for states. kept: rows of words that weren't trained on. recipe: a dataclass.
    """
    count, length = sum(p.numel() for p in heads.parameters()), kept.tokens.shape[1] - kept.ahead
    last = [torch.tensor(one[-50:]).mean(0).tolist() for one in losses]
    names = ("own words, greedy", f"own words, temperature {words.temperature}")
    texts = {name: own_part(kept, turn, words) for turn, name in enumerate(names)}
    for kind in shipped.HELD_OUT:
        tokens = shipped.shipped_tokenizer().encode(shipped.held_out(kind))
        texts[kind] = hidden_states(shipped.pretrained("target"), tokens, ahead=kept.ahead)
    weights = shipped.FILES / "target" / "model.safetensors"
    return {
        "about": about,
        "license": "BSD-3-Clause",
        "commit": commit,
        "parameters": count,
        "bytes": 2 * count,
        "data": data,
        "recipe": asdict(recipe),
        "tokens": [len(one) * recipe.batch * length for one in losses],
        "last_losses_nats_per_token": [[round(x, 4) for x in means] for means in last],
        **more,
        "accuracies": {name: measure(states) for name, states in texts.items()},
        "target_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "held_out_sha256": {kind: shipped.held_out_sha256(kind) for kind in shipped.HELD_OUT},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def readme_of_heads(told: Mapping[str, Any], *, title: str, each: str, shares: str) -> str:
    """Return the card of heads as Markdown, with the header that model hubs read.

    each: what has an accuracy, a head or a step. shares: explains the accuracies.
    """
    plain = {key: value for key, value in told.items() if not isinstance(value, dict)}
    top = {
        kind: ", ".join(f"{one[0] if isinstance(one, list) else one:.3f}" for one in row)
        for kind, row in told["accuracies"].items()
    }
    parts = [
        "---\nlicense: bsd-3-clause\nlanguage: en\n---",
        f"# {title} for labcore target\n\n{told['about']}",
        card_table({key.replace("_", " "): value for key, value in plain.items()}),
        f"## Recipe\n\n{card_table(told['recipe'])}",
        f"## Top-1 accuracy of each {each}\n\n{shares}\n\n{card_table(top, 'text', f'{each}s')}",
    ]
    return "\n\n".join(parts) + "\n"
