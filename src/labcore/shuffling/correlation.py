"""How correlated the rows of a batch are.

In this module, `batches` is an iterable of tensors, one per batch (sizes may differ), or a tensor
whose first axis indexes batches. All arithmetic is in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labcore.checks import finite, floating, positive_int

__all__ = [
    "LabelEntropy",
    "autocorrelation",
    "design_effect",
    "intraclass_correlation",
    "label_entropy",
    "per_sample_gradients",
    "predicted_design_effect",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelEntropy:
    """Entropies of labels in nats.

    within: the mean of the batches' entropies. data: the entropy of all labels together, which is
    the maximum of `within`. expected: the mean of `within` if batches of the same sizes are drawn
    at random, without replacement, from the same labels. For small batches it is below `data`.
    """

    within: float
    data: float
    expected: float


def _entropy(counts: Iterable[int]) -> float:
    sizes = [count for count in counts if count]
    total = sum(sizes)
    return -sum(size / total * math.log(size / total) for size in sizes)


def _expected_entropy(counts: Iterable[int], size: int) -> float:
    """Compute the mean entropy of `size` labels drawn without replacement, as an exact sum."""
    frequencies = Counter(counts)
    total = sum(count * classes for count, classes in frequencies.items())
    k = torch.arange(1, size + 1, dtype=torch.float64)

    def log_choose(n: int, chosen: Tensor) -> Tensor:
        whole = torch.tensor(float(n), dtype=torch.float64)
        ways = torch.lgamma(whole + 1) - torch.lgamma(chosen + 1)
        return (ways - torch.lgamma((whole - chosen).clamp_min(0) + 1)).where(
            (chosen >= 0) & (chosen <= n), torch.tensor(-math.inf, dtype=torch.float64)
        )

    term = -(k / size) * torch.log(k / size)
    all_ways = log_choose(total, torch.tensor(float(size), dtype=torch.float64))
    return sum(
        classes
        * float(
            (
                term
                * torch.exp(log_choose(count, k) + log_choose(total - count, size - k) - all_ways)
            ).sum()
        )
        for count, classes in frequencies.items()
    )


def label_entropy(batches: Iterable[Tensor]) -> LabelEntropy:
    """Compute the entropy of labels within batches, in the data, and within random batches.

    batches: each [b] of whole numbers (classes, tokens, file numbers). A batch of one class has
    entropy 0. Raises TypeError for labels that are not whole numbers and ValueError if there are
    no labels.
    """
    per_batch: list[Counter[int]] = []
    for batch in batches:
        if batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
            raise TypeError(f"labels must be whole numbers, got {batch.dtype}; use labels.long()")
        if batch.numel() == 0:
            raise ValueError(f"a batch must hold at least one label, got {tuple(batch.shape)}")
        per_batch.append(Counter(batch.flatten().tolist()))
    if not per_batch:
        raise ValueError("label_entropy needs at least one batch, got none")
    total = sum(per_batch, Counter[int]())
    sizes = Counter(counts.total() for counts in per_batch)
    expected = sum(
        number * _expected_entropy(total.values(), size) for size, number in sizes.items()
    )
    return LabelEntropy(
        within=sum(_entropy(counts.values()) for counts in per_batch) / len(per_batch),
        data=_entropy(total.values()),
        expected=expected / len(per_batch),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variance:
    """One-way analysis of variance, with squares summed over columns.

    between: mean square between batches. within: mean square within batches (NaN if every batch
    has one row). total: variance of all rows (n - 1). size: batch size, corrected for ragged sizes.
    """

    between: float
    within: float
    total: float
    size: float


def _analysed(batches: Iterable[Tensor]) -> _Variance:
    groups = []
    for batch in batches:
        values = finite("the values in a batch", floating("the values in a batch", batch))
        if values.dim() == 0 or len(values) == 0:
            raise ValueError(f"a batch must hold at least one row, got {tuple(values.shape)}")
        groups.append(values.detach().double().reshape(len(values), -1))
    if len(groups) < 2:
        raise ValueError(f"need at least 2 batches, got {len(groups)}; use smaller batches")
    rows = torch.cat(groups)
    if bool((rows == rows[0]).all()):
        raise ValueError(
            "the values must vary, got the same in every row; a constant has no correlation "
            "within batches"
        )
    sizes = torch.tensor([len(group) for group in groups], dtype=torch.float64)
    means, n, k = torch.stack([group.mean(0) for group in groups]), len(rows), len(groups)
    middle = rows.mean(0)
    spread = float((sizes[:, None] * (means - middle).square()).sum())
    inside = sum(
        float((group - mean).square().sum()) for group, mean in zip(groups, means, strict=True)
    )
    return _Variance(
        between=spread / (k - 1),
        within=inside / (n - k) if n > k else math.nan,
        total=float((rows - middle).square().sum()) / (n - 1),
        size=(n - float(sizes.square().sum()) / n) / (k - 1),
    )


def intraclass_correlation(batches: Iterable[Tensor]) -> float:
    """Compute the correlation of two rows of a batch, ICC(1), by one-way analysis of variance.

    It is 0 for batches drawn at random and 1 for equal rows within each batch. The estimate can be
    as low as -1/(b - 1), which batches that balance the data come close to.
    batches: each [b] or [b, P] floats: losses, one-hot labels
    (torch.nn.functional.one_hot(labels).double()) or per-sample gradients. Squares are summed over
    P.
    Formula: (MSB - MSW) / (MSB + (b₀ - 1) MSW), with b₀ = (n - Σbᵢ²/n)/(k - 1) for ragged batches.
    Raises ValueError for constant values, fewer than two batches, or no batch with two rows.
    """
    variance = _analysed(batches)
    if math.isnan(variance.within):
        raise ValueError("a batch must hold at least 2 rows, got batches of 1; use larger batches")
    noise = (variance.size - 1) * variance.within
    return (variance.between - variance.within) / (variance.between + noise)


def design_effect(batches: Iterable[Tensor]) -> float:
    """Measure the variance of batch means, relative to batches of independent rows.

    It is 1 for batches drawn at random (exactly 1 on average over all ways to split the rows into
    batches), and b for batches of b equal rows, which carry as much information as one row.
    batches: see intraclass_correlation.
    Formula: Σ bᵢ |mᵢ - m|² / (k - 1), divided by the variance of all rows.
    Source: L. Kish, Survey Sampling, 1965.
    """
    variance = _analysed(batches)
    return variance.between / variance.total


def predicted_design_effect(icc: float, batch_size: int) -> float:
    """Predict the design effect of batches of b rows with correlation `icc`: 1 + (b - 1) ICC."""
    return 1 + (positive_int("batch_size", batch_size) - 1) * icc


def per_sample_gradients(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the gradient of each row's loss: [N, P], where P counts trainable parameters.

    loss(outputs [1, ...], targets [1, ...]) -> scalar. inputs [N, ...], targets [N, ...].
    chunk_size: rows at a time (None: all at once). Parameters are in the order of
    model.named_parameters(), and their .grad does not change. Layers that mix the rows of a batch
    or draw random numbers have no per-row gradient, so put the model into eval mode.
    """
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed: dict[str, Any] = {
        **{name: p.detach() for name, p in model.named_parameters() if not p.requires_grad},
        **dict(model.named_buffers()),
    }

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, {**params, **fixed}, (x.unsqueeze(0),))
        return loss(outputs, y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), chunk_size=chunk_size)
    found = each(trainable, inputs, targets)
    return torch.cat([found[name].reshape(len(inputs), -1) for name in trainable], dim=1)


def autocorrelation(series: Tensor, lags: int) -> Tensor:
    """Correlate a series with itself `lag` steps earlier, for lags 0..`lags`: [lags + 1] float64.

    series [T], T > lags. This is the usual biased estimate: each sum of products over the T - lag
    pairs is divided by the sum of all T squares, which keeps every value in -1..1. Independent
    losses give values of about ±1/√T after the 1 at lag 0.
    Raises ValueError for a constant series or one with NaN or infinity.
    """
    values = finite("series", floating("series", series)).detach().double()
    if values.dim() != 1 or len(values) <= lags or lags < 0:
        raise ValueError(
            f"series must be [T] with T > lags >= 0, got {tuple(values.shape)}, lags {lags}"
        )
    if bool((values == values[0]).all()):
        raise ValueError("series must vary, got a constant; its autocorrelation is 0/0")
    centred = values - values.mean()
    products = [centred[: len(values) - lag] @ centred[lag:] for lag in range(lags + 1)]
    return torch.stack(products) / products[0]
