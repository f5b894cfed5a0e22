"""Where a weight drifts without gradients, and the smallest rate that moves it in low precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["DRIFT", "STALL"]


def drift_end(weight: Tensor, momentum: Tensor, *, rates: Tensor, decay: float) -> Tensor:
    """The weights after Lion's steps without gradients, all at the same rate."""
    lr, steps = rates[0], len(rates)
    kept = (1 - lr * decay) ** steps
    way = (1 - kept) / decay if decay else lr * steps  # lr (1 + a + ... + a**(steps - 1))
    return kept * weight - way * torch.sign(momentum)


def _drifted_wrongly(fault: str) -> Callable[..., Tensor]:
    def end(weight: Tensor, momentum: Tensor, *, rates: Tensor, decay: float) -> Tensor:
        lr = rates[0]
        steps = 1 if fault == "first step only" else len(rates) - (fault == "one step short")
        if fault == "sign of the weight":
            for rate in rates:
                weight = (1 - rate * decay) * weight - rate * torch.sign(weight)
            return weight
        sign = torch.sign(momentum)
        if fault == "size of the momentum":
            sign = momentum
        if fault == "zero has a sign":
            sign = torch.where(momentum >= 0, 1.0, -1.0).to(weight.dtype)
        if fault == "uphill":
            sign = -sign
        if fault == "no decay":
            return weight - lr * steps * sign
        kept = (1 - lr * decay) ** steps
        if fault == "steps without length":
            kept = torch.exp(-lr * decay * steps)
        way = (1 - kept) / decay if decay else lr * steps
        if fault == "way without decay":
            way = lr * steps
        if fault == "decay after the move":
            way = way * (1 - lr * decay)
        return kept * weight - way * sign

    return end


def _drift_cases(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    cases = []
    shapes: Sequence[tuple[tuple[int, ...], int, float, float]] = (
        ((4,), 1, 0.1, 0.5),
        ((2, 3), 5, 0.1, 1.0),
        ((5,), 150, 0.02, 0.2),
        ((3,), 12, 0.05, 0.0),
    )
    for shape, steps, lr, decay in shapes:
        weight, momentum = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        momentum.reshape(-1)[1] = 0.0
        rates = torch.full((steps,), lr, dtype=torch.float64)
        cases.append({"weight": weight, "momentum": momentum, "rates": rates, "decay": decay})
    return cases


DRIFT = Exercise(
    id="lion.drift",
    points=4,
    reference=drift_end,
    mistakes=[
        Mistake(name, _drifted_wrongly(name), hint)
        for name, hint in {
            "no decay": "The decay is left out. In each step the weight also shrinks by its "
            "rate times the decay.",
            "way without decay": "The start decays, but the way does not: what a step moved is "
            "part of the weight in the next step and shrinks with it.",
            "decay after the move": "The move of a step shrinks in that same step. In the rule "
            "the decay acts on the weight that the step found.",
            "steps without length": "Your weight shrinks by a factor of exp(−lr · decay · steps), "
            "as if the decay acted in infinitely many small steps. Each real step multiplies it by "
            "1 − lr · decay.",
            "one step short": "One step is missing. There are as many steps as rates.",
            "first step only": "Only the first step is made. Does the `return` stand inside the "
            "loop?",
            "sign of the weight": "The weight moves against its own sign. The direction is that "
            "of its momentum, also where that leads across zero and away from it.",
            "size of the momentum": "The weight moves by the size of its momentum. Only the "
            "sign of it reaches the weight.",
            "zero has a sign": "A weight without momentum moves. The sign of zero is zero.",
            "uphill": "The weight moves along the momentum. A step goes against it.",
        }.items()
    ],
    cases=_drift_cases,
    rtol=1e-9,
    atol=1e-12,
    explanation="With a = 1 - lr * decay each step makes a * weight - lr * sign of it, so k steps "
    "make a**k * weight - lr * (1 + a + ... + a**(k - 1)) * sign, and the sum in brackets is "
    "(1 - a**k) / (lr * decay). The sign never changes, for the blend is a multiple of the "
    "momentum. As k grows the weight approaches -sign / decay, the place where the decay of a "
    "step is as long as its move: each step leaves the share a of its distance from there, and "
    "what all moves together contribute is never longer than 1 / decay. For rates that change, "
    "ask what one step does to that distance.",
    hints=(
        "In the example of the task, the first step moves the weight by −0.5. How much of this "
        "move is left after the second step?",
        "Each step starts from the weight that the previous step left, shrinks it by the share "
        "`rate * decay`, and moves it by the rate against the sign of the momentum. This sign is "
        "the same in every step, and it is 0 for a momentum of zero.",
        "`weight = (1 - rate * decay) * weight - rate * torch.sign(momentum)` is one step. Repeat "
        "it for each `rate` in `rates`.",
    ),
)


def smallest_rate(weight: Tensor, direction: Tensor, *, bits: int) -> Tensor:
    """Half the distance from each weight to the next number on the side of `direction`."""
    fraction, exponent = torch.frexp(weight.abs())  # |weight| = fraction * 2**exponent
    gap = 2.0 ** (exponent.double() - 1 - bits)
    inward = weight * direction < 0
    gap = torch.where((fraction == 0.5) & inward, gap / 2, gap)  # a power of two, toward zero
    return gap / 2


def _rated_wrongly(fault: str) -> Callable[..., Tensor]:
    def rate(weight: Tensor, direction: Tensor, *, bits: int) -> Tensor:
        fraction, exponent = torch.frexp(weight.abs())
        bits = {"fp16's bits": 10, "hidden bit counted": bits + 1}.get(fault, bits)
        gap = 2.0 ** (exponent.double() - 1 - bits)
        if fault in ("gap in proportion", "half an epsilon of the weight"):
            gap = weight.abs() * 2.0**-bits
        outward = weight * direction > 0
        sides = {
            "other side": outward,
            "direction below zero": direction < 0,
            "denser on both sides": torch.ones_like(outward),
        }
        dense = sides.get(fault, ~outward)
        if fault not in ("one gap for both sides", "gap in proportion", "one whole gap"):
            gap = torch.where((fraction == 0.5) & dense, gap / 2, gap)
        return gap if fault in ("whole gap", "one whole gap") else gap / 2

    return rate


def _rate_cases(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in ((8,), (3, 4), (5,)):
        # Every format of `_own_bits` holds fractions of three binary digits.
        eighths = torch.randint(8, shape, generator=generator).double()
        eighths.reshape(-1)[:5] = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0], dtype=torch.float64)
        exponent = torch.randint(-12, 5, shape, generator=generator).double()
        sign = 2.0 * torch.randint(2, shape, generator=generator).double() - 1
        direction = 2.0 * torch.randint(2, shape, generator=generator).double() - 1
        # Powers of two of both signs, in both directions.
        sign.reshape(-1)[:4] = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        direction.reshape(-1)[:4] = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
        weight = sign * (1 + eighths / 8) * 2.0**exponent
        cases.append({"weight": weight, "direction": direction, "bits": 7})
    return cases


def _own_bits(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"lion.stall:{student}")
    # Neither 10 nor its neighbors: the mistake "fp16's bits" must stay distinct.
    return {"bits": chance.choice((4, 5, 6, 8, 12, 13, 14)) if student else 7}


STALL = Exercise(
    id="lion.stall",
    points=4,
    reference=smallest_rate,
    mistakes=[
        Mistake(name, _rated_wrongly(name), hint)
        for name, hint in {
            "whole gap": "This is the whole distance to the next number. A sum is rounded to the "
            "nearest one: how far must it come before that is the next?",
            "one whole gap": "This is the whole distance to the next number further from zero. A "
            "sum is rounded to the nearest number, so not all of it is needed; and toward zero "
            "some weights have a nearer neighbor.",
            "direction below zero": "The side on which a power of two has its nearer neighbor "
            "does not depend on the direction alone: for -1.0, which way leads toward zero?",
            "fp16's bits": "The distance is that of fp16, with 10 binary digits behind the point. "
            "How many there are is told by `bits`.",
            "hidden bit counted": "The distances are half of what they should be. The 1 before "
            "the point is not among the `bits`.",
            "one gap for both sides": "On one side of some weights the distance is another. Think "
            "of 1.0: which numbers stand next to it, above and below?",
            "denser on both sides": "At a power of two you halve the distance in both directions. "
            "Only the neighbor toward zero is nearer.",
            "other side": "At a power of two one side is indeed twice as dense, and it is the "
            "other one. In which direction do the exponents fall?",
            "gap in proportion": "The distance grows with the weight in proportion. Between two "
            "powers of two the numbers stand evenly.",
            "half an epsilon of the weight": "You multiply half an epsilon by the weight's own "
            "size. That is right at powers of two only: from one of them to the next, the distance "
            "between neighbors stays the same.",
        }.items()
    ],
    cases=_rate_cases,
    variant=_own_bits,
    rtol=1e-12,
    explanation="Between 2**e and 2**(e + 1) the numbers stand 2**(e - bits) apart. Below 2**e "
    "they stand half as far apart, and a power of two going toward zero meets that half. A sum "
    "rounds to the nearest number, so it leaves the weight when the rate exceeds half the "
    "distance.",
    hints=(
        "With 7 bits, find both neighbors of 1.5 and both neighbors of −1.0. Which of the four "
        "distances is not 1/128?",
        "Between two powers of two the numbers are evenly spaced, and toward zero the neighbor of "
        "a power of two is half as far away. A sum rounds to the neighbor once the step is longer "
        "than half the distance to it.",
        "`fraction, exponent = torch.frexp(weight.abs())` splits |weight| into `fraction * "
        "2**exponent`. The spacing is then `2.0 ** (exponent.double() - 1 - bits)`, and a "
        "fraction of 0.5 marks a power of two.",
    ),
)
