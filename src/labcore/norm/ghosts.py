"""How a batch splits into ghosts, and how their statistics update the running averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from labcore.checks import positive_int

__all__ = ["POLICIES", "Running", "ghost_sizes"]

Running = Literal["sequential", "pooled", "mean", "divided"]
POLICIES: tuple[Running, ...] = ("sequential", "pooled", "mean", "divided")


def split(batch: int, ghost_size: int) -> tuple[int, int]:
    """Return (number of ghosts, number of leading ghosts with one more row than the others)."""
    # A ghost needs at least two rows to have a variance.
    most = batch // min(2, ghost_size)
    ghosts = max(1, min(-(-batch // ghost_size), most))
    return ghosts, batch % ghosts


def ghost_sizes(batch: int, ghost_size: int) -> tuple[int, ...]:
    """Return the rows of each ghost, in order: nearly even parts of at most `ghost_size` rows.

    There are ceil(batch / ghost_size) ghosts. Their sizes differ by at most one, and larger ghosts
    come first, as in `torch.tensor_split`: 100 rows with ghost_size 32 make four ghosts of 25, not
    three of 32 and one of 4. No ghost has a single row unless the batch has one row or ghost_size
    is 1. Therefore, with ghost_size 2, the first ghost of an odd batch has three rows.

    batch, ghost_size: numbers of rows, at least 1; ValueError or TypeError otherwise.
    """
    positive_int("batch", batch, "pass the number of rows")
    positive_int("ghost_size", ghost_size, "pass the number of rows per ghost")
    ghosts, larger = split(batch, ghost_size)
    rows = batch // ghosts
    return (rows + 1,) * larger + (rows,) * (ghosts - larger)


def running_step(
    policy: Running, mean: Tensor, var: Tensor, count: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compute the (mean, unbiased variance) that enter the running averages, one row per update.

    mean, var: [ghosts, channels], the statistics of each ghost; var is biased (divided by n).
    count: values per channel of each ghost, [ghosts, 1], or one number for all ghosts.
    Returns two tensors [updates, channels]: all ghosts in order for "sequential" and "divided", one
    row for "pooled" (mean and variance of the whole batch) and "mean" (the ghosts' average).
    """
    if policy == "pooled":
        total = count.sum() if isinstance(count, Tensor) else count * mean.shape[0]
        share = count / total
        whole = (share * mean).sum(0, keepdim=True)
        spread = (share * (var + (mean - whole).square())).sum(0, keepdim=True)
        return whole, spread * (total / (total - 1))
    var = var * (count / (count - 1))
    if policy == "mean":
        return mean.mean(0, keepdim=True), var.mean(0, keepdim=True)
    return mean, var


def blend(
    running: Sequence[Tensor], rows: Sequence[Tensor], factor: float | None, tracked: Tensor
) -> None:
    """Apply `running ← (1 − factor) running + factor row` for each row in turn, in place.

    running: tensors [channels]. rows: tensors [updates, channels].
    factor: None weights all updates so far equally; `tracked` counts them, including these.
    """
    first = rows[0]
    updates = first.shape[0]
    keep: Tensor | float
    if factor is None:
        share = 1 / tracked.to(first.dtype)
        keep, weights = 1 - updates * share, share.expand(updates)
    elif torch.compiler.is_compiling():  # A list would make the number of ghosts a constant.
        left = torch.arange(updates, -1, -1, dtype=torch.float64)
        kept = torch.pow(1 - factor, left).to(first)
        keep, weights = kept[0], factor * kept[1:]
    else:
        keep = (1 - factor) ** updates
        powers = [factor * (1 - factor) ** left for left in range(updates - 1, -1, -1)]
        weights = torch.tensor(powers, dtype=first.dtype, device=first.device)
    for average, row in zip(running, rows, strict=True):
        if isinstance(keep, float) and average.dtype == row.dtype:
            average.addmv_(row.t(), weights, beta=keep)
        else:
            average.copy_(average * keep + (weights[:, None] * row).sum(0))
