"""The map of 8-bit codes: 256 values, the nearest of which stands for a number from -1 to 1.

The map is dynamic: its values are dense near 0, over seven powers of ten, because the moments of
one block differ that much.
"""

import torch
from torch import Tensor

__all__ = ["dynamic_map", "largest_error"]

DECADES = 7


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of the dynamic 8-bit data type in ascending order, float32 [256].

    A code has z zeros, a one that ends them, and the remaining bits. The zeros scale by 10^-z, and
    the remaining bits count equal steps from 0.1 to 1, whose midpoints are the values. Numbers near
    1 thus have the most bits. Signed codes use one bit for the sign and range from -0.993 to 1;
    unsigned codes range from 0 to 1. The values 0 and 1 are added.
    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
    quantization", arXiv 2110.02861.
    """
    bits = DECADES - 1 if signed else DECADES
    values = [0.0, 1.0]
    for zeros in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (bits - zeros) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0**-zeros).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def largest_error(*, signed: bool) -> float:
    """Return the largest error of `quantize_blocks`, in units of a block's largest magnitude.

    It is half of the widest gap in the map: 0.0070 signed, 0.0035 unsigned. The signed map does not
    contain -1; from -0.993 to -1, the error is equally large.
    """
    values = dynamic_map(signed=signed).double()
    return float(values.diff().max()) / 2
