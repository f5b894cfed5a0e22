"""Weight each part's loss so that parts on several devices add up to one batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["LOSS_FACTORS"]

IGNORED = -100
VOCABULARY = 6  # small enough that token 0 occurs among the labels
_Parts = Sequence[Sequence[Tensor]]
_Factors = list[list[float | None]]


def loss_factors(labels: _Parts, weights: _Parts | None) -> _Factors:
    """Return the factor of each part's mean loss, or None if the part predicts nothing."""
    del weights
    counts = [[int((part[:, 1:] != -100).sum()) for part in parts] for parts in labels]
    total = sum(map(sum, counts))
    devices = len(labels)
    return [[devices * n / total if n else None for n in parts] for parts in counts]


def _steps(seed: int) -> list[dict[str, Any]]:
    """Draw steps on 1 to 3 devices; some parts predict nothing, and so does the whole last step."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def part(share: float) -> Tensor:
        shape = (chance.randint(2, 4), chance.randint(7, 12))
        drawn = torch.randint(0, VOCABULARY, shape, generator=generator)
        labels = drawn.where(torch.rand(shape, generator=generator) < share, IGNORED)
        labels[0, :3] = torch.tensor([1, 0, 3])  # each part predicts a 0 and a 3
        return labels

    def nothing(*shape: int) -> Tensor:
        return torch.full(shape, IGNORED)

    first_alone = nothing(3, 5)
    first_alone[1, 0] = 2
    steps = [
        [[part(0.9), part(0.1), part(0.6)]],
        [[part(0.8), part(0.1)], [part(0.5), part(1.0), part(0.9)], [part(0.4)]],
        [[part(0.9), nothing(2, 7)], [first_alone, part(0.3), part(0.7)]],
        [[part(0.5)], [nothing(4, 3), nothing(1, 5)]],
        [[nothing(2, 4)], [first_alone.clone()]],
    ]
    return [{"labels": step, "weights": None} for step in steps]


_MISTAKES = [
    Mistake("mean of means", ("devices * n / total", "1 / len(parts)"),
            "Each part of a device counts alike, however few tokens it predicts. A token of a "
            "short part then weighs more than one of a long part."),
    Mistake("mean of the means there are", ("devices * n / total", "1 / sum(map(bool, parts))"),
            "Each part of a device that predicts something counts alike, however much that is. A "
            "token of a short part then weighs more than one of a long part."),
    Mistake("sum of means", ("devices * n / total", "1.0"),
            "Your factors are all 1: the gradient grows with the number of parts."),
    Mistake("each device by itself",
            ("devices * n / total", "devices * n / max(sum(parts) / devices, 1)"),
            "You divide by the tokens of the part's own device. A token on a device with few of "
            "them then weighs more than one elsewhere."),
    Mistake("own tokens, averaged", ("devices * n / total", "n / sum(parts)"),
            "You divide by the tokens of the part's own device and leave the rest to the "
            "averaging. Each device then weighs the same, however few tokens it predicts."),
    Mistake("average left in", ("devices * n / total", "n / total"),
            "Your gradient is too small by the number of devices. After the backward passes their "
            "gradients are not added but averaged."),
    Mistake("average taken twice", ("devices * n / total", "n / total / devices"),
            "Your gradient is too small by the square of the number of devices. The averaging over "
            "devices happens without you; your factor must undo it."),
    Mistake("for sums", ("devices * n / total", "devices / total"),
            "Your factors are for parts whose losses are sums. A part's loss here is a mean, "
            "divided by the tokens of the part already."),
    Mistake("not shifted", ("part[:, 1:]", "part"),
            "You count the first label of each row. No token stands before it, so the model does "
            "not predict it."),
    Mistake("the last left out", ("part[:, 1:]", "part[:, :-1]"),
            "You leave out the last label of each row. It is the first one that has nothing before "
            "it to be predicted from."),
    Mistake("ignored counted", ("int((part[:, 1:] != -100).sum())", "part[:, 1:].numel()"),
            "You count the labels that are -100. They are predicted from nothing and for nothing."),
    Mistake("rows counted", ("!= -100).sum()", "!= -100).any(1).sum()"),
            "You count rows. The loss is a mean over tokens, and rows differ in them."),
    Mistake("zero is no token", ("!= -100", "> 0"),
            "You leave out labels of 0. That is a token like the others; -100 alone is ignored."),
    Mistake("zero for none", ("else None", "else 0.0"),
            "A part that predicts nothing gets the factor 0. Its mean is 0/0, and 0 times NaN is "
            "NaN: such a part is to be left out, None."),
]  # fmt: skip

LOSS_FACTORS = Exercise(
    id="memory.loss_factors",
    points=6,
    beyond=2,
    reference=loss_factors,
    mistakes=_MISTAKES,
    cases=_steps,
    rtol=1e-9,
    explanation="A mean is not additive; a sum is. Each part's mean is its sum divided by its own "
    "tokens, so multiplied by them it is the sum again, and all of them together are divided once, "
    "by the tokens of the whole step. They must be counted before the first backward, on all "
    "devices: in a real run by an all-reduce of one number. The gradients are averaged over the "
    "devices afterwards, which is why the number of devices stands above the line. This reference "
    "counts every token alike.",
    hints=(
        "Follow the loss of one token. By which numbers has it been divided by the time the "
        "devices take their step, and by which number should it be divided?",
        "The factor undoes two divisions: the one by the part's own predicted tokens, and the "
        "averaging over the devices. It replaces them with one division, by the predicted tokens "
        "of all parts on all devices.",
        "`len(labels) * n / total if n else None` is the factor of a part. Here `n` counts the "
        "part's labels that are not −100, without the first one of each row, and `total` is the "
        "sum of `n` over all parts of all devices.",
    ),
)
