"""Five broken ports of one kernel, which differ in errors, lost cycles, and memory traffic."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from labcore.exercises.clinic import Clinic, Fault
from labcore.hip import EmulationError, load

__all__ = ["CLINIC", "LENGTHS", "Port"]

ROWS, TILE = 32, 64
LENGTHS = range(8, 2 * TILE + 1, 8)  # row lengths that the curves show

# One wavefront computes the means of 32 rows. It loads tiles of 64 columns into LDS, lane l adds up
# half l / 32 of row l % 32, and a vote counts the columns of the tile.
KERNEL = """\
#include "portable.h"

constexpr int ROWS = 32, TILE = 64;

__global__ void __launch_bounds__(64)
row_means(Global<const float> values, Global<float> means, int length, int stride, int by_rows,
          int leave_early, int narrow_vote, int halves_apart) {
  SHARED(float, tile, ROWS * (TILE + 1));
  const int lane = lane_id(), mine = lane % ROWS, half = lane / ROWS;
  if (leave_early && lane >= length) return;
  float sum = 0.0f;
  int count = 0;
  for (int first = 0; first < length; first += TILE) {
    for (int i = lane; i < ROWS * TILE; i += WAVE) {
      const int row = by_rows ? i % ROWS : i / TILE;
      const int column = by_rows ? i / ROWS : i % TILE;
      if (first + column < length)
        tile[row * stride + column] = values[row * length + first + column];
    }
    __syncthreads();
    const LaneMask here = __ballot(first + lane < length);
    count += narrow_vote ? __builtin_popcount(unsigned(here)) : __builtin_popcountll(here);
    for (int j = 0; j < TILE / 2; ++j) {
      const int column = half * (TILE / 2) + j;
      if (first + column < length) sum += tile[mine * stride + column];
    }
    __syncthreads();
  }
  if (!halves_apart) sum += __shfl_xor(sum, ROWS);
  if (half == 0) means[mine] = sum / float(count);
}
ENTRY(row_means, row_means)
"""


@dataclass(frozen=True, kw_only=True)
class Port:
    """The kernel with its possible faults.

    stride: words from one row of LDS to the next. by_rows: neighboring lanes load from neighboring
    rows. leave_early: lanes without a column in the first tile return at once. narrow_vote: the
    vote is kept in 32 bits. halves_apart: the two sums of a row are not added.
    """

    stride: int = TILE + 1
    by_rows: bool = False
    leave_early: bool = False
    narrow_vote: bool = False
    halves_apart: bool = False

    def run(self, length: int) -> tuple[float, int, int]:
        """Error of the mean for rows of ones, lost LDS cycles, segments of global memory.

        Raises EmulationError if the emulator stops the kernel.
        """
        means = torch.zeros(ROWS)
        counters = load(KERNEL).launch(
            "row_means",
            grid=1,
            block=64,
            arguments={
                "values": torch.ones(ROWS, length),
                "means": means,
                "length": length,
                "stride": self.stride,
                "by_rows": int(self.by_rows),
                "leave_early": int(self.leave_early),
                "narrow_vote": int(self.narrow_vote),
                "halves_apart": int(self.halves_apart),
            },
            count=True,
        )
        if counters is None:
            raise RuntimeError("a launch that is asked to count must return counters, got None")
        error = means.mean().item() - 1
        return round(error, 6), counters.lds_conflicts, counters.transactions


@functools.cache
def _curves(port: Port) -> tuple[tuple[float, ...], ...]:
    found: list[tuple[float, ...]] = []
    for length in LENGTHS:
        try:
            found.append(port.run(length))
        except EmulationError:
            found.append((math.nan,) * 3)
    return tuple(zip(*found, strict=True))


def _observe(port: Port) -> dict[str, list[float]]:
    """One curve over LENGTHS per panel, NaN where the emulator stops the kernel."""
    titles = ("error of the mean", "lost LDS cycles", "global segments")
    return {title: list(curve) for title, curve in zip(titles, _curves(port), strict=True)}


CLINIC = Clinic(
    id="hip.clinic",
    points=5,
    healthy=Port,
    faults={
        "the upper half of the lanes is never added": Fault(
            make=functools.partial(Port, halves_apart=True),
            symptom="the mean is right up to 32 columns and too small beyond, since what the "
            "lanes from 32 on have summed is missing while their columns are counted: it is half "
            "of what it should be at 64 and at 128. Cycles and segments are those of the healthy "
            "kernel.",
        ),
        "the vote is kept in 32 bits": Fault(
            make=functools.partial(Port, narrow_vote=True),
            symptom="the mean is right up to 32 columns and too large beyond, since the sum is "
            "whole and the count lacks the lanes from 32 on: it is twice what it should be at 64 "
            "and at 128. Cycles and segments are those of the healthy kernel.",
        ),
        "rows of LDS lie 64 words apart": Fault(
            make=functools.partial(Port, stride=TILE),
            symptom="the mean is right, and cycles are lost at every length: a column stands in "
            "one bank, and 32 lanes that read it get it one after the other. Global memory is "
            "read as by the healthy kernel.",
        ),
        "neighboring lanes load from different rows": Fault(
            make=functools.partial(Port, by_rows=True),
            symptom="the mean is right and no cycle is lost, but the segments of global memory "
            "are many more: the lanes of one load touch one segment each, where neighbors along "
            "a row share it.",
        ),
        "lanes without a column leave at once": Fault(
            make=functools.partial(Port, leave_early=True),
            symptom="up to 56 columns there is no result at all: some lanes have returned, and the "
            "others wait for them at a barrier. The emulator stops there; a GPU may hang, or go on "
            "as if nothing were wrong. From 64 columns on every lane has one, and all is well.",
        ),
    },
    observe=_observe,
    axis=LENGTHS,
    unit="row length",
    explanation="Two of the five give the right numbers and are found by counters alone. Of the "
    "other three two are right up to 32 columns, since a wavefront of 64 lanes that was a warp of "
    "32 misses nothing while only its lower half has work, and the third is right from 64 on: a "
    "test at one length lets one of them pass at least. A port needs tests below 32, between 32 "
    "and 64, at 64 and beyond, and a machine that says so when lanes are missing at a barrier.",
)
