"""Estimate the clocks per iteration of a Hopper kernel's inner loop from its machine code.

An SM has four equal parts; each starts one instruction per clock and has one matrix unit. The model
walks one part's warps. It knows how long an instruction occupies its unit, when its result is
ready, and where a warp waits for matrix products or for its block, so it shows what overlaps *as
compiled*. It assumes the latencies below, that data from memory arrives in time, and that shared
memory has no conflicts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from labcore.compile_only.sass import Instruction, parsed, read, target, used, written

__all__ = ["Loop", "Span", "blocks_per_sm", "inner_loop", "timeline"]

PARTS = 4  # of an SM
REGISTERS, SHARED, WARPS = 65_536, 228 * 1024, 64  # of an SM
ROUNDS, SETTLED = 16, 8  # iterations to walk, and how many of them come before the steady state
# 16-bit multiply-adds per clock and part, so 4,096 FLOP per clock and SM. We assume that mma.sync
# reaches 63% of that, after Luo et al., 2024, arXiv 2402.13499.
MATRIX, SYNC_SHARE = 512, 0.63
BANKS = 128  # bytes per clock from shared memory, for all parts
# Unit -> the clocks for which a warp's instruction occupies it, and until its result is ready.
# Occupancy: 32 lanes over the results per clock and part in the CUDA C++ programming guide's table
# for compute capability 9.0. NVIDIA doesn't publish latencies. We assume values of the size that
# microbenchmarks found on earlier GPUs (Jia et al., 2018, arXiv 1804.06826).
UNITS = {
    "exp": (8, 18),
    "fma": (1, 4),
    "alu": (2, 5),
    "shared": (4, 23),
    "matrix": (0, 33),
    "issue": (1, 5),
}
OPS = {
    "MUFU": "exp",
    "FFMA": "fma",
    "FADD": "fma",
    "FMUL": "fma",
    "LDS": "shared",
    "STS": "shared",
    "SHFL": "shared",
    "HMMA": "matrix",
    "HGMMA": "matrix",
} | dict.fromkeys(
    ("CS2R", "F2F", "FMNMX", "FSEL", "FSETP", "IADD", "IMAD", "ISETP", "LEA", "LOP", "MOV", "PRMT",
     "SEL", "SHF", "VIADD"),
    "alu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One iteration of a loop in the steady state, on one part of an SM.

    clocks: how long it takes while `blocks` blocks share the SM, for two schedulers that bracket
    the real one, which NVIDIA doesn't publish. If several warps could start, the first scheduler
    lets one run ahead, so that one warp's products overlap with another's softmax; the second
    takes turns. busy: the clocks for which each unit works, for all blocks together; "issue" counts
    started instructions.
    """

    clocks: tuple[int, int]
    blocks: int
    busy: dict[str, int]


def blocks_per_sm(*, warps: int, registers: int, shared: int) -> int:
    """Return how many blocks of `warps` warps fit on an SM.

    registers: per thread. shared: bytes per block, to which the driver adds a KiB.
    """
    of_a_block = -(-registers // 8) * 8 * 32 * warps
    return min(REGISTERS // of_a_block, SHARED // (shared + 1024), WARPS // warps)


@dataclass(frozen=True, slots=True)
class Span:
    """A unit works on a warp's instruction from clock `start` to clock `end`."""

    warp: int
    unit: str
    start: float
    end: float


def inner_loop(sass: str, *, warps: int, blocks: int) -> Loop | None:
    """Walk a kernel's shortest loop with matrix products; None if there is none.

    sass: what `nvdisasm -c` prints. The shortest is the loop over tiles that need no mask. None,
    too, if no block fits on an SM.
    """
    body = _body(sass)
    if not body or not blocks:
        return None
    ahead, turns = (
        _Part(body, warps=warps // PARTS, blocks=blocks, fair=fair).clocks()
        for fair in (False, True)
    )
    every = warps // PARTS * blocks
    busy = {"issue": len(body) * every}
    for unit in {unit for _, unit, _, _ in body} - {"issue"}:
        busy[unit] = round(sum(occupancy for _, of, occupancy, _ in body if of == unit) * every)
    return Loop(clocks=(ahead, turns), blocks=blocks, busy=dict(sorted(busy.items())))


def timeline(
    sass: str, *, warps: int, blocks: int, fair: bool, iterations: int = 2
) -> tuple[float, list[Span]]:
    """Return the clocks of some iterations of that loop in the steady state, and what ran in them.

    fair: whether warps take turns. A span begins at 0 or later; warps are those of a quarter of an
    SM. Raises ValueError for a kernel without such a loop.
    """
    body = _body(sass)
    if not body:
        raise ValueError("a timeline needs a loop with matrix products, got a kernel without one")
    part = _Part(body, warps=warps // PARTS, blocks=blocks, fair=fair)
    length = iterations * part.clocks()
    first = min(one.start for one in part.spans if one.start >= part.settled)
    spans = [
        Span(one.warp, one.unit, one.start - first, min(one.end - first, length))
        for one in part.spans
        if first <= one.start < first + length
    ]
    return length, spans


def _body(sass: str) -> list[Step]:
    """Return the shortest loop with matrix products, or nothing."""
    code, labels = parsed(sass)
    bodies = [
        code[labels[target(one)] : at + 1]
        for at, one in enumerate(code)
        # An unconditional jump back doesn't close a loop; it returns a warp from a wait for data.
        if target(one) in labels and (one.guarded or one.operands[0] != "`")
    ]
    products = [body for body in bodies if any(_unit(one) == "matrix" for one in body)]
    found = min(products, key=len, default=[])
    return [(one, _unit(one), _occupancy(one), read(one)) for one in found]


def _unit(one: Instruction) -> str:
    return next((unit for op, unit in OPS.items() if one.op.startswith(op)), "issue")


def _occupancy(one: Instruction) -> float:
    """Return the clocks for which an instruction of a warp occupies its unit."""
    if one.op.startswith("HGMMA"):  # each part has 16 of its 64 rows
        columns, depth = map(int, re.findall(r"64x(\d+)x(\d+)", one.op)[0])
        rows = columns if used(one)[1] else columns + 64  # that come from shared memory
        return max(16 * columns * depth / MATRIX, rows * depth * 2 / BANKS)
    if one.op.startswith("HMMA"):
        return 16 * 8 * int(one.op.split(".")[1][3:]) / (MATRIX * SYNC_SHARE)
    bits = {"128": 4, "64": 2}.get(one.op.rsplit(".", 1)[-1], 1) if one.op[0] in "LS" else 1
    return UNITS[_unit(one)][0] * (4 if one.op.startswith("LDSM") else bits)


Step: TypeAlias = tuple[Instruction, str, float, frozenset[int]]


@dataclass(kw_only=True, slots=True)
class _Warp:
    """What a warp has done. at: its next instruction, counted over all iterations."""

    block: int
    at: int = 0
    clock: float = 0.0  # when it may go on
    ready: dict[int, float] = field(default_factory=dict)  # when a register has its value
    groups: list[float] = field(default_factory=list)  # when each group of HGMMAs ends


class _Part:
    """A quarter of an SM: its warps, and when each unit is free.

    body: instructions, and the unit, occupancy and registers read of each. fair: warps take turns.
    """

    def __init__(self, body: list[Step], *, warps: int, blocks: int, fair: bool) -> None:
        self.body, self.fair = body, fair
        self.warps = [_Warp(block=block) for block in range(blocks) for _ in range(warps)]
        self.free = dict.fromkeys(UNITS, 0.0)
        self.spans: list[Span] = []
        self.settled = 0.0  # when the steady state begins

    def clocks(self) -> int:
        """Walk all iterations and return the mean of those after the first ones."""
        each = len(self.body) * len(self.warps)
        for done in range(ROUNDS * each):
            # Tiles in flight, if nothing else, keep a warp from running an iteration ahead.
            limit = min(warp.at for warp in self.warps) + len(self.body)
            start, _, which = min(
                (self._start(warp), warp.at * self.fair, n)
                for n, warp in enumerate(self.warps)
                if warp.at < limit
            )
            self._run(which, start)
            if done == SETTLED * each:
                self.settled = start
        return round((start - self.settled) / (ROUNDS - SETTLED))

    def _start(self, warp: _Warp) -> float:
        """Return the earliest clock at which a warp's next instruction can start."""
        one, unit, _, needed = self.body[warp.at % len(self.body)]
        start = max([warp.clock, self.free["issue"], *(warp.ready.get(n, 0.0) for n in needed)])
        if one.op.startswith("WARPGROUP.DEPBAR"):
            pending = int(one.operands.rsplit(",", 1)[1], 16)
            return max([start, *warp.groups[: len(warp.groups) - pending]])
        if one.op.startswith("BAR.SYNC"):
            block = [other for other in self.warps if other.block == warp.block]
            if any(other.at < warp.at for other in block):
                return inf
            return max([start, *(other.clock for other in block if other.at == warp.at)])
        return start if one.op.startswith("HGMMA") else max(start, self.free[unit])

    def _run(self, which: int, start: float) -> None:
        """Start the next instruction of a warp, given by its number."""
        warp = self.warps[which]
        one, unit, occupancy, _ = self.body[warp.at % len(self.body)]
        end = max(start, self.free[unit]) + occupancy  # HGMMAs wait in the matrix unit's queue
        self.free[unit] = end
        self.spans.append(Span(which, unit, end - occupancy, end))
        self.free["issue"] = warp.clock = start + 1
        if one.op.startswith("HGMMA"):
            if "gsb0" in one.operands:
                warp.groups.append(end)
        else:
            for register in written(one):
                warp.ready[register] = start + UNITS[unit][1]
        warp.at += 1
