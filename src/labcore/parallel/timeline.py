"""A simulated decode step: when its launches, kernels and collectives run, on three streams.

The host launches one operation after another. The device runs kernels on one stream and collectives
on another. `step` defines how long each of them takes, and what each of them reads.

A forked stream lets a collective run beside kernels: the communication stream waits for an event of
the product (fork), and the computation waits for an event of the collective (join). Both also work
without a graph; a capture turns the events into the graph's edges. A fork hides only
work that doesn't read the collective's result. A plain Llama step has none. Micro-batches offer the
other rows, a parallel block its MLP (see `step`), and `overlap` the next columns of the same
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from labcore.checks import one_of, positive_int
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.cost import Link
from labcore.parallel.step import (
    GPUS,
    MODELS,
    Collective,
    GpuRates,
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
    "GpuRates",
    "Kernel",
    "Timeline",
    "decode_step",
    "held_bytes",
    "simulate_timeline",
]

CHUNKS = 4
"""Chunks of a product and its all-reduce with `overlap=True`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One bar of a timeline, in seconds since the first launch.

    stream: host, compute or wire; at: the operation's index in `simulate_timeline`'s ops, -1 for
    the launch of a graph.
    """

    name: str
    stream: str
    at: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The result of `simulate_timeline`. All times in seconds.

    events: in launch order; empty if not requested. seconds: from the first launch to the end of
    the last operation. compute, wire: of all kernels, of all collectives. exposed: the part of wire
    during which no kernel ran. host: of all launches. launches: how many the host made; operations:
    kernels and collectives that ran.
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
        """Seconds during which a kernel, a collective or both ran."""
        return self.compute + self.exposed

    @property
    def idle(self) -> float:
        """Seconds during which the device waited for a launch or was between two kernels."""
        return max(0.0, self.seconds - self.busy)

    @property
    def wire_share(self) -> float:
        """The share of the time during which only the wire worked, from 0 to 1."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def launch_bound(self) -> bool:
        """Whether the launches take longer than everything they launch."""
        return self.host > self.busy


def simulate_timeline(
    ops: Sequence[Kernel | Collective],
    gpu: GpuRates,
    link: Link | Mapping[str, Link],
    *,
    algorithm: str = "ring",
    graph: bool = False,
    overlap: bool | int = False,
    forked: bool = False,
    launch: float | None = None,
    events: bool = True,
) -> Timeline:
    """Simulate when each operation of a step runs.

    Without a graph, the host launches one operation after another, `gpu.launch` seconds each, and
    never waits. A graph is one launch for all of them. An operation begins once it is launched and
    a gap after what it waits for has ended: every operation before it, unless overlap or forked
    says otherwise. The gap is `gpu.gap` in a graph, else `gpu.eager_gap`. Each stream stays in
    order.
    algorithm: of the all-reduces, a key of `collectives.ALL_REDUCES`. link: as in
    `cost.all_reduce_seconds`, one link or one for each protocol.
    overlap: the number of chunks (True: CHUNKS) into which a product with weights and the
    all-reduce after it are cut. The wire carries one chunk while the next is computed. Each chunk
    is launched, and each of its messages pays the algorithm's latency. In this model neither slows
    the other down; a real collective takes memory bandwidth and some multiprocessors from the
    product beside it.
    forked: an operation doesn't wait for all of those before it, but for those that it reads, which
    its `after` names. An event costs no time beyond the gap, and none on the host.
    launch: seconds, in place of `gpu.launch`.
    events: False leaves `Timeline.events` empty, if you only need totals.
    Raises ValueError for an unknown algorithm, for one that doesn't support the number of ranks,
    and for chunks below 1.
    """
    one_of("algorithm", algorithm, ALL_REDUCES)
    if launch is not None:
        gpu = replace(gpu, launch=launch)
    chunks = _chunks(overlap)
    plan = _plan(ops, gpu, link, algorithm, chunks, forked)
    spans: list[tuple[float, float]] = []
    first, later = gpu.launch, 0.0 if graph else gpu.launch
    gap = gpu.gap if graph else gpu.eager_gap
    free, busy = [-gap, -gap], [0.0, 0.0]  # when the last kernel and collective end; seconds of all
    for number, (_, _, seconds, on_wire, waits) in enumerate(plan):
        ready = max(free[on_wire], *(spans[one][1] for one in waits), -gap)
        begin = max(first + number * later, ready + gap)
        free[on_wire] = begin + seconds
        busy[on_wire] += seconds
        spans.append((begin, free[on_wire]))
    compute, wire = busy
    shared = _shared(plan, spans) if forked or chunks > 1 else 0.0
    launches = min(1, len(plan)) if graph else len(plan)
    return Timeline(
        events=_events(plan, spans, gpu.launch, graph) if events else (),
        seconds=max(*free, 0.0),
        compute=compute,
        wire=wire,
        exposed=max(0.0, wire - shared),  # rounding may make the difference -1e-19
        host=launches * gpu.launch,
        launches=launches,
        operations=len(plan),
    )


def _chunks(overlap: bool | int) -> int:
    if isinstance(overlap, bool):
        return CHUNKS if overlap else 1
    return positive_int("overlap", overlap, "pass True, False or a number of chunks")


# An operation's name, its index in ops, its seconds, whether it runs on the wire, and the places in
# the plan of what it waits for besides the last operation on its stream.
_Step = tuple[str, int, float, bool, tuple[int, ...]]


def _plan(
    ops: Sequence[Kernel | Collective],
    gpu: GpuRates,
    link: Link | Mapping[str, Link],
    algorithm: str,
    chunks: int,
    forked: bool,
) -> list[_Step]:
    """Return the operations, cut into chunks, in the order in which the host launches them."""
    known: dict[tuple[int, int], float] = {}  # by id, because layers repeat the same objects

    def seconds(op: Kernel | Collective, chunks: int) -> float:
        key = (id(op), chunks)
        if key not in known:
            piece = op if chunks == 1 else op.chunk(chunks)
            known[key] = (
                piece.seconds(gpu) if isinstance(piece, Kernel) else piece.seconds(link, algorithm)
            )
        return known[key]

    plan: list[_Step] = []
    last: list[int] = []  # where each operation's last piece stands in the plan
    for at, op in enumerate(ops):
        if len(last) > at:
            continue  # This collective was cut together with its product.
        if forked:
            waits = tuple(last[at - back] for back in op.after if back <= at)
        else:
            waits = (len(plan) - 1,) if plan else ()
        behind = ops[at + 1] if chunks > 1 and at + 1 < len(ops) else None
        if behind is not None and _divisible(op, behind):
            for number in range(chunks):
                plan.append((op.name, at, seconds(op, chunks), False, () if number else waits))
                own = (len(plan) - 1,)
                plan.append((behind.name, at + 1, seconds(behind, chunks), True, own))
            last += [len(plan) - 2, len(plan) - 1]
        else:
            plan.append((op.name, at, seconds(op, 1), isinstance(op, Collective), waits))
            last.append(len(plan) - 1)
    return plan


def _divisible(op: Kernel | Collective, behind: Kernel | Collective) -> bool:
    return (
        isinstance(op, Kernel)
        and op.weights > 0
        and isinstance(behind, Collective)
        and behind.kind == "all_reduce"
        and behind.after == (1,)
    )


def _shared(plan: Sequence[_Step], spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds during which both streams run; each stream's spans are in order."""
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
