"""Timing on noisy machines: warm-up, repeats, medians, and functions timed in the same rounds."""

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
    """Return the 20th, 50th and 80th percentiles of `samples`, by linear interpolation."""
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
    """The seconds of one call, for each repeat."""

    samples: tuple[float, ...]
    p20: float = field(init=False)
    p50: float = field(init=False)
    p80: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in zip(("p20", "p50", "p80"), quantiles(list(self.samples)), strict=True):
            object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """The number of repeats."""
        return len(self.samples)


def _once(fn: Callable[[], object], device: torch.device | None) -> float:
    """Time one call in seconds: with device events on a GPU, with the wall clock on a CPU."""
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
    """Time `fn` `repeats` times after `warmup` calls, in seconds.

    device: a CUDA device is timed with its own events, so queued work counts when it runs.
    """
    positive_int("repeats", repeats)
    for _ in range(warmup):
        fn()
    return Timing(samples=tuple(_once(fn, device) for _ in range(repeats)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several functions timed in the same rounds. `timings[name].samples[i]` is round i."""

    timings: Mapping[str, Timing]

    def ratios(self, name: str, reference: str) -> list[float]:
        """Return the time of `name` divided by that of `reference`, for each round."""
        one_of("name", name, self.timings)
        one_of("reference", reference, self.timings)
        pairs = zip(self.timings[name].samples, self.timings[reference].samples, strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def ratio(self, name: str, reference: str) -> float:
        """Return the median of `ratios`. Below 1, `name` is faster."""
        return statistics.median(self.ratios(name, reference))


def paired(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    device: torch.device | None = None,
) -> Comparison:
    """Time `functions` against each other. Every round runs each once, in a shuffled order.

    A slow phase of the machine then affects all of them, so their ratios stay meaningful.
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
