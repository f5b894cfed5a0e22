"""How far the gradients of two batches lie apart, and how far their mean lies from that of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from labcore.checks import positive_int
from labcore.data import Digits

__all__ = [
    "batch_gradients",
    "gradient_bias",
    "gradient_variance",
    "predict_gradient_variance",
]


def batch_gradients(
    model: nn.Module,
    data: Digits,
    batch: int,
    *,
    draws: int,
    generator: torch.Generator,
) -> Tensor:
    """Gradients of the mean loss, [draws, weights] fp32, each of `batch` images drawn at random.

    The images of one draw are different ones (drawn without putting back). The model is used in
    training mode: a normalization takes the statistics of the batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    found = []
    for _ in range(positive_int("draws", draws)):
        rows = torch.randperm(len(data.train_x), generator=generator)[:batch]
        loss = F.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
        found.append(parameters_to_vector(torch.autograd.grad(loss, parameters)))
    return torch.stack(found)


def gradient_variance(gradients: Tensor) -> float:
    """Variance of gradients [draws, weights], summed over the weights; at least two draws."""
    return gradients.double().var(0).sum().item()


def gradient_bias(gradients: Tensor, full: Tensor) -> float:
    """Distance of the mean of gradients [draws, weights] from `full` [weights], over its norm.

    The square of the distance is freed from the share that finitely many draws add to it; where
    less than nothing is left, the answer is 0.
    """
    whole = full.double()
    gap = gradients.double().mean(0) - whole
    square = gap.square().sum().item() - gradient_variance(gradients) / len(gradients)
    return math.sqrt(max(square, 0.0)) / whole.norm().item()


def predict_gradient_variance(
    variance: float, known: int, batches: Sequence[int], population: int
) -> list[float]:
    """The variance at each of `batches`, by the law, from that at batch `known`.

    1/B for independent images, times (N - B) / (N - 1) since the B images of a batch are different
    ones of a population of N: at B = N there is nothing left to chance. Exact where the gradient
    is a mean over images, as it is without normalization.
    """

    def law(batch: int) -> float:
        return (population - batch) / (batch * (population - 1))

    return [variance * law(batch) / law(known) for batch in batches]
