"""Normalize the ghosts of a batch that has rows of padding."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["PADDED_GHOSTS"]

# Ghosts of each size leave none, one and two of 12, 13 and 14 rows over.
SIZES = (3, 4, 6)
EPSILONS = (0.02, 0.05, 0.1, 0.2)


def padded_ghosts(x: Tensor, weight: Tensor, *, ghost_size: int, eps: float) -> Tensor:
    """Normalize x [B, C] ghost by ghost; weight [B] is 0 for padding and 1 for real rows."""
    real = weight > 0
    rows = x[real]
    y = torch.zeros_like(x)
    if len(rows) == 0:
        return y
    ghosts = max(1, len(rows) // ghost_size)  # rows left over join the last ghost
    cuts = [ghost_size * number for number in range(1, ghosts)]
    done = []
    for ghost in rows.tensor_split(cuts):
        apart = ghost - ghost.mean(0)
        variance = apart.square().mean(0)
        done.append(apart / (variance + eps).sqrt())
    y[real] = torch.cat(done)
    return y


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw batches from no padding to padding alone; the last one's padding is not finite.

    The real rows drift, so it matters which of them form a ghost.
    """
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for rows, padding, channels in (
        (12, 0, 2), (13, 0, 3), (14, 5, 2), (12, 4, 1), (2, 1, 2), (1, 1, 3), (0, 2, 2), (13, 4, 2),
    ):  # fmt: skip
        size = rows + padding
        draw = torch.randn(size, channels, generator=generator, dtype=torch.float64)
        x = draw + torch.arange(size)[:, None] / 2 + 1
        weight = torch.ones(size, dtype=torch.float64)
        # The first row is padding, so no ghost begins where it would without padding.
        weight[[0, *(torch.randperm(size - 1, generator=generator) + 1).tolist()][:padding]] = 0.0
        cases.append({"x": x, "weight": weight})
    x, weight = cases[-1].values()
    x[weight == 0] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    return cases


def _own_numbers(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"ghost_norm.padded_ghosts:{student}")
    return {"ghost_size": chance.choice(SIZES), "eps": chance.choice(EPSILONS)}


_MISTAKES = [
    Mistake("padding counted", ("weight > 0", "weight >= 0"),
            "The rows of padding are normalized like the others and take part in the statistics "
            "of their ghosts."),
    Mistake("padding counted, then zero",
            [("weight > 0", "weight >= 0"),
             ("torch.cat(done)", "torch.cat(done).masked_fill((weight == 0)[:, None], 0.0)")],
            "The rows of padding come out as zero, but the statistics of their ghosts have "
            "counted them. They may hold anything."),
    Mistake("padding as zeros",
            [("x[real]", "x.masked_fill(~real[:, None], 0.0)"),
             ("torch.cat(done)", "torch.cat(done)[real]")],
            "The rows of padding enter the statistics as zeros. They are to be left out of the "
            "sums and of the number by which the sums are divided."),
    Mistake("padding fills ghosts",
            [("len(rows) //", "len(x) //"),
             ("rows.tensor_split(cuts)",
              "[x[at][real[at]] for at in torch.arange(len(x)).tensor_split(cuts)]")],
            "The statistics leave the padding out, but the ghosts were cut before: a ghost with "
            "padding in it has fewer than `ghost_size` real rows. Which comes first?"),
    Mistake("padding kept", ("torch.zeros_like(x)", "x.clone()"),
            "The rows of padding come out as they went in. They are to be zero."),
    Mistake("NaN spread",
            ("\n    return y", "\n    return y.masked_fill(x.isnan().any(), torch.nan)"),
            "A NaN in the padding makes real rows NaN. Zero times NaN is NaN, and so is any sum "
            "that it enters: choose rows in place of multiplying by the weights."),
    Mistake("rest by itself", ("rows.tensor_split(cuts)", "rows.split(ghost_size)"),
            "The rows left over at the end make a ghost of their own. A ghost of one row is "
            "normalized to nothing at all, which is why here they join the ghost before them."),
    Mistake("rest left out",
            [("rows.tensor_split(cuts)", "rows[: ghosts * ghost_size].split(ghost_size)"),
             ("torch.cat(done)",
              "torch.cat([*done, torch.zeros_like(rows[ghosts * ghost_size :])])")],
            "The rows left over at the end come out as zero. They are real rows and belong to the "
            "last ghost."),
    Mistake("small batch left out", ("len(rows) == 0", "len(rows) < ghost_size"),
            "A batch with fewer real rows than `ghost_size` comes out as zeros. Its rows are one "
            "ghost."),
    Mistake("n - 1, rest by itself",
            [("rows.tensor_split(cuts)", "rows.split(ghost_size)"),
             ("square().mean(0)", "square().sum(0) / (len(ghost) - 1)")],
            "The rows left over at the end make a ghost of their own, and the variance is divided "
            "by the number of rows less one: with one row that is 0/0. By the rule they join the "
            "ghost before them, and the variance is divided by the number of rows."),
    Mistake("equal ghosts", ("tensor_split(cuts)", "tensor_split(ghosts)"),
            "Your ghosts are made as equal as they can be. By the rule all but the last have "
            "exactly `ghost_size` rows, and the last takes what is left over."),
    Mistake("every so many rows",
            [("rows.tensor_split(cuts)", "(rows[at] for at in order)"),
             ("torch.cat(done)", "torch.cat(done)[torch.cat(order).argsort()]"),
             ("    done =",
              "    order = [torch.arange(at, len(rows), ghosts) for at in range(ghosts)]\n"
              "    done =")],
            "Your ghosts are made of rows that stand apart, each taking every so many. They are "
            "to be neighbors."),
    Mistake("whole batch", ("rows.tensor_split(cuts)", "[rows]"),
            "All rows are normalized by the statistics of the whole batch. Each ghost has its "
            "own."),
    Mistake("n - 1", ("square().mean(0)", "square().sum(0) / (len(ghost) - 1)"),
            "The variance is divided by the number of rows less one. That one is stored for "
            "evaluation; the batch itself is normalized with the other."),
    Mistake("n - 1, but at least 1",
            ("square().mean(0)", "square().sum(0) / max(len(ghost) - 1, 1)"),
            "For the variance you divide by n − 1, and by 1 where a ghost has a single row. The "
            "variance that normalizes divides by the number of rows."),
    Mistake("eps outside", ("(variance + eps).sqrt()", "(ghost.var(0, correction=0).sqrt() + eps)"),
            "Your eps is added to the standard deviation. It belongs to the variance, before the "
            "root."),
    Mistake("no root", ("(variance + eps).sqrt()", "(ghost.var(0, correction=0) + eps)"),
            "Your rows are divided by the variance, not by its root."),
    Mistake("mean left in", ("apart / (variance", "ghost / (ghost.var(0, correction=0)"),
            "The mean of the ghost is still in the result: each channel of a ghost has the mean 0 "
            "when it is done."),
]  # fmt: skip

PADDED_GHOSTS = Exercise(
    id="ghost_norm.padded_ghosts",
    points=4,
    beyond=2,
    reference=padded_ghosts,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_numbers,
    rtol=1e-9,
    atol=1e-12,
    explanation="Padding is taken out first and put back last; between, the batch has real rows "
    "only, and nothing can go wrong with what padding holds. The number of ghosts is that of the "
    "full ones, at least one, and cutting only between them leaves the rest to the last. Choosing "
    "rows by `x[real]` is safe where multiplying by the weights is not: 0 * NaN is NaN. This "
    "reference reads the weights as 0 or not 0. For others the mean of a ghost is "
    "(w * rows).sum(0) / w.sum() with its weights w as a column, and the variance likewise; where "
    "the ghosts are cut does not change.",
    hints=(
        "With `ghost_size=2`, write down which rows form the ghosts for the weights 0, 1, 1, 0, "
        "1, 1, 1. Then do the same for the weights 0, 1, 0.",
        "Select the real rows by a mask first, since 0 times NaN is NaN, and cut only these rows "
        "into ghosts: as many as fit completely, but at least one, and the last also takes the "
        "rows left over. Write the results into a tensor of zeros at the places of the real rows.",
        "`rows.tensor_split([ghost_size * number for number in range(1, ghosts)])` cuts the real "
        "rows `rows = x[weight > 0]` into ghosts, where `ghosts` is `max(1, len(rows) // "
        "ghost_size)`.",
    ),
)
