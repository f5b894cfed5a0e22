"""What clipping does to one gradient: its norms before and after, by layer, and its direction.

A `Snapshot` stores the weights and the gradient of one batch, so that different clipping methods
can be compared on the same gradient. `effect` clips a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labcore.studies.clipping import networks

__all__ = [
    "Clip",
    "Effect",
    "Named",
    "Snapshot",
    "Spoil",
    "cosine",
    "effect",
    "flat",
    "snapshot",
]

Named = list[tuple[str, nn.Parameter]]
# Acts on the gradients in place, as the functions of labcore.clipping do.
Clip = Callable[[Named], Any]
Spoil = Callable[[int, Named], None]  # (step, parameters): corrupts the gradients in place


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The gradient of one batch: parameter names, and copies of the weights and gradients."""

    names: tuple[str, ...]
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The effect of clipping on a gradient.

    before, after: the gradient norm of each of the parameters `names`, before and after clipping.
    cosines: the cosine between each parameter's gradients before and after.
    cosine: the cosine between the whole gradients. A gradient that became zero has a cosine of 0.
    kept: the norm of the whole gradient after clipping, over the norm before.
    """

    names: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    cosines: tuple[float, ...]
    cosine: float
    kept: float


def snapshot(
    network: str,
    *,
    seed: int = 0,
    batch: int = 32,
    spoil: Spoil | None = None,
    **settings: Any,
) -> Snapshot:
    """Compute the gradient of a new network from `networks` on one batch.

    spoil: corrupts the gradient. settings: arguments of the network's class.
    """
    model = networks.make(network, seed=seed, **settings)
    named = list(model.named_parameters())
    _backward(model, network, batch, torch.Generator().manual_seed(seed))
    if spoil is not None:
        spoil(0, named)
    return Snapshot(
        names=tuple(name for name, _ in named),
        weights=tuple(weight.detach().clone() for _, weight in named),
        gradients=tuple(_gradient(weight).clone() for _, weight in named),
    )


def _backward(
    model: networks.Network, network: str, batch: int, generator: torch.Generator
) -> None:
    model.zero_grad()
    networks.loss(model, *networks.draw(network, batch, generator=generator)).backward()


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """Concatenate all elements into one float64 vector; a gradient that is None adds nothing."""
    return torch.cat([x.detach().flatten().double() for x in tensors if x is not None])


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two vectors, or 0 if one is zero or not finite."""
    sizes = one.norm() * other.norm()
    return float(one @ other / sizes) if sizes > 0 else 0.0


def _copy(taken: Snapshot) -> Named:
    """Return parameters with copies of the snapshot's weights and gradients."""
    named = []
    for name, weight, gradient in zip(taken.names, taken.weights, taken.gradients, strict=True):
        parameter = nn.Parameter(weight.clone())
        parameter.grad = gradient.clone()
        named.append((name, parameter))
    return named


def effect(taken: Snapshot, clip: Clip) -> Effect:
    """Measure what `clip` does to the snapshot's gradient."""
    named = _copy(taken)
    clip(named)
    after = [_gradient(parameter) for _, parameter in named]
    pairs = [
        (flat([one]), flat([other])) for one, other in zip(taken.gradients, after, strict=True)
    ]
    whole = flat(taken.gradients), flat(after)
    return Effect(
        names=taken.names,
        before=tuple(float(one.norm()) for one, _ in pairs),
        after=tuple(float(other.norm()) for _, other in pairs),
        cosines=tuple(cosine(one, other) for one, other in pairs),
        cosine=cosine(*whole),
        kept=float(whole[1].norm() / whole[0].norm()),
    )
