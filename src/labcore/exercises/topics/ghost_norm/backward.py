"""Backpropagate through ghost batch normalization with what its forward pass kept."""

from __future__ import annotations

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
        mean, along = g.mean(0), (g * z).mean(0)
        parts.append(scale * (g - mean - z * along))
    return torch.cat(parts), (grad * normalized).sum(0), grad.sum(0)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw ghosts of different sizes and spreads."""
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


_MISTAKES = [
    Mistake("constants", (" - mean - z * along", ""),
            "Mean and variance are treated as constants. Both are made of the rows of the ghost, "
            "so each row moves them, and through them all the others."),
    Mistake("variance constant", (" - z * along", ""),
            "The gradient passes through the mean and not through the variance. Scale all rows of "
            "a ghost up a little: y hardly changes, so your gradient should be almost at right "
            "angles to x̂."),
    Mistake("mean constant", (" - mean", ""),
            "The gradient passes through the variance and not through the mean. Add the same "
            "number to all rows of a ghost: y does not change, so your gradient should sum to "
            "zero over a ghost."),
    Mistake("means of the batch",
            ("g.mean(0), (g * z).mean(0)",
             "(grad * weight).mean(0), (grad * weight * normalized).mean(0)"),
            "The means are taken over the whole batch. A row of one ghost has no part in the "
            "statistics of another, and no influence on its rows."),
    Mistake("divided by the batch",
            ("g.mean(0), (g * z).mean(0)",
             "g.sum(0) / len(grad), (g * z).sum(0) / len(grad)"),
            "The sums over a ghost are divided by the number of rows of the batch. The statistics "
            "of a ghost were made by dividing by its own."),
    Mistake("sums", ("g.mean(0), (g * z).mean(0)", "g.sum(0), (g * z).sum(0)"),
            "The two terms are sums over the ghost, where its means belong: one row moves the "
            "mean of n rows by an n-th."),
    Mistake("n - 1",
            ("g.mean(0), (g * z).mean(0)",
             "g.sum(0) / (len(g) - 1), (g * z).sum(0) / (len(g) - 1)"),
            "The sums are divided by the rows of a ghost less one. The variance that normalizes "
            "divides by all of its rows, and so does its gradient."),
    Mistake("n - 1 in one term", ("(g * z).mean(0)", "(g * z).sum(0) / (len(g) - 1)"),
            "In the variance term you divide by one less than the number of rows in a ghost. The "
            "variance that normalizes divides by all of them."),
    Mistake("plus", ("- z * along", "+ z * along"),
            "The term of the variance has the wrong sign: a gradient along x̂ is to be taken "
            "away."),
    Mistake("weight left out", ("g * weight", "g"),
            "The gradient of x does not know `weight`, by which x̂ is multiplied on the way to y."),
    Mistake("scale left out", ("scale * (", "("),
            "The gradient of x lacks the factor 1/√(variance + eps), by which a change of x is "
            "scaled on the way to x̂."),
    Mistake("deviation as a factor", ("scale * (", "1 / scale * ("),
            "The gradient of x is divided by `inverse`, which is 1/√(variance + eps) already."),
    Mistake("one scale", ("scale * (", "inverse.mean(0) * ("),
            "All ghosts use one `inverse`. Each has its own row in it."),
    Mistake("mean over the rows",
            ("(grad * normalized).sum(0), grad.sum(0)",
             "(grad * normalized).mean(0), grad.mean(0)"),
            "The gradients of weight and bias are means over the rows. Each row's y adds to the "
            "loss, so their parts add up."),
    Mistake("mean over the ghosts",
            ("(grad * normalized).sum(0), grad.sum(0)",
             "(grad * normalized).sum(0) / len(sizes), grad.sum(0) / len(sizes)"),
            "The gradients of weight and bias are means over the ghosts. All ghosts share them, "
            "and all their rows' parts add up."),
    Mistake("weight times gradient",
            ("(grad * normalized).sum(0), grad.sum(0)",
             "(grad * normalized).sum(0) * weight, grad.sum(0) * weight"),
            "The gradients of weight and bias have the weight as a factor. It stands between x̂ "
            "and y, and these two gradients do not go further back than y."),
    Mistake("turned round",
            ("(grad * normalized).sum(0), grad.sum(0)",
             "grad.sum(0), (grad * normalized).sum(0)"),
            "The gradients of weight and of bias have changed places."),
]  # fmt: skip

BACKWARD = Exercise(
    id="ghost_norm.backward",
    points=4,
    reference=backward,
    mistakes=_MISTAKES,
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
    hints=(
        "If you add the same number to all rows of one ghost, what happens to y? What must then "
        "be the sum of the gradient of x over this ghost?",
        "A row of x affects the loss through its own x̂, through the mean of its ghost, and "
        "through the variance of its ghost. With g the gradient of the loss by x̂, the mean "
        "subtracts the average of g over the ghost from g, and the variance subtracts x̂ times "
        "the average of g · x̂ over the ghost.",
        "`inverse[k] * (g - g.mean(0) - z * (g * z).mean(0))` is the gradient of x in ghost `k`, "
        "where `g` and `z` are the rows of this ghost in `grad * weight` and in `normalized`.",
    ),
)
