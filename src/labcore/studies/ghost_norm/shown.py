"""What the chapter shows of the recorded runs, and six tokens to normalize by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import one_of
from labcore.studies.ghost_norm import sweeps
from labcore.studies.ghost_norm.comparisons import NORMS
from labcore.studies.ghost_norm.comparisons import costs as costs_by_batch
from labcore.studies.ghost_norm.large_batches import SMALL

__all__ = ["NORMS", "ROWS", "TABLE", "by_norm", "costs", "normalized", "paths"]

ROWS = tuple(f"{name}, token {n}" for name in "AB" for n in (1, 2, 3))
TABLE = (
    (1.0, 4.0, 1.0),
    (3.0, 2.0, 7.0),
    (4.0, 6.0, 0.0),
    (7.0, 2.0, 4.0),
    (2.0, 9.0, 3.0),
    (6.0, 1.0, 8.0),
)
"""Two sequences, A and B, of three tokens each: ROWS by three channels."""


def by_norm() -> dict[str, dict[int, Mapping[float, Mapping[str, Any]]]]:
    """Return the sweep: norm -> batch -> rate -> what `sweeps.sweep` has.

    A batch no larger than a ghost is plain batch normalization.
    """
    return {
        norm: {
            batch: sweeps.sweep(norm if norm in sweeps.sized(batch) else NORMS[0], batch)
            for batch in sweeps.BATCHES
        }
        for norm in NORMS
    }


def paths() -> dict[int, dict[str, Mapping[float, Mapping[str, Any]]]]:
    """Return the sweep by batch and ghost size, the smallest batch without ghosts."""
    return {
        batch: {
            kind: sweeps.sweep(kind, batch)
            for kind in sweeps.sized(batch)
            if kind != "layer norm" and (kind == NORMS[0] or batch > SMALL)
        }
        for batch in sweeps.BATCHES
    }


def costs(seconds: Sequence[float]) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """Return the cost of a training loss over the smallest batch's: norm -> loss -> unit -> ratios.

    The units are "updates", "rows" and, with batch normalization, "time"; the ratios [batches,
    seeds]. seconds: of one update with batch normalization, by batch.
    """
    first = min(sweeps.BATCHES)
    found: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for norm in NORMS:
        found[norm] = {}
        for loss in sweeps.LOSSES:
            updates = list(costs_by_batch(norm, loss).values())
            rows = [
                [batch / first * ratio for ratio in ratios]
                for batch, ratios in zip(sweeps.BATCHES, updates, strict=True)
            ]
            found[norm][f"{loss:g}"] = {"updates": updates, "rows": rows}
            if norm == NORMS[0]:
                found[norm][f"{loss:g}"]["time"] = [
                    [ratio * each / seconds[0] for ratio in ratios]
                    for each, ratios in zip(seconds, updates, strict=True)
                ]
    return found


def normalized(table: Tensor, norm: str, *, ghost: int = 3, eps: float = 1e-5) -> Tensor:
    """Normalize a table of tokens [B, C] without learned weights.

    norm: "batch" takes mean and variance of each channel over all rows, "ghosts" over each part of
    `ghost` rows, "layer" of each row over its channels; "RMS" divides a row by its root mean square
    (Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467).
    """
    one_of("norm", norm, ("batch", "ghosts", "layer", "RMS"))
    if norm == "layer":
        return F.layer_norm(table, table.shape[1:], eps=eps)
    if norm == "RMS":
        return table / (table.square().mean(1, keepdim=True) + eps).sqrt()
    parts = table.split(ghost) if norm == "ghosts" else (table,)
    whole = [F.batch_norm(part, None, None, training=True, eps=eps) for part in parts]
    return torch.cat(whole)
