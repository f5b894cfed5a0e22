"""Checks that run on every rank of a group: pairs of tensors that must agree, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from labcore.device import seed_from_environment

Pairs = Iterable[tuple[str, Tensor, Tensor]]
Check = Callable[[torch.Generator], Pairs]
Differences = dict[str, dict[str, float]]


def module_seed() -> int:
    """As the fixture `seed`, for a fixture of a whole module."""
    asked = seed_from_environment()
    value = random.SystemRandom().randrange(2**31) if asked is None else asked
    print(f"LABCORE_SEED={value}")
    return value


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected number; infinite for other shapes."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not (torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    scale = expected.abs().max().clamp(min=1e-30)
    return float((actual - expected).abs().max() / scale) if actual.numel() else 0.0


def differences(checks: dict[str, Check], seed: int) -> Differences:
    """Of each check the difference of each pair, on this rank.

    A check's pairs are all made before one is judged: no rank stops while others wait for it.
    """
    found: Differences = {}
    for name, check in checks.items():
        pairs = list(check(torch.Generator().manual_seed(seed)))
        assert pairs, f"{name} compared nothing"
        found[name] = {label: difference(a.detach(), e.detach()) for label, a, e in pairs}
        assert len(found[name]) == len(pairs), f"{name} compared two things under one name"
    return found


def largest(by_rank: list[Differences], name: str) -> float:
    """The largest difference that any rank saw in a check."""
    return max(worst for found in by_rank for worst in found[name].values())


def say(by_rank: list[Differences], name: str, limit: float) -> list[str]:
    """What differs by more than `limit`, rank by rank."""
    return [
        f"rank {rank}: {label} differs by {worst:.2g}"
        for rank, found in enumerate(by_rank)
        for label, worst in found[name].items()
        if not worst <= limit
    ]
