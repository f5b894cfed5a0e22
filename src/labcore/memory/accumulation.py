"""Gradient accumulation: a large batch in parts, of which one at a time is in memory.

The loss of a batch is its mean over the tokens that are predicted. Parts hold different numbers of
them, as rows end early and prompts are not learned: a mean of the parts' means is another loss.
Here each part contributes a sum, divided by the tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.prediction import MOMENTS, estimate
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
    """Sum of the cross entropies, in nats, of the targets that are not IGNORED.

    inputs, targets: integers [B, T], where targets[b, t] follows inputs[b, t]. At least fp32; 0,
    with gradients of 0, where all targets are ignored.
    """
    return _cross_entropy(model, inputs, targets, "sum")


def _cross_entropy(model: Llama, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = model(inputs).logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def split_rows(inputs: Tensor, targets: Tensor, parts: int) -> list[Part]:
    """Rows [B, T] in `parts` parts, whose sizes differ by one at most.

    Raises ValueError for tensors that do not fit together and for more parts than rows.
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
    """Add to the gradients those of the mean loss over all predicted tokens; return that loss.

    parts: (inputs, targets) as in `summed_loss`, of any shapes. Equal to one backward of the whole
    batch up to the order of additions. Under data parallelism the divisor is the tokens of all
    devices, and what averages the gradients over devices must be undone.
    Raises ValueError where no token is predicted.
    """
    # Counted before the first backward, after which the gradients already carry the divisor.
    total = sum(_predicted(targets) for _, targets in parts)
    if total == 0:
        raise ValueError(f"no target of the {len(parts)} parts is predicted; all are {IGNORED}")
    summed = 0.0
    for inputs, targets in parts:
        loss = summed_loss(model, inputs, targets)
        (loss / total).backward()
        summed += loss.item()
    return summed / total


def accumulate_means(model: Llama, parts: Sequence[Part]) -> float:
    """Wrong: the mean of the parts' means, in which a token of a part with few counts for more.

    Right only where all parts predict equally many tokens. A part that predicts none makes the
    loss NaN; its gradients, by torch's cross entropy, are 0, so that training goes on with steps
    that are too short.
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
    """The bytes of `estimate` where `batch` rows are trained on in `parts` parts.

    Activations and workspace are those of the largest part, but all gradients stand from the
    second part on. options: those of `estimate` but the moment.
    Raises ValueError or TypeError for more parts than rows, and as `estimate` does.
    """
    _fits(positive_int("batch", batch), parts)
    rows = -(-batch // parts)
    found = [
        estimate(config, batch=rows, length=length, moment=moment, **options) for moment in MOMENTS
    ]
    if parts > 1:
        found = [replace(one, gradients=found[-1].gradients) for one in found]  # the step has all
    return max(found, key=lambda breakdown: breakdown.total)


def try_accumulation(
    seed: int, *, parts: int, steps: int, batch: int = 8, length: int = 256
) -> Trial:
    """Train the topic's model on batches of `batch` rows, taken in `parts` parts.

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
