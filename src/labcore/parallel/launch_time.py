"""What capturing a decode step saves: the time of its launches, measured before and after."""

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
    """Seconds of one decode step, launched one operation after another and as one graph.

    eager, graphed: until the device is done. eager_host, graphed_host: until the host is free.
    launches: operations of the step.
    """

    eager: Timing
    graphed: Timing
    eager_host: Timing
    graphed_host: Timing
    launches: int


def launch_seconds(
    decoder: GraphedDecoder, *, batch: int = 1, rounds: int = 20, warmup: int = 3
) -> LaunchSeconds:
    """Time a step of `batch` rows before and after its capture, in turns; the cache stays.

    decoder: on a GPU; all ranks of its group call alike. rounds: of one step each way.
    Raises ValueError on a CPU, where no launch is saved.
    """
    if decoder.device.type != "cuda":
        raise ValueError(
            f"launches are timed on a GPU, got a decoder on {decoder.device}; on a CPU the same "
            "steps run one by one either way"
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
    """Seconds until step() returns, and until the device has done it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    begin = time.perf_counter()
    step()
    returned = time.perf_counter()
    wait(device)
    return returned - begin, time.perf_counter() - begin
