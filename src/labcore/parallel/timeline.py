"""A token's time on paper: launches, kernels and collectives of one decode step on three streams.

The host launches one operation after another; the device runs kernels on one stream and collectives
on another. What each of them takes stands in `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labcore.checks import one_of, positive_int
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.cost import Link
from labcore.parallel.step import (
    GPUS,
    MODELS,
    Collective,
    Gpu,
    Kernel,
    decode_step,
    held_bytes,
)

__all__ = [
    "CHUNKS",
    "GPUS",
    "MODELS",
    "Collective",
    "Event",
    "Gpu",
    "Kernel",
    "Timeline",
    "decode_step",
    "held_bytes",
    "simulate",
]

CHUNKS = 4
"""Pieces of a product and of its all-reduce where `overlap=True` says no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One bar of a timeline, in seconds from the first launch on.

    stream: host, compute or wire; at: the place of its operation in `simulate`'s ops, -1 for the
    launch of a graph.
    """

    name: str
    stream: str
    at: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What `simulate` found. All times in seconds.

    events: in the order of launches, empty if they were not asked for. seconds: from the first
    launch to the end of the last operation. compute, wire: of all kernels, of all collectives.
    exposed: of wire, while no kernel ran beside it. host: of all launches. launches: how many the
    host made; operations: kernels and collectives that ran.
    """

    events: tuple[Event, ...]
    seconds: float
    compute: float
    wire: float
    exposed: float
    host: float
    launches: int
    operations: int

    @property
    def busy(self) -> float:
        """Seconds in which a kernel, a collective or both ran."""
        return self.compute + self.exposed

    @property
    def idle(self) -> float:
        """Seconds in which the device waited for a launch or stood between two kernels."""
        return max(0.0, self.seconds - self.busy)

    @property
    def wire_share(self) -> float:
        """The share of the time in which only the wire worked, from 0 to 1."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def launch_bound(self) -> bool:
        """Whether the launches take longer than all that they launch."""
        return self.host > self.busy


def simulate(
    ops: Sequence[Kernel | Collective],
    gpu: Gpu,
    link: Link,
    *,
    algorithm: str = "ring",
    graph: bool = False,
    overlap: bool | int = False,
    events: bool = True,
) -> Timeline:
    """When each operation of a step runs.

    Eagerly the host launches one after another, `gpu.launch` seconds each, and never waits; a
    graph is one launch for all of them. An operation begins once it is launched and `gpu.gap`
    after what it waits for has ended: everything before it, or, with overlap, the stream's last.
    algorithm: of the all-reduces, a key of `collectives.ALL_REDUCES`.
    overlap: a product with weights and the all-reduce behind it are cut into so many chunks
    (True: CHUNKS), and the wire carries one while the next is computed. Each chunk is launched,
    and each of its messages pays the algorithm's latency. Neither slows the other down, though a
    real collective takes memory bandwidth and some multiprocessors from the product beside it.
    events: False leaves `Timeline.events` empty, for totals alone.
    Raises ValueError for an unknown algorithm or one that the number of ranks does not suit, and
    for chunks below 1.
    """
    one_of("algorithm", algorithm, ALL_REDUCES)
    chunks = _chunks(overlap)
    plan = _plan(ops, gpu, link, algorithm, chunks)
    spans: list[tuple[float, float]] = []
    kernel_end = wire_end = -gpu.gap
    compute = wire = 0.0
    first, later, gap = gpu.launch, 0.0 if graph else gpu.launch, gpu.gap
    for number, (_, _, seconds, on_wire, joins) in enumerate(plan):
        ready = wire_end if joins and wire_end > kernel_end else kernel_end
        begin = max(first + number * later, ready + gap)
        end = begin + seconds
        spans.append((begin, end))
        if on_wire:
            wire_end = end
            wire += seconds
        else:
            kernel_end = end
            compute += seconds
    launches = min(1, len(plan)) if graph else len(plan)
    return Timeline(
        events=_events(plan, spans, gpu.launch, graph) if events else (),
        seconds=max(kernel_end, wire_end, 0.0),
        compute=compute,
        wire=wire,
        exposed=wire - (_shared(plan, spans) if chunks > 1 else 0.0),
        host=launches * gpu.launch,
        launches=launches,
        operations=len(plan),
    )


def _chunks(overlap: bool | int) -> int:
    if isinstance(overlap, bool):
        return CHUNKS if overlap else 1
    return positive_int("overlap", overlap, "pass True, False or a number of chunks")


# Of an operation: its name, its place in ops, its seconds, whether it runs on the wire, and whether
# it waits for both streams.
_Step = tuple[str, int, float, bool, bool]


def _plan(
    ops: Sequence[Kernel | Collective], gpu: Gpu, link: Link, algorithm: str, chunks: int
) -> list[_Step]:
    """The operations in the order in which the host launches them, cut into chunks."""
    known: dict[tuple[int, int], float] = {}  # by identity: a step repeats its layer's operations

    def seconds(op: Kernel | Collective, chunks: int) -> float:
        key = (id(op), chunks)
        if key not in known:
            piece = op if chunks == 1 else op.chunk(chunks)
            known[key] = (
                piece.seconds(gpu) if isinstance(piece, Kernel) else piece.seconds(link, algorithm)
            )
        return known[key]

    if chunks == 1:
        return [
            (op.name, at, seconds(op, 1), isinstance(op, Collective), True)
            for at, op in enumerate(ops)
        ]
    plan: list[_Step] = []
    cut = False  # whether the product before was cut, and this collective with it
    for at, op in enumerate(ops):
        if cut:
            cut = False
            continue
        behind = ops[at + 1] if at + 1 < len(ops) else None
        cut = _divisible(op, behind)
        if cut and behind is not None:
            for number in range(chunks):
                plan.append((op.name, at, seconds(op, chunks), False, number == 0))
                plan.append((behind.name, at + 1, seconds(behind, chunks), True, True))
        else:
            plan.append((op.name, at, seconds(op, 1), isinstance(op, Collective), True))
    return plan


def _divisible(op: Kernel | Collective, behind: Kernel | Collective | None) -> bool:
    return (
        isinstance(op, Kernel)
        and op.weights > 0
        and isinstance(behind, Collective)
        and behind.kind == "all_reduce"
    )


def _shared(plan: Sequence[_Step], spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which both streams run; the spans of each are in order and apart."""
    kernels = [span for span, step in zip(spans, plan, strict=True) if not step[3]]
    wires = [span for span, step in zip(spans, plan, strict=True) if step[3]]
    total, at = 0.0, 0
    for begin, end in wires:
        while at < len(kernels) and kernels[at][1] <= begin:
            at += 1
        look = at
        while look < len(kernels) and kernels[look][0] < end:
            total += min(end, kernels[look][1]) - max(begin, kernels[look][0])
            look += 1
    return total


def _events(
    plan: Sequence[_Step], spans: Sequence[tuple[float, float]], launch: float, graph: bool
) -> tuple[Event, ...]:
    found: list[Event] = []
    if graph and plan:
        found.append(Event(name="graph", stream="host", at=-1, begin=0.0, end=launch))
    for number, ((name, at, _, wire, _), (begin, end)) in enumerate(zip(plan, spans, strict=True)):
        if not graph:
            found.append(
                Event(
                    name=name, stream="host", at=at, begin=number * launch,
                    end=(number + 1) * launch,
                )
            )  # fmt: skip
        stream = "wire" if wire else "compute"
        found.append(Event(name=name, stream=stream, at=at, begin=begin, end=end))
    return tuple(found)
