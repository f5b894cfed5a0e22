"""One step under loss scaling, from the gradients of several micro-batches."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["SCALING"]

LIMITS = (0.4, 0.7, 1.2, 1.9)  # a student's; nobody's is 1
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


def _clip(gradient: Tensor, max_norm: float) -> Tensor:
    norm = torch.linalg.vector_norm(gradient)
    return gradient * (max_norm / norm) if norm > max_norm else gradient


def _mean(gradients: Tensor, counts: Tensor, scale: float, max_norm: float, fault: str) -> Tensor:
    """The gradient [P] for the optimizer, of micro-batches [M, P] that have tokens."""
    shares = counts / counts.sum()
    if fault == "mean of the means":
        shares = torch.full_like(shares, 1 / len(shares))
    if fault == "sum of the means":
        shares = torch.ones_like(shares)
    if fault == "unscaled in float16":
        gradients = gradients / scale
        scale = 1.0
    wide = gradients.double()
    if fault == "averaged in float16":
        wide = (gradients * shares[:, None].half()).sum(0, keepdim=True).double()
        shares = torch.ones(1, dtype=torch.float64)
    if fault == "clipped before unscaling":
        return _clip(shares @ wide, max_norm) / scale
    if fault == "each micro-batch clipped":
        return shares @ torch.stack([_clip(one, max_norm) for one in wide / scale])
    mean = shares @ (wide if fault == "never unscaled" else wide / scale)
    if fault == "raised to the limit":
        norm = torch.linalg.vector_norm(mean)
        return mean * (max_norm / norm)
    return mean if fault == "never clipped" else _clip(mean, max_norm)


def _step_wrongly(
    gradients: Tensor,
    tokens: Sequence[int],
    scale: float,
    good: int,
    *,
    max_norm: float,
    patience: int,
    fault: str,
) -> _Step:
    counts = torch.tensor(tokens, dtype=torch.float64)
    used = counts > 0
    if not used.any():
        return None, scale, good
    if fault == "empty micro-batch refused" and not gradients.isfinite().all():
        return None, scale / 2, 0
    chosen, counts = gradients[used], counts[used]
    sound = chosen.isfinite().all(1)
    if fault == "the rest taken" and sound.any():
        chosen, counts, sound = chosen[sound], counts[sound], sound[sound]
    gradient = _mean(chosen, counts, scale, max_norm, fault)
    if not sound.all():
        skipped = gradient if fault == "broken step taken" else None
        kept = {"count goes on": good + 1, "count kept": good}.get(fault, 0)
        return skipped, scale if fault == "scale kept" else scale / 2, kept
    good += 1
    if good < patience + (fault == "one step late"):
        return gradient, scale, good
    return gradient, 2 * scale, good if fault == "count kept at growth" else 0


def _step_cases(seed: int) -> list[dict[str, Any]]:
    """Steps to be clipped, not to be clipped, to be skipped, with an empty micro-batch, empty."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def drawn(scale: float, size: float, count: int) -> Tensor:
        wide = torch.randn(count, 7, generator=generator, dtype=torch.float64)
        # All micro-batches have a direction in common, or else their mean may be short.
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
    reference=scaled_step,
    mistakes=[
        Mistake(name, functools.partial(_step_wrongly, fault=name), hint)
        for name, hint in _HINTS.items()
    ],
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
)
