"""The paths of optimizers on surfaces of two variables.

Gradients come from autograd and steps from the pure rules in `labcore.optim.rules`, so figures show
the same rules that train networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from labcore.checks import non_negative, one_of, positive_int
from labcore.optim import rules

__all__ = ["RULES", "SURFACES", "Rule", "Surface", "Trajectory", "grid", "trajectory"]

Rule = Callable[..., tuple[torch.Tensor, dict[str, Any]]]

# Keyed by display name, in the order of their invention.
RULES: dict[str, Rule] = {
    "gradient descent": rules.gradient_descent,
    "momentum": rules.momentum,
    "AdaGrad": rules.adagrad,
    "RMSProp": rules.rmsprop,
    "Adam": rules.adam,
    "AdamW": rules.adamw,
    "Lion": rules.lion,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """A loss over points [..., 2].

    loss: function from points [..., 2] to losses [...]. start: where a trajectory begins.
    minimum: the lowest point. x_range, y_range: the window to plot.
    """

    name: str
    loss: Callable[[torch.Tensor], torch.Tensor]
    start: tuple[float, float]
    minimum: tuple[float, float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]


def _bowl(points: torch.Tensor) -> torch.Tensor:
    """A quadratic valley with 25 times the curvature across as along."""
    x, y = points.unbind(-1)
    return 0.5 * (x * x + 25 * y * y)


def _rosenbrock(points: torch.Tensor) -> torch.Tensor:
    """The curved valley of Rosenbrock (1960), with a factor of 20 instead of 100 for plotting."""
    x, y = points.unbind(-1)
    return (1 - x) ** 2 + 20 * (y - x * x) ** 2


def _saddle(points: torch.Tensor) -> torch.Tensor:
    """Two minima at (0, -1) and (0, 1), with a saddle between them where the gradient vanishes."""
    x, y = points.unbind(-1)
    return 0.5 * x**2 + 0.25 * y**4 - 0.5 * y**2 + 0.25


SURFACES = {
    "bowl": Surface(
        name="bowl",
        loss=_bowl,
        start=(-4.0, 1.5),
        minimum=(0.0, 0.0),
        x_range=(-5.0, 3.0),
        y_range=(-2.5, 2.5),
    ),
    "valley": Surface(
        name="valley",
        loss=_rosenbrock,
        start=(-1.2, 1.0),
        minimum=(1.0, 1.0),
        x_range=(-2.0, 2.0),
        y_range=(-1.0, 3.0),
    ),
    "saddle": Surface(
        name="saddle",
        loss=_saddle,
        start=(-1.6, 0.02),
        minimum=(0.0, 1.0),
        x_range=(-2.0, 1.5),
        y_range=(-1.5, 1.5),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The points [steps + 1, 2], including the start, and their losses [steps + 1], both fp64."""

    points: torch.Tensor
    losses: torch.Tensor


def trajectory(
    rule: Rule | str,
    surface: Surface | str,
    *,
    lr: float,
    noise: float = 0.0,
    steps: int = 100,
    seed: int = 0,
    **settings: Any,
) -> Trajectory:
    """Run `steps` steps of `rule` on `surface`, a Surface or a name in SURFACES.

    rule: a name in RULES, or a pure rule (param, grad, state, *, lr, ...) -> (param, state).
    settings: passed to the rule.
    noise: standard deviation of the normal noise added to each component of the gradient. It's
    drawn from `seed`, so different rules get the same noise.
    A trajectory that leaves the floating-point range stays at its last point.
    """
    if isinstance(rule, str):
        rule = RULES[one_of("rule", rule, RULES)]
    if isinstance(surface, str):
        surface = SURFACES[one_of("surface", surface, SURFACES)]
    non_negative("lr", lr)
    non_negative("noise", noise)
    positive_int("steps", steps)
    generator = torch.Generator().manual_seed(seed)
    disturbance = noise * torch.randn(steps, 2, generator=generator, dtype=torch.float64)
    point = torch.tensor(surface.start, dtype=torch.float64)
    state: dict[str, Any] = {}
    points = [point]
    for step in range(steps):
        here = point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(surface.loss(here), here)
        moved, state = rule(point, slope + disturbance[step], state, lr=lr, **settings)
        point = moved if math.isfinite(float(surface.loss(moved))) else point
        points.append(point)
    stacked = torch.stack(points)
    return Trajectory(points=stacked, losses=surface.loss(stacked))


def grid(surface: Surface, cells: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [cells], y [cells] and the loss [cells, cells], rows along y, over the window."""
    positive_int("cells", cells)
    x = torch.linspace(*surface.x_range, cells, dtype=torch.float64)
    y = torch.linspace(*surface.y_range, cells, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    return x, y, surface.loss(points)
