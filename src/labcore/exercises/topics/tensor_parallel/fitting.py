"""Fit latency and time per byte to measured all-reduces, and predict an unmeasured one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["FIT", "NOBODYS", "TARGETS", "measured"]

NOBODYS = 16
TARGETS = (12, 24, 32, 48)  # ranks to predict for, for numbered students
_Answer = tuple[float, float, float]


def fit_link(
    sizes: Tensor,
    seconds: Tensor,
    ranks: int,
    size: int,
    allowed: Sequence[str] | None,
    *,
    target: int,
) -> _Answer:
    """Return seconds per message, seconds per byte, and seconds of a ring of `target` ranks."""
    del allowed
    messages = torch.full_like(seconds, 2 * (ranks - 1))
    sent = 2 * (ranks - 1) / ranks * sizes.double()
    shares = torch.stack((messages, sent), 1) / seconds[:, None]
    scale = shares.norm(dim=0)
    ones = torch.ones(len(sizes), 1, dtype=torch.float64)
    alpha, beta = (torch.linalg.lstsq(shares / scale, ones).solution[:, 0] / scale).tolist()
    if alpha < 0:
        alpha, beta = 0.0, (shares[:, 1].sum() / shares[:, 1].square().sum()).item()
    elif beta < 0:
        alpha, beta = (shares[:, 0].sum() / shares[:, 0].square().sum()).item(), 0.0
    return alpha, beta, 2 * (target - 1) * (alpha + beta * size / target)


def _line(columns: Tensor, seconds: Tensor, power: float) -> tuple[float, float]:
    """Fit two numbers by least squares of the errors divided by seconds ** power."""
    weights = seconds ** (-power)
    shares = columns * weights[:, None]
    scale = shares.norm(dim=0)
    wanted = (seconds * weights)[:, None]
    one, other = (torch.linalg.lstsq(shares / scale, wanted).solution[:, 0] / scale).tolist()
    return one, other


def _alone(column: Tensor, seconds: Tensor, power: float) -> float:
    weights = seconds ** (-power)
    share = column * weights
    return (share @ (seconds * weights) / (share @ share)).item()


def _counts(fault: str, ranks: int) -> tuple[float, float]:
    """Return the messages and the tensors that a rank sends, according to a mistake."""
    messages, sent = 2.0 * (ranks - 1), 2 * (ranks - 1) / ranks
    if fault == "one all-reduce, one message":
        messages = 1.0
    if fault == "whole tensors":
        sent = 1.0
    if fault == "whole tensor in each message":
        sent = messages
    if fault == "one chunk":
        sent = 1 / ranks
    if fault == "one half":
        messages, sent = messages / 2, sent / 2
    if fault == "N steps a half":
        messages, sent = 2.0 * ranks, 2.0
    return messages, sent


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(
        sizes: Tensor,
        seconds: Tensor,
        ranks: int,
        size: int,
        allowed: Sequence[str] | None,
        *,
        target: int,
    ) -> _Answer:
        del allowed
        messages, sent = _counts(fault, ranks)
        columns = torch.stack((torch.full_like(seconds, messages), sent * sizes.double()), 1)
        power = {"absolute least squares": 0.0, "weighed once": 0.5}.get(fault, 1.0)
        if fault == "two points":
            ends = [int(sizes.argmin()), int(sizes.argmax())]
            columns, seconds = columns[ends], seconds[ends]
        alpha, beta = _line(columns, seconds, power)
        if fault == "cut off":
            alpha, beta = max(alpha, 0.0), max(beta, 0.0)
        elif fault != "below zero":
            if alpha < 0:
                alpha, beta = 0.0, _alone(columns[:, 1], seconds, power)
            elif beta < 0:
                alpha, beta = _alone(columns[:, 0], seconds, power), 0.0
        messages, sent = _counts(fault, ranks if fault == "measured ranks" else target)
        predicted = alpha * messages + beta * sent * size
        if fault == "steps of the measured ranks":
            predicted = alpha * _counts("", ranks)[0] + beta * sent * size
        if fault == "alpha per byte":
            predicted = (alpha + beta) * sent * size
        if fault == "exchanged":
            alpha, beta = beta, alpha
        return alpha, beta, predicted

    return answer


def measured(
    chance: random.Random, *, ranks: int, alpha: float, beta: float, noise: float, count: int
) -> dict[str, Any]:
    """Draw times of a ring of `ranks` ranks at `count` sizes in bytes, in random order."""
    sizes = [round(2 ** (8 + 18 * (n + chance.random()) / count)) for n in range(count)]
    chance.shuffle(sizes)
    seconds = [
        2 * (ranks - 1) * (alpha + beta * size / ranks) * (1 + noise * chance.uniform(-1, 1))
        for size in sizes
    ]
    return {
        "sizes": torch.tensor(sizes),
        "seconds": torch.tensor(seconds, dtype=torch.float64),
        "ranks": ranks,
        "size": chance.randint(2**14, 2**22),
        "allowed": None,
    }


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw links of different speeds, then times that no two positive numbers fit."""
    chance = random.Random(seed)
    cases = []
    for ranks, count in ((2, 9), (4, 6), (8, 12), (5, 7)):
        alpha, beta = 2e-6 * 2 ** chance.uniform(0, 5), 1e-11 * 2 ** chance.uniform(0, 7)
        cases.append(measured(chance, ranks=ranks, alpha=alpha, beta=beta, noise=0.35, count=count))
    steep = measured(chance, ranks=3, alpha=0.0, beta=2e-10, noise=0.05, count=5)
    steep["seconds"] *= (steep["sizes"] / 2**16).double() ** 0.2
    flat = measured(chance, ranks=6, alpha=4e-6, beta=0.0, noise=0.05, count=5)
    flat["seconds"] *= (flat["sizes"] / 2**16).double() ** -0.05
    return [*cases, steep, flat]


def _own_target(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"tensor_parallel.fit:{student}")
    return {"target": chance.choice(TARGETS) if student else NOBODYS}


_HINTS = {
    "absolute least squares": "You make the errors in seconds small. The largest tensor's is a "
    "thousand times the smallest one's then, and nobody looks at the small ones, which tell the "
    "latency.",
    "weighed once": "You divide squared errors by the seconds. An error relative to the time is "
    "divided before it is squared.",
    "two points": "You draw a line through the smallest and the largest tensor. What the others "
    "say is lost, and with it what would have averaged out.",
    "one all-reduce, one message": "Your latency is that of a whole all-reduce. It was asked for "
    "one message, and a ring sends one after the other.",
    "whole tensors": "Your time a byte is for the bytes of the tensor. A rank sends others: chunks "
    "of it, again and again.",
    "whole tensor in each message": "Each of your messages has all the bytes of the tensor. A ring "
    "cuts the tensor into one piece per rank, and a message is one piece.",
    "one chunk": "You count the bytes of one chunk. A rank sends one in each step.",
    "one half": "You count the messages of an all-gather. An all-reduce is two such passes.",
    "N steps a half": "Your ring has N steps in each half. A sum of N summands takes one less.",
    "measured ranks": "Your two numbers are right. You predict for the ranks that were measured.",
    "steps of the measured ranks": "Your two numbers are right. Your prediction has the bytes of "
    "the new number of ranks and the messages of the old one.",
    "alpha per byte": "Your two numbers are right. Your prediction pays the latency for each byte. "
    "A message pays it once, however long it is.",
    "below zero": "One of your numbers is below 0 in one case. No message takes less than no time.",
    "cut off": "You put 0 in place of a number below 0 and keep the other, which was fitted beside "
    "it. Alone it has to be fitted anew.",
    "exchanged": "You return the time a byte first, and the time a message behind it.",
}

FIT = Exercise(
    id="tensor_parallel.fit",
    points=5,
    beyond=2,
    reference=fit_link,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_target,
    returns=("seconds a message", "seconds a byte", "prediction"),
    rtol=1e-5,
    explanation="The time is linear in both unknowns, t = 2 (N − 1) α + 2 (N − 1) / N · n β, so "
    "least squares finds them at once. Divided by t, every row asks for a 1, and an error of 10 % "
    "counts alike at 1 KiB and at 64 MiB; in seconds the largest tensor would decide alone, and α "
    "would be noise. Where the best pair has a number below 0 the best allowed one lies on the "
    "edge: that number is 0, and the other one is fitted alone. Because α and β are those of one "
    "message and one byte, they can be used for another number of ranks, as long as the link is "
    "the same. This reference knows no algorithm but the ring.",
    hints=(
        "In the modelled time of one measurement, which number multiplies α, and which one "
        "multiplies β? Then look up whether the task counts errors in seconds or relative to the "
        "measured time.",
        "The model `2 (N − 1) α + 2 (N − 1) / N · n β` is linear in α and β. Divide both factors "
        "by the measured seconds, so that every measurement asks for a 1, and solve by least "
        "squares. If one of the two comes out below 0, set it to 0 and fit the other one again by "
        "itself, with the same division.",
        "`b.sum() / (b @ b)` is β fitted by itself, with `b = 2 * (ranks - 1) / ranks * "
        "sizes.double() / seconds`. For α, use `a = 2 * (ranks - 1) / seconds` in the same way. "
        "For both at once, `torch.linalg.lstsq` takes `a` and `b` as the columns of its first "
        "argument, and a column of ones as its second.",
    ),
)
