"""How much time capturing a decode step saves: its launches, timed without and with a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from labcore.checks import positive_int
from labcore.parallel.graphs import GraphedDecoder
from labcore.timing import Timing

__all__ = ["LaunchSeconds", "launch_seconds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSeconds:
    """Seconds per decode step, launched operation by operation and as one graph.

    eager, graphed: until the device is done. eager_host, graphed_host: until the host is free.
    launches: operations per step.
    """

    eager: Timing
    graphed: Timing
    eager_host: Timing
    graphed_host: Timing
    launches: int


def launch_seconds(
    decoder: GraphedDecoder, *, batch: int = 1, rounds: int = 20, warmup: int = 3
) -> LaunchSeconds:
    """Time a step of `batch` rows without and with its graph, in turns; the cache doesn't change.

    decoder: on a GPU; all ranks of its group must make the same call. rounds: steps timed each way.
    Raises ValueError on a CPU, where a graph saves no launches.
    """
    if decoder.device.type != "cuda":
        raise ValueError(
            f"decoder must be on a GPU, got one on {decoder.device}; on a CPU the operations are "
            "launched one by one either way"
        )
    return _in_turns(decoder, batch, rounds, warmup)


def _in_turns(decoder: GraphedDecoder, batch: int, rounds: int, warmup: int) -> LaunchSeconds:
    positive_int("rounds", rounds)
    launches = len(decoder.recorded(batch))
    found: dict[str, list[float]] = {"eager": [], "graphed": []}
    hosts: dict[str, list[float]] = {"eager": [], "graphed": []}
    for turn in range(warmup + rounds):
        for name, graphed in (("eager", False), ("graphed", True)):
            host, whole = _once(decoder._resting_step(batch, graphed=graphed), decoder.device)
            if turn >= warmup:
                hosts[name].append(host)
                found[name].append(whole)
    return LaunchSeconds(
        **{name: Timing(samples=tuple(samples)) for name, samples in found.items()},
        **{f"{name}_host": Timing(samples=tuple(samples)) for name, samples in hosts.items()},
        launches=launches,
    )


def _once(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds until step() returns, and until the device has finished it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    begin = time.perf_counter()
    step()
    returned = time.perf_counter()
    wait(device)
    return returned - begin, time.perf_counter() - begin
