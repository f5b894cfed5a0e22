"""What each part's loss is multiplied by, so that parts on several devices add up to one batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["LOSS_FACTORS"]

IGNORED = -100
VOCABULARY = 6  # small, so that token 0 is among the labels
_Parts = Sequence[Sequence[Tensor]]
_Factors = list[list[float | None]]


def loss_factors(labels: _Parts, weights: _Parts | None) -> _Factors:
    """The factor of each part's mean loss, None where a part predicts nothing."""
    del weights
    counts = [[int((part[:, 1:] != -100).sum()) for part in parts] for parts in labels]
    total = sum(map(sum, counts))
    devices = len(labels)
    return [[devices * n / total if n else None for n in parts] for parts in counts]


def _count(part: Tensor, fault: str) -> int:
    """The tokens that a part predicts, in the mistake's opinion."""
    if fault != "not shifted":
        part = part[:, :-1] if fault == "the last left out" else part[:, 1:]
    if fault == "ignored counted":
        return part.numel()
    if fault == "rows counted":
        return int((part != IGNORED).any(1).sum())
    return int((part > 0 if fault == "zero is no token" else part != IGNORED).sum())


def _wrongly(fault: str) -> Callable[..., _Factors]:
    def factors(labels: _Parts, weights: _Parts | None) -> _Factors:
        del weights
        devices = len(labels)
        counts = [[_count(part, fault) for part in parts] for parts in labels]
        total = sum(map(sum, counts))
        found: _Factors = []
        for mine in counts:
            of = sum(mine) / devices if fault == "each device by itself" else total
            line: list[float | None] = []
            for n in mine:
                factor = {
                    "mean of means": 1 / len(mine),
                    "mean of the means there are": 1 / max(sum(map(bool, mine)), 1),
                    "sum of means": 1.0,
                    "average left in": n / max(of, 1),
                    "average taken twice": n / max(of, 1) / devices,
                    "for sums": devices / max(of, 1),
                }.get(fault, devices * n / max(of, 1))
                nothing = 0.0 if fault == "zero for none" else None
                line.append(factor if n else nothing)
            found.append(line)
        return found

    return factors


def _steps(seed: int) -> list[dict[str, Any]]:
    """Steps on 1 to 3 devices: ragged, with parts that predict nothing, without a token at all."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def part(share: float) -> Tensor:
        shape = (chance.randint(2, 4), chance.randint(7, 12))
        drawn = torch.randint(0, VOCABULARY, shape, generator=generator)
        labels = drawn.where(torch.rand(shape, generator=generator) < share, IGNORED)
        labels[0, :3] = torch.tensor([1, 0, 3])  # a first label, a zero, one that is predicted
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


_HINTS = {
    "mean of means": "Each part of a device counts alike, however few tokens it predicts. A token "
    "of a short part then weighs more than one of a long part.",
    "mean of the means there are": "Each part of a device that predicts something counts alike, "
    "however much that is. A token of a short part then weighs more than one of a long part.",
    "sum of means": "Your factors are all 1: the gradient grows with the number of parts.",
    "each device by itself": "You divide by the tokens of the part's own device. A token on a "
    "device with few of them then weighs more than one elsewhere.",
    "average left in": "Your gradient is too small by the number of devices. After the backward "
    "passes their gradients are not added but averaged.",
    "average taken twice": "Your gradient is too small by the square of the number of devices. The "
    "averaging over devices happens without you; your factor must undo it.",
    "for sums": "Your factors are for parts whose losses are sums. A part's loss here is a mean, "
    "divided by the tokens of the part already.",
    "not shifted": "You count the first label of each row. No token stands before it, so the model "
    "does not predict it.",
    "the last left out": "You leave out the last label of each row. It is the first one that has "
    "nothing before it to be predicted from.",
    "ignored counted": "You count the labels that are -100. They are predicted from nothing and "
    "for nothing.",
    "rows counted": "You count rows. The loss is a mean over tokens, and rows differ in them.",
    "zero is no token": "You leave out labels of 0. That is a token like the others; -100 alone is "
    "ignored.",
    "zero for none": "A part that predicts nothing gets the factor 0. Its mean is 0/0, and 0 times "
    "NaN is NaN: such a part is to be left out, None.",
}

LOSS_FACTORS = Exercise(
    id="memory.loss_factors",
    reference=loss_factors,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_steps,
    rtol=1e-9,
    explanation="A mean is not additive; a sum is. Each part's mean is its sum divided by its own "
    "tokens, so multiplied by them it is the sum again, and all of them together are divided once, "
    "by the tokens of the whole step. They must be counted before the first backward, on all "
    "devices: in a real run by an all-reduce of one number. The gradients are averaged over the "
    "devices afterwards, which is why the number of devices stands above the line. This reference "
    "counts every token alike.",
)
