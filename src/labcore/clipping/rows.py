"""Euclidean norms on a CPU at the speed of one read, accurate to 1e-7.

torch's norm of a big float32 tensor adds all squares in a few float32 sums, which has an error of
1e-4 for ten million elements. In float64 it takes ten times as long. Here each row of ROW elements
is a float32 dot product, and the rows are added in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 13  # elements; BLAS would start its own threads for dot products above 10,000
PIECE = 32 * ROW  # elements of a half-precision tensor to convert at a time, to stay in the cache
# Below this mean square, the squares are too close to the dtype's smallest number.
SMALLEST = {torch.float64: 1e-292, torch.float32: 1e-31}


def row_norms(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return norms [n] float64 of real CPU tensors, and the indices of those not to be trusted.

    These are tensors with NaN, infinity, squares outside the range of float32 (of float64 for
    float64 tensors), or gaps between their elements.
    """
    sums = np.zeros(len(parts))
    dots: list[np.ndarray] = []  # of the rows of all big tensors
    starts: list[int] = []
    big: list[int] = []
    small: list[Tensor] = []
    owners: list[int] = []
    count = 0
    with np.errstate(all="ignore"):
        for index, part in enumerate(parts):
            if part.numel() < ROW:
                small.append(part if part.dtype in SMALLEST else part.float())
                owners.append(index)
                continue
            found = _dots(part)
            dots += found
            big.append(index)
            starts.append(count)
            count += sum(map(len, found))
        if dots:
            sums[big] = np.add.reduceat(np.concatenate(dots).astype(np.float64), starts)
        if small:  # One call for all of them, because there may be a thousand.
            norms = map(Tensor.item, torch._foreach_norm(small))  # twice as fast as stacking them
            sums[owners] = np.fromiter(norms, np.float64, len(small)) ** 2
    doubtful: list[int] = []
    # These bounds suffice for any number of elements, and almost every list meets them.
    if not (parts and sums.min() > 1e-20 and sums.max() < math.inf):
        doubtful = [i for i, part in enumerate(parts) if _is_doubtful(float(sums[i]), part)]
    return torch.from_numpy(np.sqrt(sums)), doubtful


def _is_doubtful(total: float, part: Tensor) -> bool:
    least = part.numel() * SMALLEST.get(part.dtype, SMALLEST[torch.float32])
    # A sum of 0 is right for a gradient of zeros.
    return not least <= total < math.inf and (total != 0 or bool(part.any()))


def _dots(part: Tensor) -> list[np.ndarray]:
    """Compute sums of squares over the rows of a big tensor, or NaN if it has gaps in memory."""
    if not part.is_contiguous():
        part = part.permute(sorted(range(part.ndim), key=part.stride, reverse=True))
        if not part.is_contiguous():
            return [np.array([math.nan])]
    if part.dtype not in SMALLEST:
        pieces = [piece.float().numpy() for piece in part.view(-1).split(PIECE)]
        return [dots for piece in pieces for dots in _row_dots(piece)]
    return _row_dots(part.numpy())


def _row_dots(array: np.ndarray) -> list[np.ndarray]:
    rest = array.size % ROW
    if not rest:
        rows = array.reshape(-1, ROW)
        return [np.vecdot(rows, rows)]
    flat = array.reshape(-1)
    rows, tail = flat[:-rest].reshape(-1, ROW), flat[-rest:]
    return [np.vecdot(rows, rows), np.dot(tail, tail).reshape(1)]
