"""The variance of a batch's mean, predicted for another batch size from a log."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["CORRELATION"]

SIZES = (12, 20, 48, 80, 150, 300)


def predicted(
    counts: Tensor, means: Tensor, variances: Tensor, *, size: int
) -> tuple[float, float]:
    """Intraclass correlation, and the variance of the mean of a batch of `size` rows."""
    rows, batches = counts.sum(), len(counts)
    grand_mean = (counts * means).sum() / rows
    of_each = torch.where(counts > 1, (counts - 1) * variances, 0.0)
    within = of_each.sum() / (rows - batches)
    spread = (counts * (means - grand_mean) ** 2).sum()
    weight = rows - (counts**2).sum() / rows
    between = ((spread - (batches - 1) * within) / weight).clamp(min=0.0)
    icc = between / (between + within)
    variance = between + within / size
    return icc.item(), variance.item()


def _logged(generator: torch.Generator, batches: int, between: float) -> dict[str, Any]:
    """The log of random batches: rows, means and unbiased variances, NaN for a single row."""
    counts = torch.randint(2, 40, (batches,), generator=generator)
    counts[0], counts[1] = 60, 3  # very different sizes
    rows = [
        between * torch.randn((), generator=generator, dtype=torch.float64)
        + torch.randn(int(count), generator=generator, dtype=torch.float64)
        for count in counts
    ]
    return {
        "counts": counts.double(),
        "means": 2 + torch.stack([one.mean() for one in rows]),
        "variances": torch.stack([one.var() for one in rows]),
    }


def _correlated(
    generator: torch.Generator, batches: int, between: float, *, single: bool = False
) -> dict[str, Any]:
    """A log with a positive correlation: others are drawn again."""
    while True:
        log = _logged(generator, batches, between)
        if single:
            log["counts"][2], log["variances"][2] = 1, torch.nan
        if predicted(**log, size=1)[0] > 0:
            return log


def _log_cases(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    cases = [_correlated(generator, 5, 1.5), _correlated(generator, 14, 0.8)]
    alike = _logged(generator, 8, 0.0)
    alike["means"] = 2 + (alike["means"] - 2) / 10  # batches more alike than chance makes them
    return [*cases, alike, _correlated(generator, 7, 1.2, single=True)]


_EDITS: dict[str, Change] = {
    "plain mean": ("(counts * means).sum() / rows", "means.mean()"),
    "mean batch size": ("(counts**2).sum() / rows", "rows / batches"),
    "K for K − 1": ("(batches - 1) * within", "batches * within"),
    "divided by all rows": ("(rows - batches)", "rows"),
    "plain mean of the variances": (
        "of_each.sum() / (rows - batches)",
        "variances[counts > 1].mean()",
    ),
    "b for b − 1": ("(counts - 1) * variances", "counts * variances"),
    "batches count alike": (
        "(counts * (means - grand_mean) ** 2).sum()",
        "((means - grand_mean) ** 2).sum() * rows / batches",
    ),
    "noise left in": ("spread - (batches - 1) * within", "spread"),
    "variance of the means": ("(spread - (batches - 1) * within) / weight", "means.var()"),
    "below zero": (".clamp(min=0.0)", ""),
    "NaN let through": ("counts > 1", "counts > 0"),
    "single rows left out": (
        "    rows, batches",
        "    kept = counts > 1\n"
        "    counts, means, variances = counts[kept], means[kept], variances[kept]\n"
        "    rows, batches",
    ),
    "share of the noise": ("between / (between + within)", "between / within"),
    "rows independent": ("between + within / size", "(between + within) / size"),
    "variance of a row": ("between + within / size", "between + within"),
    "design effect": ("between + within / size", "1 + (size - 1) * icc"),
    "noise not divided twice": (
        "between + within / size",
        "(between + within) / size * (1 + size * icc)",
    ),
    "exchanged": ("icc.item(), variance.item()", "variance.item(), icc.item()"),
}
_HINTS = {
    "plain mean": "ȳ is the plain mean of the batches' means. It is the mean of all rows, to "
    "which a batch of 60 rows adds more than one of 3.",
    "mean batch size": "Your factor of σ_b² is what batches of equal size would have. The sizes "
    "differ: use the one of the task, with the squares of the sizes.",
    "K for K − 1": "You take K σ_w² off the spread of the means. ȳ is computed from the same "
    "means, so that one of their K degrees of freedom is gone.",
    "divided by all rows": "Your σ_w² is divided by N. Each batch's deviations are taken from its "
    "own mean, which costs it one row.",
    "plain mean of the variances": "Your σ_w² is the plain mean of the variances. One of 60 rows "
    "is worth more than one of 3.",
    "b for b − 1": "The variances in your within-batch sum are multiplied by the batch sizes. "
    "Their divisor was one less: multiply by that, and the squares come back.",
    "batches count alike": "In the spread of the means every batch counts alike. By its "
    "definition each square counts as many times as its batch has rows.",
    "noise left in": "Your σ_b² still has the noise of single rows in it: also batches drawn at "
    "random have means that differ. See what the expectation of the spread is where σ_b² is 0.",
    "variance of the means": "You take the plain variance of the means for σ_b². Also "
    "batches drawn at random have means that differ, most of all the small ones.",
    "below zero": "One log has batches that are more alike than chance makes them, and your σ_b² "
    "is negative there. The task says what to return.",
    "NaN let through": "A batch of a single row has NaN for a variance, and NaN times 0 is NaN. "
    "Such a batch says nothing about σ_w²; its mean still counts.",
    "single rows left out": "You leave out batches of one row from the start. They have no "
    "variance, but their means and rows count all the same.",
    "share of the noise": "Your first result is the ratio of the two variances. The correlation "
    "is a share: of the variance of a row, which part do its neighbors in the batch have too?",
    "rows independent": "Your variance is that of `size` independent rows. The u of a batch is "
    "the same in all of its rows: does a mean over them make it smaller?",
    "variance of a row": "Your second result is the variance of a single row. In the mean of a "
    "batch the noise of its rows partly cancels.",
    "design effect": "Your second result is the design effect: how many times the variance is "
    "that of independent rows. The variance itself is asked for.",
    "noise not divided twice": "Your design effect has `size` where only the other rows of the "
    "batch belong: for a batch of one row it must be 1.",
    "exchanged": "The two results have changed places: the correlation comes first.",
}

CORRELATION = Exercise(
    id="shuffling.correlation",
    points=4,
    reference=predicted,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_log_cases,
    variant=lambda student: {
        "size": random.Random(f"rows:{student}").choice(SIZES) if student else 32
    },
    returns=("correlation", "variance"),
    rtol=1e-9,
    explanation="Both sums are set equal to their expectations and solved: first that within "
    "the batches for σ_w², then that of the means for σ_b². A batch's mean is μ + u plus a mean of "
    "`size` independent e, so its variance is σ_b² + σ_w²/size. Written with the correlation ρ "
    "that is (σ_b² + σ_w²)/size · (1 + (size − 1) ρ), the design effect. It does not fall "
    "below σ_b² however large the batch: where batches come from single files, larger ones help "
    "little and better mixed ones much.",
    hints=(
        "In the example, get σ_w² = 5/4 and ȳ = 3 by hand. Why is ȳ not 2.5, halfway between the "
        "two means?",
        "The first sum gives σ_w² (select the batches of several rows for it, but count all in N "
        "and K), and the second equation then gives σ_b². In the mean of a batch the e of its "
        "rows average out while its u stays, so only σ_w² is divided by `size`.",
        "`between = ((spread - (batches - 1) * within) / (rows - (counts**2).sum() / "
        "rows)).clamp(min=0.0)` is σ_b², where `spread` is the second sum, `within` is σ_w², "
        "`rows` is N, and `batches` is K.",
    ),
)
