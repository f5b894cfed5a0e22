"""MNIST-1D: ten digits drawn as a line of 40 numbers, made by a program, in any amount.

The recipe and its constants are those of Greydanus and Kobak, "Scaling Down Deep Learning with
MNIST-1D" (arXiv 2011.14439), and of their package mnist1d 0.0.2 (Apache-2.0); the random numbers
and this code are our own.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import positive_int

__all__ = ["LENGTH", "TEMPLATES", "draw", "place", "templates"]

LENGTH = 40  # numbers per row
PADDING = (36, 60)  # zeros after the template, at least and at most
SCALE, SHIFTS, SHEAR = 0.4, 48, 0.75
SPREAD = 0.155  # standard deviation of all numbers, by which rows are divided
NOISE, BLUR, JITTER = 0.25, 2.0, 2e-2  # noise around the digit, its smoothing, noise everywhere
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
"""The digits 0 to 9, as lists of 12 heights."""


@functools.cache
def templates() -> Tensor:
    """Return the templates [10, 12] fp64: of equal spread, and beginning at 0."""
    x = torch.tensor(TEMPLATES, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    x = x / x.std(1, correction=0, keepdim=True)
    return (x - x[:, :1]) / 6 + 1e-8  # so that only the padding is exactly 0


def _resample(x: Tensor, places: Tensor) -> Tensor:
    """Interpolate the rows of x [N, L] linearly at `places` [N, M] in 0..L-1."""
    left = places.floor().long().clamp_(max=x.shape[1] - 2)
    share = places - left
    return x.gather(1, left) * (1 - share) + x.gather(1, left + 1) * share


def place(
    labels: Tensor,
    *,
    padding: Tensor,
    scale: Tensor,
    shift: Tensor,
    slope: Tensor,
    around: Tensor | float = 0.0,
    everywhere: Tensor | float = 0.0,
) -> Tensor:
    """Turn digits into rows [N, 40] fp64: pad, stretch, scale, shift, add noise, shear, resample.

    labels, padding, shift: integers [N]. scale, slope: fp64 [N]; a row falls by `slope` from end to
    end. around, everywhere: noise [N, 72], added where the digit is not, and to all 72 places.
    """
    wide = len(TEMPLATES[0]) + PADDING[1]
    padded = F.pad(templates()[labels], (0, PADDING[1]))
    last = (len(TEMPLATES[0]) - 1 + padding).double()
    grid = torch.linspace(0, 1, wide, dtype=torch.float64)
    x = _resample(padded, last[:, None] * grid) * scale[:, None]
    x = x.gather(1, (torch.arange(wide) - shift[:, None]) % wide)
    x = torch.where(x == 0, around, x) + everywhere
    x = x - slope[:, None] * (grid - 0.5)
    ends = torch.linspace(0, wide - 1, LENGTH, dtype=torch.float64)
    return _resample(x, ends.expand(len(x), LENGTH))


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw fresh rows: x fp32 [count, 40] of mean 0 and spread 1, and their digits int64 [count].

    Every digit is equally frequent, up to one row, and the order is random.
    """
    n = positive_int("count", count)
    wide = len(TEMPLATES[0]) + PADDING[1]
    labels = torch.randperm(n, generator=generator) % len(TEMPLATES)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, dtype=torch.float64).uniform_(low, high, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    def normal() -> Tensor:
        return torch.empty(n, wide, dtype=torch.float64).normal_(generator=generator)

    around = gaussian_filter1d(NOISE * normal().numpy(), BLUR, axis=1)
    x = place(
        labels,
        padding=whole(PADDING[0], PADDING[1] + 1),
        scale=1 + SCALE * uniform(-0.5, 0.5),
        shift=whole(0, SHIFTS),
        slope=SHEAR * uniform(-0.5, 0.5),
        around=torch.from_numpy(np.ascontiguousarray(around)),
        everywhere=JITTER * normal(),
    )
    return (x / SPREAD).float(), labels
