"""A kernel for warps of 32 lanes, to be rewritten so that any wavefront runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.hip.emulated import Data, KernelExercise
from labcore.hip import load
from labcore.hip.build import compiler

__all__ = ["WARPS", "WIDEN", "run_shares"]

WARPS = """\
#include "portable.h"

// A warp takes a row of `values` and divides each of them by the row's sum.
__global__ void __launch_bounds__(128)
row_shares(Global<const float> values, Global<float> shares, int rows, int length) {
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int end = row < rows ? length : 0;
  float sum = 0.0f;
  for (int i = lane; i < end; i += 32) sum += float(values[row * length + i]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down(sum, step);
  sum = __shfl(sum, 0);
  for (int i = lane; i < end; i += 32)
    shares[row * length + i] = float(values[row * length + i]) / sum;
}
ENTRY(row_shares, row_shares)
"""
THREADS = 128


def widen(source: str) -> str:
    """The source of `row_shares` with a wavefront of any width for each row."""
    for old, new in (
        ("threadIdx.x % 32", "threadIdx.x % WAVE"),
        ("(blockDim.x / 32)", "(blockDim.x / WAVE)"),
        ("threadIdx.x / 32", "threadIdx.x / WAVE"),
        ("i += 32", "i += WAVE"),
        ("step = 16", "step = WAVE / 2"),
    ):
        source = source.replace(old, new)
    return source


def run_shares(source: str, values: Tensor, *, wave: int) -> Tensor:
    """Run a source's `row_shares` on emulated wavefronts of `wave` lanes (32 or 64).

    values: fp32 [rows, length]. Returns [rows, length], -1 where the kernel writes nothing. Raises
    RuntimeError if the source doesn't build, and EmulationError if the emulator stops it.
    """
    rows, length = values.shape
    shares = torch.full((rows, length), -1.0)
    load(source, wave=wave).launch(
        "row_shares",
        grid=-(-rows * wave // THREADS),
        block=THREADS,
        arguments={"values": values, "shares": shares, "rows": rows, "length": length},
    )
    return shares


def _launch(source: str, wave: int, data: Data) -> tuple[Tensor, ...]:
    del wave  # each launch has its own
    return (run_shares(source, data["values"], wave=data["wave"]),)


# For each mistake: the lanes of a row by the lane's number, by the row's, and by the loop, and the
# first step of the reduction, each on wavefronts of the given width.
_FORMS: dict[str, Callable[[int], tuple[int, int, int, int]]] = {
    "": lambda wave: (wave, wave, wave, wave // 2),
    "untouched": lambda _: (32, 32, 32, 16),
    "64 for 32": lambda _: (64, 64, 64, 32),
    "reduction left": lambda wave: (wave, wave, wave, 16),
    "loop left": lambda wave: (wave, wave, 32, wave // 2),
    "rows left": lambda wave: (wave, 32, wave, wave // 2),
}


def _model(data: Data, fault: str) -> tuple[Tensor, ...]:
    """The shares that a kernel with a mistake computes, lane by lane."""
    values, wave = data["values"], data["wave"]
    rows, length = values.shape
    by_lane, by_row, stride, first = _FORMS[fault](wave)
    shares = torch.full((rows, length), -1.0)
    for thread in range(0, -(-rows * wave // THREADS) * THREADS, wave):
        lanes = [(t % by_lane, t // by_row) for t in range(thread, thread + wave)]
        visits = [range(lane, length if row < rows else 0, stride) for lane, row in lanes]
        sums = [
            sum(float(values[row, i]) for i in seen)
            for (_, row), seen in zip(lanes, visits, strict=True)
        ]
        step = first
        while step:
            sums = [x + sums[i + step if i + step < wave else i] for i, x in enumerate(sums)]
            step //= 2
        for (_, row), seen in zip(lanes, visits, strict=True):
            for i in seen:
                shares[row, i] = values[row, i] / torch.tensor(sums[0])
    return (shares,)


def _data(seed: int) -> list[dict[str, Any]]:
    """Launches at both widths, with rows longer and shorter than a wavefront.

    The values are multiples of 1/8, so that their sums are exact in any order.
    """
    draw = torch.Generator().manual_seed(seed)
    launches = []
    for wave, rows, low, high in (
        (64, 5, 65, 128),
        (32, 3, 70, 190),
        (64, 3, 40, 63),
        (32, 6, 9, 31),
    ):
        length = int(torch.randint(low, high + 1, (1,), generator=draw))
        eighths = torch.randint(1, 60, (rows, length), generator=draw)
        launches.append({"values": eighths / 8, "wave": wave})
    return launches


def _for_64_lanes(source: str) -> str:
    return widen(source).replace("WAVE / 2", "32").replace("WAVE", "64")


_MISTAKES = [
    Mistake("untouched", (".replace(old, new)", ""),
            "It's right at 32 lanes and wrong at 64. There, two rows share a wavefront, and "
            "`__shfl(sum, 0)` gives both of them the first one's sum."),
    Mistake("64 for 32", _for_64_lanes,
            "It's right at 64 lanes and wrong at 32. You replaced one fixed number by another. "
            "`WAVE` is the width for which the source is built."),
    Mistake("reduction left", ("step = WAVE / 2", "step = 16"),
            "At 64 lanes the sums lack what lanes 32 to 63 have. See where the reduction begins."),
    Mistake("loop left", ("i += WAVE", "i += 32"),
            "At 64 lanes values are added twice, because two lanes come to the same place. See how "
            "far a lane moves from one value to its next."),
    Mistake("rows left", ('"threadIdx.x / WAVE"', '"threadIdx.x / 32"'),
            "At 64 lanes the two halves of a wavefront work on different rows. See how a thread "
            "finds its row."),
]  # fmt: skip

WIDEN = KernelExercise(
    id="hip.widen",
    points=3,
    reference=widen,
    mistakes=_MISTAKES,
    cases=lambda _: [{"source": WARPS}],
    ready=compiler,
    data=_data,
    launch=_launch,
    model=_model,
    returns=("shares",),
    explanation="32 stands for the width of a wavefront in five places: a lane's number, the rows "
    "of a block, a thread's row, the stride of the loops, and, halved, the first step of the "
    "reduction. `WAVE` is right in each of them at every width. At 64 lanes the untouched kernel "
    "raises no error; rows with an odd number are just divided by their neighbor's sum.",
    hints=(
        "Run the untouched kernel at 64 lanes on rows of ones. Which rows are wrong, and whose sum "
        "did they get?",
        "Look for every number that is 32 or half of it, and ask whether it means the machine or "
        "the problem. All of them mean the machine here.",
        '`source.replace("step = 16", "step = WAVE / 2")` begins the reduction at half a width.',
    ),
)
