"""Count what the L2 caches of a GPU made of several dies read from the cache that they share.

On MI300X, 304 CUs are spread over eight dies (XCDs). Each die has an L2 of 4 MiB. All dies share an
Infinity Cache of 256 MiB, which `hbm_bytes` takes for the GPU's cache.
Source: AMD, CDNA 3 white paper, 2023.
"""

from __future__ import annotations

from typing import Literal

from labcore.attention.traffic.counts import STATISTIC, Shape, tile_walks
from labcore.attention.traffic.gpus import Gpu
from labcore.checks import one_of, positive_int

__all__ = ["Order", "fabric_bytes"]

Order = Literal["in turn", "by head"]
L2 = 4 * 1024**2


def fabric_bytes(
    shape: Shape,
    gpu: Gpu,
    order: Order,
    *,
    block_q: int,
    block_k: int,
    dies: int = 8,
    l2: int = L2,
) -> int:
    """Estimate the bytes that all dies' L2 caches read in a tiled forward pass.

    order: how programs, counted tile by tile and head by head, reach the dies. "in turn": program p
    runs on die p mod dies, as the hardware deals them out. "by head": each die gets an equal run of
    neighbors. block_q, block_k: rows and keys per tile. l2: bytes per die.
    The model is that of `hbm_bytes` for each die: its programs run in waves of one per CU, in step,
    and a wave reads nothing twice. If what a wave reads and writes fits in the L2, the next wave
    finds it there.
    """
    one_of("order", order, ("in turn", "by head"))
    for name, size in (("block_q", block_q), ("block_k", block_k), ("dies", dies)):
        positive_int(name, size)
    if gpu.units % dies:
        raise ValueError(f"dies must divide the GPU's {gpu.units} units, got {dies}")
    row = shape.head_dim * shape.dtype_bytes
    walks = list(tile_walks(shape, block_q, block_k)) * (shape.heads // shape.shared_heads)
    programs = shape.batch * shape.shared_heads * len(walks)
    each = -(-programs // dies)
    moved = 0
    for die in range(dies):
        mine = range(die, programs, dies)
        if order == "by head":
            mine = range(min(die * each, programs), min((die + 1) * each, programs))
        at_once = gpu.units // dies
        waves = [mine[first : first + at_once] for first in range(0, len(mine), at_once)]
        reads = [_distinct(wave, walks, row) for wave in waves]
        written = walks[0][0] * (row + STATISTIC) * at_once
        fits = max(reads, default=0) + written <= l2
        moved += _distinct(mine, walks, row) if fits else sum(reads)
    return moved


def _distinct(programs: range, walks: list[tuple[int, int, int]], row: int) -> int:
    """Return the bytes that these programs read, without repetition.

    Of two programs of a group, one walks over all keys that the other does, or more.
    """
    keys: dict[int, int] = {}
    queries = 0
    for program in programs:
        group, place = divmod(program, len(walks))
        queries += walks[place][0]
        keys[group] = max(keys.get(group, 0), walks[place][2])
    return (queries + 2 * sum(keys.values())) * row
