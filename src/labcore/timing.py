"""Timing that survives a noisy machine: warm-up, repeats, medians, and pairs in one run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from labcore.checks import one_of, positive_int

__all__ = ["Comparison", "Timing", "measure", "paired", "quantiles"]


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile of `samples`, by linear interpolation."""
    if not samples:
        raise ValueError("samples must hold at least one number, got none")
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.2), at(0.5), at(0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call, repeat by repeat."""

    samples: tuple[float, ...]
    p20: float = field(init=False)
    p50: float = field(init=False)
    p80: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in zip(("p20", "p50", "p80"), quantiles(list(self.samples)), strict=True):
            object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """How many repeats were timed."""
        return len(self.samples)


def _once(fn: Callable[[], object], device: torch.device | None) -> float:
    """Seconds of one call: device events on a GPU, the wall clock on a CPU."""
    if device is not None and device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def measure(
    fn: Callable[[], object],
    *,
    repeats: int = 20,
    warmup: int = 3,
    device: torch.device | None = None,
) -> Timing:
    """Time `fn` `repeats` times after `warmup` calls. Seconds.

    device: a CUDA device is timed by its own events, so queued work is counted where it runs.
    """
    positive_int("repeats", repeats)
    for _ in range(warmup):
        fn()
    return Timing(samples=tuple(_once(fn, device) for _ in range(repeats)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several functions timed in the same rounds; `timings[name].samples[i]` is round i."""

    timings: Mapping[str, Timing]

    def ratios(self, name: str, reference: str) -> list[float]:
        """Round by round, the time of `name` over that of `reference`."""
        one_of("name", name, self.timings)
        one_of("reference", reference, self.timings)
        pairs = zip(self.timings[name].samples, self.timings[reference].samples, strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def ratio(self, name: str, reference: str) -> float:
        """The median of `ratios`: below 1 means that `name` is faster."""
        return statistics.median(self.ratios(name, reference))


def paired(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    device: torch.device | None = None,
) -> Comparison:
    """Time `functions` against each other: every round runs each once, in a shuffled order.

    A slow phase of the machine then falls on all of them, and their ratio keeps its meaning.
    """
    positive_int("rounds", rounds)
    if len(functions) < 2:
        raise ValueError(f"paired needs at least two functions, got {len(functions)}; use measure")
    for _ in range(warmup):
        for fn in functions.values():
            fn()
    order, dice = list(functions), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            samples[name].append(_once(functions[name], device))
    return Comparison(timings={name: Timing(samples=tuple(samples[name])) for name in functions})
