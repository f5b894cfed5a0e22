"""The variance of batch gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from labcore.checks import positive_int
from labcore.studies.ghost_norm.large_batches import SMALL, Regime, Rows, split, train

__all__ = [
    "BATCHES",
    "KINDS",
    "batch_gradients",
    "gradient_variance",
    "predict_gradient_variance",
    "relative_variance",
]

BATCHES = (8, 16, 32, 64, 128, 256, 512)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "no norm": {"norm": "none"},
    "batch norm": {},
    "ghosts of 32": {"ghost": 32},
}


def batch_gradients(
    model: nn.Module,
    data: Rows,
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


def relative_variance(kind: str, seed: int, *, draws: int) -> list[float]:
    """Measure the variance of a network's gradient for each of BATCHES.

    The network, with the normalization `kind` of KINDS, has learned for one epoch at batch 32. The
    variance is over the squared norm of the gradient of all rows, which is that of plain batch
    normalization, also for ghosts.
    """
    regime, data = Regime(batch=SMALL, lr=0.1, epochs=1, **KINDS[kind]), split(seed)
    model = train(regime, [seed])[0].model
    dice = torch.Generator().manual_seed(seed)
    draw = functools.partial(batch_gradients, data=data, generator=dice)
    # A batch of one ghost is normalized as by plain batch normalization, so the weights are equal.
    plain = train(Regime(batch=SMALL, lr=0.1, epochs=1), [seed])[0].model
    full = draw(model if kind == "no norm" else plain, batch=len(data.train_y), draws=1)[0]
    square = full.square().sum().item()
    return [gradient_variance(draw(model, batch=batch, draws=draws)) / square for batch in BATCHES]
