"""A kernel in which WAVE replaced every 32, but widths without that number remained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.hip.emulated import Data, KernelExercise
from labcore.hip import load
from labcore.hip.build import compiler

__all__ = ["BROKEN", "MEND"]

BROKEN = """\
#include "portable.h"

// The sum over the lanes of a wavefront, in lane 0.
__device__ float wave_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_down(x, step);
  return x;
}

// A wavefront takes a row of `values`: its sum, and the values above zero, packed to the front.
__global__ void __launch_bounds__(256)
row_positives(Global<const float> values, Global<float> sums, Global<float> packed,
              Global<int> counts, int rows, int length) {
  const int lane = threadIdx.x % WAVE, waves = blockDim.x / WAVE;
  const int row = blockIdx.x * waves + threadIdx.x / WAVE;
  if (row >= rows) return;
  float sum = 0.0f;
  int count = 0;
  for (int first = 0; first < length; first += WAVE) {
    const int i = first + lane;
    const float value = i < length ? float(values[row * length + i]) : 0.0f;
    sum += value;
    const unsigned above = __ballot(value > 0.0f);
    const unsigned before = above & ((1u << lane) - 1);  // of lower lanes
    if (value > 0.0f) packed[row * length + count + __builtin_popcount(before)] = value;
    count += __builtin_popcount(above);
  }
  sum = wave_sum(sum);
  if (lane == 0) {
    sums[row] = sum;
    counts[row] = count;
  }
}
ENTRY(row_positives, row_positives)
"""
THREADS = 256


def mend(source: str) -> str:
    """The source of `row_positives` for a wavefront of 64 lanes."""
    for old, new in (
        ("step = 16;", "step = 32;"),
        ("const unsigned above", "const unsigned long long above"),
        ("const unsigned before", "const unsigned long long before"),
        ("1u << lane", "1ull << lane"),
        ("__builtin_popcount(", "__builtin_popcountll("),
    ):
        source = source.replace(old, new)
    return source


def _launch(source: str, wave: int, data: Data) -> tuple[Tensor, ...]:
    values = data["values"]
    rows, length = values.shape
    results = _empty(rows, length)
    names = ("sums", "packed", "counts")
    load(source, wave=wave).launch(
        "row_positives",
        grid=-(-rows * wave // THREADS),
        block=THREADS,
        arguments={
            "values": values,
            **dict(zip(names, results, strict=True)),
            "rows": rows,
            "length": length,
        },
    )
    return results


def _empty(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    packed = torch.full((rows, length), -1.0)
    return torch.full((rows,), -1.0), packed, torch.full((rows,), -1, dtype=torch.int32)


def _model(data: Data, fault: str) -> tuple[Tensor, ...]:
    """The results of the kernel with a mistake on 64 lanes, computed lane by lane."""
    values = data["values"]
    rows, length = values.shape
    sums, packed, counts = _empty(rows, length)
    untouched = fault == "untouched"
    votes = 32 if fault in ("votes left", "narrow count") or untouched else 64
    for row in range(rows):
        taken = list(range(length))
        if untouched or fault == "reduction left":
            taken = [i for i in taken if i % 64 < 32]
        sums[row] = values[row, taken].sum() * (2 if fault == "one step too many" else 1)
        count = 0
        for first in range(0, length, 64):
            above = (values[row, first : first + 64] > 0).tolist()
            for lane, positive in enumerate(above):
                lower = above[: lane % 32 if fault == "narrow shift" else lane]
                if fault == "votes left" or untouched:
                    lower = above[: lane % 32]
                if positive:
                    counted = 32 if fault == "narrow before" else votes
                    packed[row, count + sum(lower[:counted])] = values[row, first + lane]
            count += sum(above[:votes])
        counts[row] = count
    return sums, packed, counts


def _data(seed: int) -> list[dict[str, Any]]:
    """Launches with rows that are longer and shorter than a wavefront.

    The values are multiples of 1/8, so that their sums are exact in any order.
    """
    draw = torch.Generator().manual_seed(seed)
    launches = []
    for rows, low, high in ((5, 65, 128), (3, 140, 190), (6, 40, 63), (1, 193, 255)):
        length = int(torch.randint(low, high + 1, (1,), generator=draw))
        eighths = torch.randint(-40, 60, (rows, length), generator=draw)
        launches.append({"values": eighths / 8})
    return launches


_MISTAKES = [
    Mistake("untouched", (".replace(old, new)", ""),
            "Nothing in it is mended. Of the 64 lanes the upper 32 are left out, of the sum and of "
            "each vote: look for what is 32 lanes wide without the number 32."),
    Mistake("votes left", lambda source: source.replace("step = 16;", "step = 32;"),
            "The sum is right, the votes are not. `__ballot` returns one bit for each of 64 lanes: "
            "look at the types of what holds them, and of all that is done with them."),
    Mistake("reduction left", ("step = 32", "step = 16"),
            "The votes are right, the sum is not. The first step of the reduction brings lane 16 "
            "to lane 0; lanes 32 to 63 never come."),
    Mistake("narrow count", ("popcountll", "popcount"),
            "The sum is right, and only the votes of the lower 32 lanes are counted. See where the "
            "other bits get lost: in the type that holds a vote, or in `__builtin_popcount`, which "
            "takes an unsigned int."),
    Mistake("narrow shift", ("1ull", "1u"),
            "The counts are right, but some values are packed one upon the other. For a lane above "
            "31 the bits of the lower lanes are not what you make: an unsigned int has no bit 40 "
            "to shift a 1 to."),
    Mistake("narrow before", ("long long before", "before"),
            "The counts are right, but some values are packed one upon the other: of the lower "
            "lanes' votes those above lane 31 get lost. See what holds them and what counts them."),
    Mistake("one step too many", ("step = 32", "step = 64"),
            "Your sums are twice too large. The first step goes past the last lane, and a lane "
            "that reads past the end reads itself."),
]  # fmt: skip

MEND = KernelExercise(
    id="hip.mend",
    points=4,
    beyond=1,
    reference=mend,
    mistakes=_MISTAKES,
    cases=lambda _: [{"source": BROKEN}],
    ready=compiler,
    data=_data,
    launch=_launch,
    model=_model,
    returns=("sums", "packed", "counts"),
    explanation="Three widths are hidden in the code. A reduction that halves its step begins at "
    "half a wavefront. A vote has one bit a lane, so what holds it, what is shifted over it and "
    "what counts its bits all need 64 of them; a single one that has 32 cuts off the upper half, "
    "and the compiler is silent, since C++ converts an unsigned long long to an unsigned int "
    "without a word. On lengths up to 32 the broken kernel is right: a test needs more values than "
    "half a wavefront has lanes. This reference has the number 64 in it, and is right on a "
    "wavefront of 64 lanes alone.",
    hints=(
        "Follow lane 40. Does its sum ever reach lane 0, and what becomes of its bit in the vote?",
        "The reduction must begin with a step of half a wavefront. A vote needs 64 bits all the "
        "way: in the variables that hold it, in the 1 that is shifted, and in the function that "
        "counts its bits.",
        '`source.replace("1u << lane", "1ull << lane")` lets the mask of the lower lanes reach '
        "past lane 31. The function that counts 64 bits is `__builtin_popcountll`.",
    ),
)
