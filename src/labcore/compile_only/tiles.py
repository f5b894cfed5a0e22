"""What the forward kernel needs as tiles of other sizes than `configs` has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from labcore.attention import Pattern
from labcore.attention.configs import DESCRIBED, Config
from labcore.compile_only import compilers
from labcore.compile_only.pipeline import timeline
from labcore.compile_only.targets import machine_code, needs

__all__ = ["measure_tiles", "measure_timeline"]

KEPT = ("registers", "spills", "shared", "unit")
BINS = 64  # of a timeline
SOFTMAX = ("exp", "fma", "alu")


def measure_tiles(grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Compile the 16-bit forward kernel for every tile of a grid; a tile takes 1 to 10 s.

    grid: "target", "head_dim", "rows", "columns", "stages" and "warps", each with its values.
    Returns "target head_dim rows columns stages warps" -> the registers, spills, shared memory and
    matrix unit that `needs` finds. A tile may need more than the target has.
    """
    names = ("target", "head_dim", "rows", "columns", "stages", "warps")
    points = list(itertools.product(*(grid[name] for name in names)))
    with compilers() as pool:
        found = pool.map(_tile, points)
        return {" ".join(map(str, point)): need for point, need in zip(points, found, strict=True)}


def measure_timeline(head_dim: int) -> dict[str, Any]:
    """Return when the units of a quarter of an H100's SM work, in two steps of our forward loop.

    Returns "clocks" of both steps, and for both schedulers of `pipeline.Loop`, "ahead" and "turns":
    "matrix" and "softmax", each with a row of BINS shares of a bin's clocks per warp.
    """
    with compilers() as pool:
        return pool.submit(_timeline, head_dim).result()


@functools.cache
def _built(target: str, head_dim: int, config: Config) -> Any:
    """Return the compiled forward kernel, without a mask, that `target` would launch."""
    from labcore.attention import descriptors, forward
    from labcore.compile_only.launches import HEADS, TOKENS, build, launching

    q = torch.zeros(1, HEADS, TOKENS, head_dim, dtype=torch.bfloat16)
    with launching(target) as found:
        if target == "sm_90":
            lse = torch.zeros(1, HEADS, TOKENS)
            descriptors.described_forward(q, q, q, q, lse, pattern=Pattern(scale=1), config=config)
        else:
            forward.flash_forward(q, q, q, pattern=Pattern(scale=1), config=config)
    (program,) = found.values()
    return build(program, target)


def _tile(point: tuple[str, int, int, int, int, int]) -> dict[str, Any]:
    target, head_dim, rows, columns, stages, warps = point
    config = Config(m=rows, n=columns, stages=stages, warps=warps)
    need = needs(_built(target, head_dim, config))
    return {name: need[name] for name in KEPT}


def _timeline(head_dim: int) -> dict[str, Any]:
    config = DESCRIBED[head_dim]
    sass = machine_code(_built("sm_90", head_dim, config))
    found: dict[str, Any] = {"clocks": {}}
    for name, fair in (("ahead", False), ("turns", True)):
        clocks, spans = timeline(sass, warps=config.warps, blocks=1, fair=fair)
        found["clocks"][name] = clocks
        found[name] = {
            unit: [[0.0] * BINS for _ in range(config.warps // 4)] for unit in ("matrix", "softmax")
        }
        for span in spans:
            unit = "softmax" if span.unit in SOFTMAX else span.unit
            if unit in found[name]:
                _add(found[name][unit][span.warp], span.start, span.end, clocks / BINS)
    return found


def _add(row: list[float], start: float, end: float, width: float) -> None:
    """Add the time from `start` to `end` to the bins that it covers."""
    for at in range(int(start // width), min(int(end // width) + 1, len(row))):
        shared = min(end, (at + 1) * width) - max(start, at * width)
        row[at] = round(min(1.0, row[at] + max(0.0, shared) / width), 3)
