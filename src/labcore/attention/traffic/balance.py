"""The share of time in which a GPU's multiprocessors have a block to work on."""

from __future__ import annotations

import heapq
from typing import Literal

from labcore.attention.traffic.counts import Shape, tile_walks
from labcore.checks import one_of, positive_int

__all__ = ["Dealt", "block_costs", "busy_share"]

Dealt = Literal["fixed", "next"]


def block_costs(
    shape: Shape, *, block_q: int = 128, block_k: int = 128, cached: int = 32 << 20
) -> list[int]:
    """Return the tiles of keys that each block of queries visits, in the kernel's order of blocks.

    That is the order of `descriptors.place`: a section of heads whose keys and values fit into
    `cached` bytes comes before the next section, and within it the longest blocks come first.
    """
    walks = [tiles for _, tiles, _ in tile_walks(shape, block_q, block_k)]
    heads, group = shape.batch * shape.heads, shape.heads // shape.shared_heads
    fit = cached // (2 * shape.keys * shape.head_dim * shape.dtype_bytes)
    section = min(heads, group * max(1, fit))
    found: list[int] = []
    for first in range(0, heads, section):
        for tiles in reversed(walks) if shape.is_causal else walks:
            found += [tiles] * min(section, heads - first)
    return found


def busy_share(costs: list[int], programs: int, dealt: Dealt) -> float:
    """Return the work over the time of all programs until the last one ends.

    costs: the time of each block, in the order in which blocks are dealt out.
    dealt: "fixed" gives block i to program i mod P, as a persistent kernel does. "next" gives each
    block to the first that is free, as a GPU does with programs of one block each. Our kernel is
    persistent without a mask, and isn't under a causal one.
    """
    one_of("dealt", dealt, ("fixed", "next"))
    positive_int("programs", programs)
    loads = [0] * programs
    for at, cost in enumerate(costs):
        if dealt == "next":
            heapq.heapreplace(loads, loads[0] + cost)
        else:
            loads[at % programs] += cost
    return sum(costs) / (programs * max(loads))
