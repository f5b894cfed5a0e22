"""One step under loss scaling, from the gradients of several micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["SCALING"]

LIMITS = (0.4, 0.7, 1.2, 1.9)  # student 0 has 1
_Step = tuple[Tensor | None, float, int]


def scaled_step(
    gradients: Tensor,
    tokens: Sequence[int],
    scale: float,
    good: int,
    *,
    max_norm: float,
    patience: int,
) -> _Step:
    """The gradient [P] for the optimizer, or None, the next scale and the next count."""
    counts = torch.tensor(tokens, dtype=torch.float64)
    used = counts > 0
    if not used.any():
        return None, scale, good
    chosen = gradients[used].double()
    if not chosen.isfinite().all():
        return None, scale / 2, 0
    shares = counts[used] / counts.sum()
    mean = shares @ (chosen / scale)
    norm = torch.linalg.vector_norm(mean).item()
    clipped = mean * (max_norm / norm) if norm > max_norm else mean
    good += 1
    return (clipped, 2 * scale, 0) if good >= patience else (clipped, scale, good)


def _step_cases(seed: int) -> list[dict[str, Any]]:
    """Steps that are clipped, unclipped, skipped, with an empty micro-batch, and empty."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def drawn(scale: float, size: float, count: int) -> Tensor:
        wide = torch.randn(count, 7, generator=generator, dtype=torch.float64)
        # A common direction keeps the mean of the micro-batches from being short.
        return (scale * size * (wide.clamp(-2.5, 2.5) + 1.5)).half()

    def case(gradients: Tensor, tokens: Sequence[int], scale: float, good: int) -> dict[str, Any]:
        return {"gradients": gradients, "tokens": tokens, "scale": scale, "good": good}

    patience = chance.randint(4, 9)
    tokens = [[chance.randint(5, 60), chance.randint(200, 400), 90] for _ in range(3)]
    overflow, empty = drawn(4096.0, 1.0, 3), drawn(1024.0, 1.5, 4)
    overflow[chance.randrange(3), chance.randrange(7)] = chance.choice((torch.inf, -torch.inf))
    empty[1] = torch.nan
    cases = [
        case(drawn(2048.0, 2.0, 3), tokens[0], 2048.0, 2),
        case(drawn(16384.0, 3e-6, 3), tokens[1], 16384.0, patience - 1),
        case(overflow, tokens[2], 4096.0, patience - 1),
        case(empty, [tokens[0][0], 0, *tokens[1][1:]], 1024.0, 1),
        case(torch.full((2, 7), torch.nan, dtype=torch.float16), [0, 0], 512.0, patience - 1),
    ]
    return [{**one, "patience": patience} for one in cases]


_EDITS: dict[str, Change] = {
    "clipped before unscaling": [
        ("chosen / scale", "chosen"),
        ("good += 1", "clipped = clipped / scale\n    good += 1"),
    ],
    "never unscaled": ("chosen / scale", "chosen"),
    "never clipped": ("mean * (max_norm / norm) if norm > max_norm else mean", "mean"),
    "each micro-batch clipped": (
        "(chosen / scale)",
        "torch.stack([one * (max_norm / one.norm()).clamp(max=1) for one in chosen / scale])",
    ),
    "mean of the means": ("shares @ (chosen / scale)", "(chosen / scale).mean(0)"),
    "sum of the means": ("shares @ (chosen / scale)", "(chosen / scale).sum(0)"),
    "unscaled in float16": ("chosen / scale", "(gradients[used] / scale).double()"),
    "averaged in float16": (
        "shares @ (chosen / scale)",
        "(gradients[used] * shares[:, None].half()).sum(0).double() / scale",
    ),
    "raised to the limit": (" if norm > max_norm else mean", ""),
    "broken step taken": [
        ("    if not chosen.isfinite().all():\n        return None, scale / 2, 0\n", ""),
        (
            "good += 1",
            "if not chosen.isfinite().all():\n        return clipped, scale / 2, 0\n    good += 1",
        ),
    ],
    "the rest taken": [
        ("counts > 0", "(counts > 0) & gradients.isfinite().all(1)"),
        ("counts.sum()", "counts[used].sum()"),
    ],
    "empty micro-batch refused": ("chosen.isfinite()", "gradients.isfinite()"),
    "scale kept": ("scale / 2, 0", "scale, 0"),
    "count goes on": ("scale / 2, 0", "scale / 2, good + 1"),
    "count kept": ("scale / 2, 0", "scale / 2, good"),
    "one step late": ("good >= patience", "good > patience"),
    "count kept at growth": ("2 * scale, 0", "2 * scale, good"),
}
_HINTS = {
    "clipped before unscaling": "You compare the norm of the scaled gradient with `max_norm`: "
    "clipped to it and then divided by the scale, next to nothing is left of the step.",
    "never unscaled": "Your gradient is that of loss times scale; the optimizer needs the loss's.",
    "never clipped": "Your gradient is the right mean, but not clipped.",
    "each micro-batch clipped": "You clip each micro-batch, and then take the mean. How the batch "
    "is cut would then change the step; only the mean belongs to `max_norm`.",
    "mean of the means": "Each micro-batch counts alike, however few tokens it has. A token of a "
    "short one then weighs more than one of a long one.",
    "sum of the means": "You add the micro-batches' gradients. Each belongs to a mean loss, so the "
    "sum grows with their number.",
    "unscaled in float16": "You divide by the scale in float16. What is small there, for which the "
    "loss was scaled, is lost again.",
    "averaged in float16": "You take the mean in float16, with three digits. Widen first.",
    "raised to the limit": "Where the mean gradient is shorter than `max_norm`, yours has just "
    "that length. Clipping never scales up.",
    "broken step taken": "A step with an infinite or NaN element is handed to the optimizer. It "
    "would make the weights NaN.",
    "the rest taken": "You leave out the micro-batch that overflowed and take the others. Here the "
    "whole step is left out.",
    "empty micro-batch refused": "A micro-batch without tokens has NaN for a gradient, and you "
    "leave the whole step out. It says nothing about the scale, and counts nowhere.",
    "scale kept": "After an overflow your scale stays where it is, so that the next step overflows "
    "as well.",
    "count goes on": "A step that was left out counts as a good one.",
    "count kept": "After a step that was left out the count stays as it was. Good steps are "
    "counted from the last change of the scale on.",
    "one step late": "The count has reached `patience` and your scale has not grown. It grows "
    "with the step that makes the count so large, not with the next one.",
    "count kept at growth": "When the scale has grown, your count stays, so that it would grow "
    "again at the very next step.",
}

SCALING = Exercise(
    id="clipping.scaling",
    points=6,
    reference=scaled_step,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_step_cases,
    variant=lambda student: {
        "max_norm": random.Random(f"scaling:{student}").choice(LIMITS) if student else 1.0
    },
    returns=("gradient", "scale", "count"),
    explanation="The order is forced. Whether anything overflowed must be asked of what the "
    "backward pass wrote, before a weight or a clipping factor touches it: max_norm / inf is 0, "
    "and 0 · inf is NaN. The limit is a length of the true gradient, so unscaling comes before the "
    "norm, and in a wide dtype, since in float16 it would undo what the scale was for. The batch's "
    "gradient is the mean over tokens, and only that is clipped. A micro-batch without "
    "tokens is 0/0 and no overflow; taken for one, it would halve the scale at every such batch.",
    hints=(
        "Add a micro-batch of 0 tokens, with a gradient of NaN, to the example. What comes back, "
        "and what if an element of another micro-batch is infinite?",
        "Select the micro-batches with tokens, convert them to float64, and check that all of "
        "their elements are finite. Then average them, weighted by their tokens, divide by the "
        "scale, and clip this mean once, since `max_norm` is a limit for the mean without its "
        "scale.",
        "`mean = (counts[used] / counts.sum()) @ (gradients[used].double() / scale)` is the "
        "gradient before clipping, where `counts` is `torch.tensor(tokens, dtype=torch.float64)` "
        "and `used` is `counts > 0`.",
    ),
)
