"""The tiles of keys that rows walk: none is left out, and none without a mask needs one."""

import pytest
import torch

from labcore.attention import allowed
from tests.attention.kernels import needs_interpreter, tile_cases

pytest.importorskip("triton", reason="Triton has no build for this system")

import triton
import triton.language as tl

from labcore.attention import tiling

pytestmark = needs_interpreter


@triton.jit
def tiles_kernel(
    cases_ptr, found_ptr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    case = cases_ptr + 6 * tl.program_id(0)
    m0, q_len, k_len = tl.load(case), tl.load(case + 1), tl.load(case + 2)
    shift, left, right = tl.load(case + 3), tl.load(case + 4), tl.load(case + 5)
    first, hot, cold, last = tiling.tiles(
        m0, tl.minimum(m0 + M, q_len), k_len, q_len, shift, left, right, N, LEFT, RIGHT, False
    )
    found = found_ptr + 4 * tl.program_id(0)
    tl.store(found, first)
    tl.store(found + 1, hot)
    tl.store(found + 2, cold)
    tl.store(found + 3, last)


@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_no_tile_is_left_out_and_none_without_a_mask_needs_one(left, right, seed) -> None:
    cases, patterns = tile_cases(left, right, 16, seed)
    found = torch.zeros(len(cases), 4, dtype=torch.int32)
    tiles_kernel[(len(cases),)](cases, found, M=16, N=8, LEFT=left, RIGHT=right)
    for (m0, q_len, k_len, *_), pattern, tiles in zip(
        cases.tolist(), patterns, found.tolist(), strict=True
    ):
        first, hot, cold, last = tiles
        seen = allowed(pattern, q_len, k_len)[0, 0, m0 : m0 + 16]
        parts = seen.split(8, dim=1)
        some = [bool(part.any()) for part in parts]
        every = [bool(part.all()) and part.shape[1] == 8 for part in parts]
        assert first < hot <= cold <= last + 1
        assert not any(some[:first]) and not any(some[last + 1 :])
        assert all(every[hot:cold])
        # The first tile of a walk always has its mask.
        assert not any(every[first + 1 : hot]) and not any(every[cold : last + 1])
