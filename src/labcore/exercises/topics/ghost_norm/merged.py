"""Statistics of several workers made into those of all their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.matching import difference
from labcore.exercises.mistakes import Mistake

__all__ = ["MERGED"]

RTOL = 1e-6
FAR = 1e7  # the means of the last case, in its standard deviations
LOST = (
    ".\nOnly the variance is off, and only where the means are ten million times the deviation. So "
    "goes the mean of the squares less the square of the mean: it is a small difference of two "
    "huge numbers, and its digits are lost"
)


def merged(count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [C] and variance [C], divided by N - 1, from count, mean and var [K, C] of K workers."""
    values = count.to(mean.dtype)  # a quotient of whole numbers would be fp32
    total = values.sum(0)
    share = values / total
    together = (share * mean).sum(0)
    within, between = (share * var).sum(0), (share * (mean - together).square()).sum(0)
    return together, (within + between) * total / (total - 1)


def _wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def statistics(count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        if fault == "counts of one channel":
            count = count[:, :1].expand_as(mean)
        n = count.to(mean.dtype)
        total = n.sum(0)
        if fault == "counts of all channels":
            total = total.sum().expand_as(total)
        share = n / total
        if fault == "shares in fp32":
            share = (count / count.sum(0)).to(mean.dtype)
        plain = torch.full_like(share, 1 / len(share))
        own_mean = (share * mean).sum(0)
        together = mean.mean(0) if fault in ("plain mean", "plain averages") else own_mean
        centre = mean.mean(0) if fault == "deviations from the plain mean" else own_mean
        apart = mean - centre
        within, between = (share * var).sum(0), (share * apart.square()).sum(0)
        lift = total / (total - 1)
        variance = {
            "plain averages": var.mean(0),
            "means forgotten": within * lift,
            "means forgotten, divided by N": within,
            "divided by N": within + between,
            "means as equals": (within + (plain * apart.square()).sum(0)) * lift,
            "variances as equals": (var.mean(0) + between) * lift,
            "not squared": (within + (share * apart.abs()).sum(0)) * lift,
            "n - 1 for each": (((n - 1).clamp(min=0) * var).sum(0) / total + between) * lift,
            "lifted twice": _lifted(n, var) / total + between * lift,
            "one lost for each": (within + between) * total / (total - (n > 0).sum(0)),
            "standard deviation": ((within + between) * lift).sqrt(),
        }.get(fault, (within + between) * lift)
        return together, variance

    return statistics


def _lifted(n: Tensor, var: Tensor) -> Tensor:
    """The sum of n times the variance, each made one by n - 1 first; a lone value has none."""
    return (torch.where(n > 1, n * n / (n - 1).clamp(min=1), n) * var).sum(0)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Values of several workers, a fifth of them missing, and in the last case far from zero.

    Of one worker all are missing; the first two have each channel twice or more.
    """
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for rows, channels, level in (
        ([2, 6], 1, 0.0), ([5, 3, 12, 4], 3, 0.0), ([9, 3, 0, 1, 4], 2, 1.0), ([7], 3, 0.0),
        ([30, 11, 2, 5, 17, 3], 2, 3.0), ([8, 20, 3], 3, FAR),
    ):  # fmt: skip
        counts, means, variances = [], [], []
        for worker, size in enumerate(rows):
            draw = torch.rand(size + 2, channels, generator=generator, dtype=torch.float64)
            scale, shift, missing = draw[0] + 0.5, 3 * draw[1] + level, draw[2:] < 0.2
            if worker < 2:
                missing[:2] = False
            if worker == 0:
                missing[-1] = torch.arange(channels) % 2 == 1  # the counts differ
            present = (~missing).double()
            x = torch.randn(size, channels, generator=generator, dtype=torch.float64) * scale
            count = present.sum(0)
            middle = (x * present).sum(0) / count.clamp(min=1)
            squares = ((x - middle).square() * present).sum(0)
            counts.append(count.long())
            variances.append(squares / count.clamp(min=1))
            means.append(torch.where(count > 0, middle + shift, 0.0))
        stacked = {"mean": torch.stack(means), "var": torch.stack(variances)}
        cases.append({"count": torch.stack(counts)} | stacked)
    return cases


def _difference(
    answers: Sequence[Any], wanted: Sequence[Any], cases: Sequence[Mapping[str, Any]]
) -> str | None:
    """Answer by answer, with a word where digits were lost. Not random: no false alarm."""
    for at, (came, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        text = difference(came, right, rtol=RTOL, atol=1e-12, parts=("mean", "variance"), case=case)
        if text is None:
            continue
        far = bool((case["mean"].abs() > 0.1 * FAR).any())
        of_variance = "the returned variance:" in text  # the mean was right, it comes first
        return f"in case {at} of {len(cases)}, {text}{LOST * (far and of_variance)}"
    return None


_HINTS = {
    "plain averages": "Means and variances are averaged as if all workers had as many values, and "
    "as if their means were one. Give each value of the data one vote.",
    "plain mean": "The mean counts each worker once. One with ten times the values has ten times "
    "the say.",
    "means forgotten": "The variance is the mean of the workers' variances. Two workers with a "
    "variance of 0 and the means 0 and 10 have values that are far apart: where is that in yours?",
    "means forgotten, divided by N": "The variance is the mean of the workers' variances, weighted "
    "by their values. Two workers with a variance of 0 and the means 0 and 10 have values that are "
    "far apart; and the divisor asked for is another.",
    "divided by N": "Your variance divides by the number of all values. That is what normalizes a "
    "batch; what is stored for evaluation divides by one less.",
    "means as equals": "How far the workers' means stand apart is averaged as if all had as many "
    "values. In the data a mean stands for each of its values.",
    "variances as equals": "The workers' variances are averaged as if all had as many values.",
    "deviations from the plain mean": "The mean is right, but the distances of the workers' means "
    "are taken from another one, in which each worker counts once.",
    "not squared": "The distances between the workers' means enter by their size. A variance is "
    "made of squares.",
    "n - 1 for each": "A worker's variance is multiplied by its values less one. It was divided by "
    "all of its values, so the sum of squares is that many times the variance.",
    "lifted twice": "Each worker's variance is first turned into one with the divisor n - 1, and "
    "that is not undone. N - 1 comes once, at the end, when all squares are added up.",
    "one lost for each": "Your divisor is the number of values less that of the workers. So one "
    "estimates the variance within the workers; here only one mean is estimated, that of all.",
    "counts of all channels": "The values of all channels are counted together. Each channel has "
    "a number of its own.",
    "counts of one channel": "All channels use the counts of the first. Each has its own column.",
    "shares in fp32": "Your formula is right, its shares are not: torch divides whole numbers into "
    "float32, and seven digits are too few where the means are large. Make float64 of the counts "
    "before anything is divided.",
    "standard deviation": "You return the root of the variance.",
}

MERGED = Exercise(
    id="ghost_norm.merged",
    reference=merged,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    explanation="Around the common mean the squares of a worker's values add up to n times its "
    "variance plus n times the square of its mean's distance: values vary within a worker, and "
    "workers vary among each other. The sum of all these, divided by N - 1, is the variance of all "
    "values. Averaging the variances forgets the second part, and so do running statistics that "
    "take in one ghost after the other: where each ghost comes from a source of its own, that part "
    "is what they miss. The distances are taken before they are squared, since the mean of the "
    "squares less the square of the mean loses its digits where the mean is large.",
    returns=("mean", "variance"),
    compare=_difference,
)
