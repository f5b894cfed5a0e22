"""The variance of batch gradients, and the distance of their mean from the full gradient."""

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
    """Return gradients of the mean loss, [draws, weights] fp32, each over `batch` random images.

    The images of one draw are distinct (drawn without replacement). The model runs in training
    mode, so a normalization uses the batch's statistics.
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
    """Return the variance of gradients [draws, weights], summed over the weights.

    Needs at least two draws.
    """
    return gradients.double().var(0).sum().item()


def gradient_bias(gradients: Tensor, full: Tensor) -> float:
    """Return the distance of the mean of gradients [draws, weights] from `full` [weights].

    The distance is relative to the norm of `full`. Its square is corrected for the finite number of
    draws; if the corrected square is negative, the result is 0.
    """
    whole = full.double()
    gap = gradients.double().mean(0) - whole
    square = gap.square().sum().item() - gradient_variance(gradients) / len(gradients)
    return math.sqrt(max(square, 0.0)) / whole.norm().item()


def predict_gradient_variance(
    variance: float, known: int, batches: Sequence[int], population: int
) -> list[float]:
    """Predict the variance at each of `batches` from the variance at batch size `known`.

    The variance is proportional to 1/B for independent images. A batch's B images are distinct
    images from a population of N, which adds a factor (N - B) / (N - 1); at B = N, the variance is
    0. This is exact if the gradient is a mean over images, as it is without normalization.
    """

    def law(batch: int) -> float:
        return (population - batch) / (batch * (population - 1))

    return [variance * law(batch) / law(known) for batch in batches]
