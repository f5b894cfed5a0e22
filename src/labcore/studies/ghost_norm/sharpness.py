"""The sharpness of a minimum: the trace of the Hessian, and the loss under random perturbations.

Both take the loss as a function of no arguments, and the weights that it depends on. Rescaling the
weights before a normalization changes the trace, although the network's function stays the same
(Dinh et al., arXiv 1703.04933). The perturbation is relative to the weights' norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from labcore.checks import non_negative, positive_int

__all__ = ["Trace", "hessian_trace", "perturbed_losses"]

Loss = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """An estimate of the trace of a Hessian.

    samples: one per probe, independent and unbiased.
    by_parameter: each weight tensor's mean contribution, the trace of its diagonal block.
    """

    samples: tuple[float, ...]
    by_parameter: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The estimate, the mean over the probes."""
        return fmean(self.samples)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; infinite for one probe."""
        count = len(self.samples)
        return stdev(self.samples) / math.sqrt(count) if count > 1 else math.inf


def hessian_trace(
    loss: Loss, parameters: Sequence[Tensor], *, probes: int = 20, generator: torch.Generator
) -> Trace:
    """Estimate the trace of the Hessian of `loss()` in `parameters`, with Hutchinson's estimator.

    It's the mean of v·Hv over `probes` random vectors v of ±1. A product Hv costs two backward
    passes and needs no matrix. A weight in which the loss is linear counts as 0.
    Source: M. F. Hutchinson, Communications in Statistics 18 (1989), 1059-1076.
    """
    positive_int("probes", probes)
    weights = list(parameters)
    gradients = torch.autograd.grad(loss(), weights, create_graph=True)
    curved = [gradient for gradient in gradients if gradient.requires_grad]
    shares = []
    for _ in range(probes):
        vectors = [
            torch.randint(2, w.shape, generator=generator).to(w).mul_(2).sub_(1) for w in weights
        ]
        signs = [v for v, g in zip(vectors, gradients, strict=True) if g.requires_grad]
        products = torch.autograd.grad(curved, weights, signs, retain_graph=True, allow_unused=True)
        shares.append(
            [
                0.0 if product is None else (vector * product).sum().item()
                for vector, product in zip(vectors, products, strict=True)
            ]
        )
    return Trace(
        samples=tuple(sum(row) for row in shares),
        by_parameter=tuple(fmean(column) for column in zip(*shares, strict=True)),
    )


@torch.no_grad()
def perturbed_losses(
    loss: Loss,
    parameters: Sequence[Tensor],
    *,
    radius: float,
    directions: int = 10,
    generator: torch.Generator,
) -> list[float]:
    """Return `loss()` after a random step from the weights, once per direction; then restore them.

    Every row of a matrix (the weights into one unit, or one filter of a convolution) moves by
    `radius` times its norm in a random direction. Thus, rescaling a row has no effect if a
    normalization follows. Vectors (biases, a normalization's parameters) don't move.
    Source: Li et al., arXiv 1712.09913.
    """
    non_negative("radius", radius)
    matrices = [p for p in parameters if p.dim() > 1]
    before = [p.clone() for p in matrices]
    found = []
    for _ in range(positive_int("directions", directions)):
        for weights, start in zip(matrices, before, strict=True):
            noise = torch.randn(start.shape, generator=generator).to(start)
            rows, scale = noise.flatten(1), start.flatten(1).norm(dim=1, keepdim=True)
            step = rows * (radius * scale / rows.norm(dim=1, keepdim=True))
            weights.copy_(start + step.view_as(start))
        found.append(loss().item())
    for weights, start in zip(matrices, before, strict=True):
        weights.copy_(start)
    return found
