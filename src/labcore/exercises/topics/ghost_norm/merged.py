"""Merge the statistics of several workers into those of all their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.matching import difference
from labcore.exercises.mistakes import Mistake

__all__ = ["MERGED"]

RTOL = 1e-6
FAR = 1e7  # means of the last case, in standard deviations
LOST = (
    ".\nOnly the variance is off, and only where the means are ten million times the deviation. So "
    "goes the mean of the squares less the square of the mean: it is a small difference of two "
    "huge numbers, and its digits are lost"
)


def merged(count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [C] and variance [C], divided by N - 1, from count, mean and var [K, C] of K workers."""
    values = count.to(mean.dtype)  # the quotient of two integer tensors is fp32
    total = values.sum(0)
    share = values / total
    together = (share * mean).sum(0)
    apart = mean - together
    within, between = (share * var).sum(0), (share * apart.square()).sum(0)
    return together, (within + between) * total / (total - 1)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw values of several workers, with a fifth missing; those of the last case are far from 0.

    One worker has no values. The first two have at least two values in each channel.
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
    """Compare answer by answer and say where digits were lost. Not random: no false alarms."""
    for at, (came, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        text = difference(came, right, rtol=RTOL, atol=1e-12, parts=("mean", "variance"), case=case)
        if text is None:
            continue
        far = bool((case["mean"].abs() > 0.1 * FAR).any())
        of_variance = "the returned variance:" in text  # the mean comes first, so it is right
        return f"in case {at} of {len(cases)}, {text}{LOST * (far and of_variance)}"
    return None


# Most mistakes form the quotient first; only the rounding differs.
_LIFT = ("* total / (total - 1)", "* (total / (total - 1))")
_MISTAKES = [
    Mistake("plain averages",
            ("together, (within + between) * total / (total - 1)", "mean.mean(0), var.mean(0)"),
            "Means and variances are averaged as if all workers had as many values, and as if "
            "their means were one. Give each value of the data one vote."),
    Mistake("plain mean", [_LIFT, ("return together", "return mean.mean(0)")],
            "The mean counts each worker once. One with ten times the values has ten times the "
            "say."),
    Mistake("plain mean of those that found something",
            ("(share * mean).sum(0)", "mean.sum(0) / (count > 0).sum(0)"),
            "In your mean, every worker that has values counts once, and your variance is taken "
            "around that mean. Each value should count once, not each worker."),
    Mistake("means forgotten", [_LIFT, ("(within + between)", "within")],
            "The variance is the mean of the workers' variances. Two workers with a variance of 0 "
            "and the means 0 and 10 have values that are far apart: where is that in yours?"),
    Mistake("means forgotten, divided by N", ("(within + between) * total / (total - 1)", "within"),
            "The variance is the mean of the workers' variances, weighted by their values. Two "
            "workers with a variance of 0 and the means 0 and 10 have values that are far apart; "
            "and the divisor asked for is another."),
    Mistake("divided by N", (" * total / (total - 1)", ""),
            "Your variance divides by the number of all values. That is what normalizes a batch; "
            "what is stored for evaluation divides by one less."),
    Mistake("means as equals", [_LIFT, ("share * apart", "1 / len(mean) * apart")],
            "How far the workers' means stand apart is averaged as if all had as many values. In "
            "the data a mean stands for each of its values."),
    Mistake("variances as equals", [_LIFT, ("(share * var).sum(0)", "var.mean(0)")],
            "The workers' variances are averaged as if all had as many values."),
    Mistake("deviations from the plain mean", [_LIFT, ("mean - together", "mean - mean.mean(0)")],
            "The mean is right, but the distances of the workers' means are taken from another "
            "one, in which each worker counts once."),
    Mistake("not squared", [_LIFT, ("square()", "abs()")],
            "The distances between the workers' means enter by their size. A variance is made of "
            "squares."),
    Mistake("n - 1 for each",
            [_LIFT,
             ("(share * var).sum(0)", "((values - 1).clamp(min=0) * var).sum(0) / total")],
            "A worker's variance is multiplied by its values less one. It was divided by all of "
            "its values, so the sum of squares is that many times the variance."),
    Mistake("lifted twice",
            [_LIFT, ("(within + between)", "within + between"),
             ("(share * var).sum(0)", "(lifted * var).sum(0) / total"),
             ("    within,", "    lifted = values * values / (values - 1).clamp(min=1)\n"
              "    lifted = torch.where(values > 1, lifted, values)\n    within,")],
            "Each worker's variance is first turned into one with the divisor n - 1, and that is "
            "not undone. N - 1 comes once, at the end, when all squares are added up."),
    Mistake("one lost for each", ("total - 1", "total - (values > 0).sum(0)"),
            "Your divisor is the number of values less that of the workers. So one estimates the "
            "variance within the workers; here only one mean is estimated, that of all."),
    Mistake("counts of all channels", [_LIFT, ("values.sum(0)", "values.sum()")],
            "The values of all channels are counted together. Each channel has a number of its "
            "own."),
    Mistake("counts of one channel", [_LIFT, ("count.to(", "count[:, :1].expand_as(mean).to(")],
            "All channels use the counts of the first. Each has its own column."),
    Mistake("shares in fp32", [_LIFT, ("values / total", "(count / count.sum(0)).to(mean.dtype)")],
            "Your formula is right, its shares are not: torch divides whole numbers into float32, "
            "and seven digits are too few where the means are large. Make float64 of the counts "
            "before anything is divided."),
    Mistake("standard deviation",
            ("(within + between) * total / (total - 1)",
             "((within + between) * (total / (total - 1))).sqrt()"),
            "You return the root of the variance."),
]  # fmt: skip

MERGED = Exercise(
    id="ghost_norm.merged",
    points=4,
    reference=merged,
    mistakes=_MISTAKES,
    cases=_cases,
    explanation="Around the common mean the squares of a worker's values add up to n times its "
    "variance plus n times the square of its mean's distance: values vary within a worker, and "
    "workers vary among each other. The sum of all these, divided by N - 1, is the variance of all "
    "values. Averaging the variances forgets the second part, and so do running statistics that "
    "take in one ghost after the other: where each ghost comes from a source of its own, that part "
    "is what they miss. The distances are taken before they are squared, since the mean of the "
    "squares less the square of the mean loses its digits where the mean is large.",
    hints=(
        "In the example both workers have a variance of 0. Where does the variance of 26.67 come "
        "from?",
        "Add up the squared distances of all values from the common mean, and divide the sum by N "
        "− 1 once, at the end. Each worker contributes its count times its variance, plus its "
        "count times the squared distance of its mean from the common mean.",
        "`(values * (var + (mean - together).square())).sum(0) / (total - 1)` is the variance, "
        "where `values` is `count.double()`, `total` is its sum over the workers, and `together` "
        "is the common mean.",
    ),
    returns=("mean", "variance"),
    compare=_difference,
)
