"""What eight GPUs take for a token, over all that a model without their measurements assumes.

Three things stand on no data sheet: the share of a peak that kernels reach, NCCL's latency per
call, and what a launch costs the host. Each result is a range over the first two, and the launch is
an argument. The time per step and the bandwidth are those of `parallel.protocols`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labcore.checks import one_of
from labcore.models.shipped import pretrained
from labcore.parallel.cost import Link
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.llama import local_cache
from labcore.parallel.protocols import protocol_links
from labcore.parallel.step import GPUS, MODELS, GpuRates, decode_step
from labcore.parallel.timeline import simulate_timeline

__all__ = [
    "BARE_LAUNCH",
    "BASES",
    "OPERATOR",
    "REACHES",
    "WAYS",
    "Range",
    "added",
    "gain",
    "operator_launch",
    "share",
]

REACHES = (0.5, 0.75, 1.0)
"""Shares of the data sheet's peaks, of memory and of arithmetic, that kernels reach: assumed."""

BASES = (0.0, 1.0, 2.0)
"""NCCL's latency per call, over its own figures: from nothing to twice them."""

BARE_LAUNCH = 2.5e-6
"""Host seconds of a launch from C++: assumed. In Gray's example (NVIDIA, 2019), launches ran ahead
of kernels that took 3.8 us each, so each cost the host less than that."""

OPERATOR = 8e-6
"""Host seconds of an eager operator on a small tensor, called from Python on an A100.

Source: flagos-ai/Torch-FL, pull request 27, July 2026: add of 512 x 512, calls submitted back to
back, through that backend's C++ dispatcher to CUDA.
"""

WAYS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "two halves": ({"micro_batches": 2}, {}, {"forked": True}),
    "parallel block": ({"parallel_block": True}, {"parallel_block": True}, {"forked": True}),
    "one sum": ({"parallel_block": True, "one_sum": True}, {"parallel_block": True}, {}),
    "four chunks": ({}, {}, {"overlap": 4}),
}
"""Ways to hide or save the wire: arguments of `decode_step`, those of what it is compared with on
one stream, and arguments of `simulate_timeline`. "one sum" needs no fork: it drops a sum."""

_TOGETHER, _CONTEXT = 8, 1024  # GPUs, and tokens of each row in the cache
_FREE = Link(name="free", alpha=0.0, beta=0.0, source="a wire that takes no time")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The smallest and largest value over REACHES and BASES, and the one at NCCL's figures.

    middle: at 75% of the peaks and NCCL's own latency per call.
    """

    low: float
    middle: float
    high: float

    def verdict(self, rule: float, *, above: bool) -> str:
        """Return "holds", "does not hold", or "undecided" if the rule cuts the range.

        above: whether the rule is a least value, and not a largest one.
        """
        ends = [end >= rule if above else end <= rule for end in (self.low, self.high)]
        return "holds" if all(ends) else "undecided" if any(ends) else "does not hold"


@functools.cache
def operator_launch() -> float:
    """Return the host seconds per fused kernel when PyTorch launches its operators one by one.

    The course's own Llama counts how many operators there are for each kernel of `decode_step`.
    """
    model = pretrained("target")
    with GraphedDecoder(model, local_cache(model, batch=1, capacity=8), batches=(1,)) as decoder:
        operators = len(decoder.launches(1))
    return OPERATOR * operators / len(decode_step(model.config))


def _over(
    measure: Callable[[GpuRates, Mapping[str, Link]], float],
    link: str,
    bases: Sequence[float],
) -> Range:
    sheet, table = GPUS["H100 SXM"], protocol_links(link)
    found = {}
    for reach, base in itertools.product(REACHES, bases):
        gpu = replace(sheet, flops=reach * sheet.flops, bandwidth=reach * sheet.bandwidth)
        links = {name: replace(one, base=base * one.base) for name, one in table.items()}
        found[reach, base] = measure(gpu, links)
    values = found.values()
    return Range(low=min(values), middle=found[0.75, 1.0], high=max(values))


def share(
    model: str,
    link: str,
    batch: int,
    *,
    algorithm: str = "ring",
    bases: Sequence[float] = BASES,
) -> Range:
    """Return the share of a token's time in which only the wire works, replayed as a graph.

    Eight H100, 1,024 tokens of each row in the cache. model, link: keys of MODELS and LINKS.
    batch: rows. bases: NCCL's latency per call over its own figures; 1 must be among them.
    """
    ops = decode_step(MODELS[model], ranks=_TOGETHER, batch=batch, context=_CONTEXT)

    def measure(gpu: GpuRates, links: Mapping[str, Link]) -> float:
        run = simulate_timeline(ops, gpu, links, algorithm=algorithm, graph=True, events=False)
        return run.wire_share

    return _over(measure, link, bases)


def gain(
    model: str, link: str, batch: int, launch: float, *, bases: Sequence[float] = BASES
) -> Range:
    """Return a token's time eager over that as one graph.

    launch: host seconds per launch. bases: as in `share`.
    """
    ops = decode_step(MODELS[model], ranks=_TOGETHER, batch=batch, context=_CONTEXT)

    def measure(gpu: GpuRates, links: Mapping[str, Link]) -> float:
        eager, graph = (
            simulate_timeline(ops, gpu, links, graph=way, launch=launch, events=False).seconds
            for way in (False, True)
        )
        return eager / graph

    return _over(measure, link, bases)


def added(model: str, link: str, batch: int, way: str, *, bases: Sequence[float] = BASES) -> Range:
    """Return what the wire adds to a graph with one of WAYS, over what it adds on one stream.

    Added is a token's time minus that on a wire that takes none. What the way itself costs, such as
    reading the weights once for each half, counts too: above 1, it loses. bases: as in `share`.
    Raises ValueError for another way, or for rows that it can't divide.
    """
    shaped, compared, run = WAYS[one_of("way", way, WAYS)]
    step = functools.partial(
        decode_step, MODELS[model], ranks=_TOGETHER, batch=batch, context=_CONTEXT
    )
    ops, plain = step(**shaped), step(**compared)

    def measure(gpu: GpuRates, links: Mapping[str, Link]) -> float:
        seconds = functools.partial(simulate_timeline, gpu=gpu, graph=True, events=False)
        free = seconds(plain, link=_FREE).seconds
        one_stream = seconds(plain, link=links).seconds
        return (seconds(ops, link=links, **run).seconds - free) / (one_stream - free)

    return _over(measure, link, bases)
