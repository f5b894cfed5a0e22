"""The gradient of ghost batch normalization from what its forward pass has kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BACKWARD"]


def backward(
    grad: Tensor, normalized: Tensor, inverse: Tensor, weight: Tensor, *, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [B, C], weight [C] and bias [C] from that of y [B, C]."""
    parts = []
    for g, z, scale in zip(grad.split(sizes), normalized.split(sizes), inverse, strict=True):
        g = g * weight
        parts.append(scale * (g - g.mean(0) - z * (g * z).mean(0)))
    return torch.cat(parts), (grad * normalized).sum(0), grad.sum(0)


def _means(values: Tensor, sizes: tuple[int, ...], fault: str) -> Tensor:
    """The mean of each ghost of `values` [B, C] at each of its rows, [B, C]."""
    if fault == "means of the batch":
        return values.mean(0).expand_as(values)
    over = {"divided by the batch": len(values), "sums": 1}
    less = int(fault == "n - 1")
    return torch.cat(
        [
            (part.sum(0) / over.get(fault, max(1, len(part) - less))).expand_as(part)
            for part in values.split(sizes)
        ]
    )


def _wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def gradients(
        grad: Tensor, normalized: Tensor, inverse: Tensor, weight: Tensor, *, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        g = grad if fault == "weight left out" else grad * weight
        z = normalized
        scale = torch.cat([one.expand(n, -1) for one, n in zip(inverse, sizes, strict=True)])
        if fault == "one scale":
            scale = inverse.mean(0).expand_as(z)
        if fault == "deviation as a factor":
            scale = 1 / scale
        way = g
        if fault not in ("constants", "mean constant"):
            way = way - _means(g, sizes, fault)
        if fault not in ("constants", "variance constant"):
            second = z * _means(g * z, sizes, fault)
            way = way + second if fault == "plus" else way - second
        if fault == "scale left out":
            scale = torch.ones_like(scale)
        by_weight, by_bias = (grad * z).sum(0), grad.sum(0)
        if fault == "mean over the rows":
            by_weight, by_bias = by_weight / len(grad), by_bias / len(grad)
        if fault == "mean over the ghosts":
            by_weight, by_bias = by_weight / len(sizes), by_bias / len(sizes)
        if fault == "weight times gradient":
            by_weight, by_bias = by_weight * weight, by_bias * weight
        if fault == "turned round":
            by_weight, by_bias = by_bias, by_weight
        return scale * way, by_weight, by_bias

    return gradients


def _cases(seed: int) -> list[dict[str, Any]]:
    """Ghosts of unlike sizes and spreads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cases = []
    for sizes, channels in (((4, 4), 2), ((3, 3, 5), 3), ((6,), 1), ((5, 2, 7, 4), 2)):
        scaled, inverses = [], []
        for rows in sizes:
            x = normal(rows, channels) * (0.5 + 2 * torch.rand(channels, generator=generator))
            inverse = (x.var(0, correction=0) + 0.1).rsqrt()
            scaled.append((x - x.mean(0)) * inverse)
            inverses.append(inverse)
        cases.append(
            {
                "grad": normal(sum(sizes), channels) + 0.5,
                "normalized": torch.cat(scaled),
                "inverse": torch.stack(inverses),
                "weight": 1.5 + normal(channels),
                "sizes": sizes,
            }
        )
    return cases


_HINTS = {
    "constants": "Mean and variance are treated as constants. Both are made of the rows of the "
    "ghost, so each row moves them, and through them all the others.",
    "variance constant": "The gradient passes through the mean and not through the variance. "
    "Scale all rows of a ghost up a little: y hardly changes, so your gradient should be almost "
    "at right angles to x̂.",
    "mean constant": "The gradient passes through the variance and not through the mean. Add the "
    "same number to all rows of a ghost: y does not change, so your gradient should sum to zero "
    "over a ghost.",
    "means of the batch": "The means are taken over the whole batch. A row of one ghost has no "
    "part in the statistics of another, and no influence on its rows.",
    "divided by the batch": "The sums over a ghost are divided by the number of rows of the batch. "
    "The statistics of a ghost were made by dividing by its own.",
    "sums": "The two terms are sums over the ghost, where its means belong: one row moves the mean "
    "of n rows by an n-th.",
    "n - 1": "The sums are divided by the rows of a ghost less one. The variance that normalizes "
    "divides by all of its rows, and so does its gradient.",
    "plus": "The term of the variance has the wrong sign: a gradient along x̂ is to be taken away.",
    "weight left out": "The gradient of x does not know `weight`, by which x̂ is multiplied on the "
    "way to y.",
    "scale left out": "The gradient of x lacks the factor 1/√(variance + eps), by which a change "
    "of x is scaled on the way to x̂.",
    "deviation as a factor": "The gradient of x is divided by `inverse`, which is 1/√(variance + "
    "eps) already.",
    "one scale": "All ghosts use one `inverse`. Each has its own row in it.",
    "mean over the rows": "The gradients of weight and bias are means over the rows. Each row's y "
    "adds to the loss, so their parts add up.",
    "mean over the ghosts": "The gradients of weight and bias are means over the ghosts. All "
    "ghosts share them, and all their rows' parts add up.",
    "weight times gradient": "The gradients of weight and bias have the weight as a factor. It "
    "stands between x̂ and y, and these two gradients do not go further back than y.",
    "turned round": "The gradients of weight and of bias have changed places.",
}

BACKWARD = Exercise(
    id="ghost_norm.backward",
    reference=backward,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("gradient of x", "gradient of weight", "gradient of bias"),
    rtol=1e-8,
    atol=1e-10,
    explanation="With g = grad * weight, the gradient of x̂, a ghost's rows get "
    "inverse * (g - mean(g) - x̂ * mean(g * x̂)), the means over the ghost's rows. The first mean is "
    "what reaches a row through the mean of the ghost, the second what reaches it through the "
    "variance; eps is in `inverse` and nowhere else. So a gradient sums to zero over each ghost, "
    "and adding a number to all of its rows changes nothing. In place of the statistics of one "
    "large batch there are those of many small ones, and a row's gradient depends on the rows of "
    "its own ghost only: that is why one pass over the batch equals passes over its ghosts with "
    "their gradients added up.",
)
