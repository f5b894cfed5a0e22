"""Gradient accumulation: a large batch in parts, only one of which is in memory at a time.

The loss of a batch is the mean over its predicted tokens. Parts have different numbers of them,
because rows end early and prompts aren't learned, so the mean of the parts' means is a different
loss. Here each part contributes a sum, divided by the number of tokens in the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.prediction import estimate
from labcore.memory.model import batches, fresh
from labcore.memory.trials import Trial, adamw, trial
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama

__all__ = [
    "IGNORED",
    "accumulate",
    "accumulate_means",
    "estimate_accumulated",
    "split_rows",
    "summed_loss",
    "try_accumulation",
]

IGNORED = -100  # a target that is not predicted, as in torch.nn.functional.cross_entropy
Part = tuple[Tensor, Tensor]


def summed_loss(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies, in nats, of the targets that are not IGNORED.

    inputs, targets: integers [B, T], where targets[b, t] follows inputs[b, t]. The sum is at least
    fp32, and 0 with zero gradients if all targets are ignored.
    """
    return _cross_entropy(model, inputs, targets, "sum")


def _cross_entropy(model: Llama, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = model(inputs).logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def split_rows(inputs: Tensor, targets: Tensor, parts: int) -> list[Part]:
    """Split rows [B, T] into `parts` parts whose sizes differ by at most one.

    Raises ValueError for tensors of different shapes and for more parts than rows.
    """
    if inputs.shape != targets.shape or inputs.dim() != 2:
        raise ValueError(
            f"inputs and targets must both have shape [B, T], got {tuple(inputs.shape)} and "
            f"{tuple(targets.shape)}"
        )
    _fits(inputs.shape[0], parts)
    pairs = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    return list(pairs)


def _fits(rows: int, parts: int) -> None:
    if positive_int("parts", parts) > rows:
        raise ValueError(f"parts must be at most the {rows} rows, got {parts}; pass fewer")


def accumulate(model: Llama, parts: Sequence[Part]) -> float:
    """Add the gradients of the mean loss over all predicted tokens; return that loss.

    parts: (inputs, targets) as in `summed_loss`, of any shapes. The result equals one backward of
    the whole batch up to the order of additions. Under data parallelism, divide by the tokens of
    all devices, and undo the averaging of gradients over devices.
    Raises ValueError if no token is predicted.
    """
    # Counted before the first backward, whose gradients are already divided by it.
    total = sum(_predicted(targets) for _, targets in parts)
    if total == 0:
        raise ValueError(
            f"the {len(parts)} parts must have a target to predict, got only {IGNORED}; leave some "
            "targets unmasked"
        )
    summed = 0.0
    for inputs, targets in parts:
        loss = summed_loss(model, inputs, targets)
        (loss / total).backward()
        summed += loss.item()
    return summed / total


def accumulate_means(model: Llama, parts: Sequence[Part]) -> float:
    """Wrong: averages the parts' means, which gives tokens in parts with few of them more weight.

    It's right only if all parts predict equally many tokens. A part that predicts none makes the
    loss NaN, but torch's cross entropy gives it gradients of 0, so training continues with steps
    that are too small.
    """
    mean = 0.0
    for inputs, targets in parts:
        loss = _cross_entropy(model, inputs, targets, "mean") / len(parts)
        loss.backward()
        mean += loss.item()
    return mean


def _predicted(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def estimate_accumulated(
    config: LlamaConfig, *, batch: int, parts: int, length: int, **options: Any
) -> Breakdown:
    """Predict the bytes of a step as `estimate` does, for `batch` rows split into `parts` parts.

    Activations and workspace are those of the largest part, but from the second part on all
    gradients exist. options: those of `estimate`, except the moment.
    Raises ValueError or TypeError for more parts than rows, and as `estimate` does.
    """
    _fits(positive_int("batch", batch), parts)
    return estimate(config, batch=batch, parts=parts, length=length, **options)


def try_accumulation(
    seed: int, *, parts: int, steps: int, batch: int = 8, length: int = 256
) -> Trial:
    """Train the chapter's model on batches of `batch` rows, split into `parts` parts.

    The same seed gives the same rows for every number of parts.
    """
    model = fresh(seed)
    optimizer, draw = adamw(model), batches(seed, batch=batch, length=length)

    def step(n: int) -> None:
        tokens, _ = draw(n)
        optimizer.zero_grad()
        accumulate(model, split_rows(tokens[:, :-1], tokens[:, 1:], parts))
        optimizer.step()

    return trial(model, optimizer, step, steps=steps)
