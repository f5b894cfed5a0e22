"""Ghosts of a batch that has rows of padding in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["PADDED_GHOSTS"]

# Of 12, 13 and 14 rows each leaves none, one and two over.
SIZES = (3, 4, 6)
EPSILONS = (0.02, 0.05, 0.1, 0.2)


def padded_ghosts(x: Tensor, weight: Tensor, *, ghost_size: int, eps: float) -> Tensor:
    """x [B, C] normalized ghost by ghost, for weights [B] of 0 (padding) and 1."""
    real = weight > 0
    rows = x[real]
    y = torch.zeros_like(x)
    if len(rows):
        ghosts = max(1, len(rows) // ghost_size)  # what is left over joins the last one
        cuts = [ghost_size * number for number in range(1, ghosts)]
        y[real] = torch.cat([_normalized(ghost, eps) for ghost in rows.tensor_split(cuts)])
    return y


def _normalized(rows: Tensor, eps: float, correction: int = 0) -> Tensor:
    """rows [N, C] by their own statistics; one row becomes 0, or NaN with a correction of 1."""
    apart = rows - rows.mean(0)
    variance = apart.square().sum(0) / (len(rows) - correction)
    return apart / (variance + eps).sqrt()


def _ghosts(rows: Tensor, size: int, fault: str) -> Sequence[Tensor]:
    """The numbers of `rows` in their ghosts, each a tensor of whole numbers."""
    numbers = torch.arange(len(rows))
    count = max(1, len(rows) // size)
    if fault == "whole batch":
        return [numbers]
    if fault == "every so many rows":
        return [numbers[start::count] for start in range(count)]
    if fault == "equal ghosts":
        return numbers.tensor_split(count)
    if fault in ("rest by itself", "n - 1, rest by itself"):
        return numbers.split(size)
    if fault == "rest left out":
        return numbers[: count * size].split(size)
    if fault == "small batch left out" and len(rows) < size:
        return []
    return numbers.tensor_split([size * number for number in range(1, count)])


def _wrongly(fault: str) -> Callable[..., Tensor]:
    def normalize(x: Tensor, weight: Tensor, *, ghost_size: int, eps: float) -> Tensor:
        real = weight > 0
        if fault in ("padding counted", "padding counted, then zero"):
            asked = torch.ones_like(real)
        elif fault in ("padding fills ghosts", "padding as zeros"):
            return _with_padding(x, weight, ghost_size, eps, divide_all=fault == "padding as zeros")
        else:
            asked = real
        rows, y = x[asked], torch.zeros_like(x)
        done = torch.zeros_like(rows)
        for ghost in _ghosts(rows, ghost_size, fault) if len(rows) else ():
            done[ghost] = _ghost_wrongly(rows[ghost], eps, fault)
        y[asked] = done
        if fault == "padding counted, then zero":
            y[~real] = 0.0
        if fault == "padding kept":
            y[~real] = x[~real]
        if fault == "NaN spread" and bool(x.isnan().any()):
            y.fill_(torch.nan)
        return y

    return normalize


def _ghost_wrongly(rows: Tensor, eps: float, fault: str) -> Tensor:
    if fault == "eps outside":
        return (rows - rows.mean(0)) / (rows.var(0, correction=0).sqrt() + eps)
    if fault == "no root":
        return (rows - rows.mean(0)) / (rows.var(0, correction=0) + eps)
    if fault == "mean left in":
        return rows / (rows.var(0, correction=0) + eps).sqrt()
    return _normalized(rows, eps, correction=int(fault in ("n - 1", "n - 1, rest by itself")))


def _with_padding(x: Tensor, weight: Tensor, size: int, eps: float, *, divide_all: bool) -> Tensor:
    """Ghosts cut from all rows; padding takes part as zeros (divide_all) or only takes up room."""
    y = torch.zeros_like(x)
    count = max(1, len(x) // size)
    for ghost in torch.arange(len(x)).tensor_split([size * at for at in range(1, count)]):
        kept = ghost[weight[ghost] > 0]
        if len(kept):
            rows = torch.zeros_like(x[ghost]) if divide_all else x[kept]
            if divide_all:
                rows[weight[ghost] > 0] = x[kept]
            done = _normalized(rows, eps)
            y[kept] = done[weight[ghost] > 0] if divide_all else done
    return y


def _cases(seed: int) -> list[dict[str, Any]]:
    """From a batch without padding to one of padding alone; the last one's padding is not finite.

    The real rows drift, so that it matters which of them make a ghost.
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
        # The first row is padding, so that no ghost begins where it would without.
        weight[[0, *(torch.randperm(size - 1, generator=generator) + 1).tolist()][:padding]] = 0.0
        cases.append({"x": x, "weight": weight})
    x, weight = cases[-1].values()
    x[weight == 0] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    return cases


def _own_numbers(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"ghost_norm.padded_ghosts:{student}")
    return {"ghost_size": chance.choice(SIZES), "eps": chance.choice(EPSILONS)}


_HINTS = {
    "padding counted": "The rows of padding are normalized like the others and take part in the "
    "statistics of their ghosts.",
    "padding counted, then zero": "The rows of padding come out as zero, but the statistics of "
    "their ghosts have counted them. They may hold anything.",
    "padding as zeros": "The rows of padding enter the statistics as zeros. They are to be left "
    "out of the sums and of the number by which the sums are divided.",
    "padding fills ghosts": "The statistics leave the padding out, but the ghosts were cut before: "
    "a ghost with padding in it has fewer than `ghost_size` real rows. Which comes first?",
    "padding kept": "The rows of padding come out as they went in. They are to be zero.",
    "NaN spread": "A NaN in the padding makes real rows NaN. Zero times NaN is NaN, and so is any "
    "sum that it enters: choose rows in place of multiplying by the weights.",
    "rest by itself": "The rows left over at the end make a ghost of their own. A ghost of one row "
    "is normalized to nothing at all, which is why here they join the ghost before them.",
    "rest left out": "The rows left over at the end come out as zero. They are real rows and "
    "belong to the last ghost.",
    "small batch left out": "A batch with fewer real rows than `ghost_size` comes out as zeros. "
    "Its rows are one ghost.",
    "n - 1, rest by itself": "The rows left over at the end make a ghost of their own, and the "
    "variance is divided by the number of rows less one: with one row that is 0/0. By the rule "
    "they join the ghost before them, and the variance is divided by the number of rows.",
    "equal ghosts": "Your ghosts are made as equal as they can be. By the rule all but the last "
    "have exactly `ghost_size` rows, and the last takes what is left over.",
    "every so many rows": "Your ghosts are made of rows that stand apart, each taking every so "
    "many. They are to be neighbors.",
    "whole batch": "All rows are normalized by the statistics of the whole batch. Each ghost has "
    "its own.",
    "n - 1": "The variance is divided by the number of rows less one. That one is stored for "
    "evaluation; the batch itself is normalized with the other.",
    "eps outside": "Your eps is added to the standard deviation. It belongs to the variance, "
    "before the root.",
    "no root": "Your rows are divided by the variance, not by its root.",
    "mean left in": "The mean of the ghost is still in the result: each channel of a ghost has the "
    "mean 0 when it is done.",
}

PADDED_GHOSTS = Exercise(
    id="ghost_norm.padded_ghosts",
    reference=padded_ghosts,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
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
)
