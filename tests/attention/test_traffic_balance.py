"""Blocks are counted in the kernel's order, and dealt out as it deals them."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from labcore.attention import configs, descriptors
from labcore.attention.traffic import Shape, block_costs, busy_share
from tests.attention.kernels import needs_interpreter


@triton.jit
def places(out_ptr, blocks, section, heads, FIRST: tl.constexpr):
    item = tl.program_id(0)
    block, head = descriptors.place(item, blocks, section, heads, FIRST)
    tl.store(out_ptr + 2 * item, block)
    tl.store(out_ptr + 2 * item + 1, head)


@needs_interpreter
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "cached"), [(6, 6, 4), (6, 3, 0), (5, 5, 99)])
def test_the_order_is_the_kernels(heads: int, kv_heads: int, cached: int, is_causal: bool) -> None:
    shape = Shape(batch=2, heads=heads, kv_heads=kv_heads, length=70, head_dim=16,
                  is_causal=is_causal)  # fmt: skip
    a_head = 2 * 70 * 16 * 2
    blocks, section = 5, min(2 * heads, heads // kv_heads * max(1, cached))
    out = torch.empty(2 * heads * blocks, 2, dtype=torch.int32)
    places[(len(out),)](out, blocks, section, 2 * heads, FIRST=is_causal)
    visited = [min(70, 16 * (block + 1)) if is_causal else 70 for block in out[:, 0].tolist()]
    ours = block_costs(shape, block_q=16, block_k=8, cached=cached * a_head)
    assert ours == [-(-keys // 8) for keys in visited]
    assert len({tuple(one) for one in out.tolist()}) == len(out)


def test_the_defaults_are_the_kernels() -> None:
    """A block's rows, a tile's keys, and the bytes of a section."""
    assert descriptors.CACHED == 32 << 20
    assert {(one.m, one.n) for one in configs.DESCRIBED.values()} == {(128, 128)}


def test_both_ways_by_hand() -> None:
    costs = [4, 3, 2, 1]
    assert busy_share(costs, 2, "fixed") == 10 / (2 * 6)  # 4 + 2 and 3 + 1
    assert busy_share(costs, 2, "next") == 1.0  # 4 + 1 and 3 + 2
    assert busy_share([1, 5, 1, 1, 1], 2, "next") == 9 / (2 * 5)
    assert busy_share([1, 5, 1, 1, 1], 2, "fixed") == 9 / (2 * 6)
    for dealt in ("fixed", "next"):
        assert busy_share([3] * 7, 7, dealt) == 1.0
        assert busy_share([3] * 8, 7, dealt) == 8 / 14


def test_the_next_free_program_is_never_idle_while_blocks_wait(seed: int) -> None:
    """So nobody ends later than a mean load and one block."""
    draw = random.Random(seed)
    for programs, count in itertools.product((1, 3, 10), (1, 9, 100)):
        costs = [draw.randint(1, 50) for _ in range(count)]
        last = sum(costs) / (programs * busy_share(costs, programs, "next"))
        assert last <= sum(costs) / programs + max(costs)
        for dealt in ("fixed", "next"):
            assert 0 < busy_share(costs, programs, dealt) <= 1


def test_a_causal_mask_leaves_a_fixed_assignment_behind_the_other() -> None:
    """What the chapter says of 132 multiprocessors."""
    for heads, length in ((16, 2048), (32, 4096), (16, 16_384)):
        costs = block_costs(
            Shape(batch=1, heads=heads, length=length, head_dim=128, is_causal=True)
        )
        fixed, free = (busy_share(costs, 132, how) for how in ("fixed", "next"))
        assert fixed < 0.87 and free > 0.96


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="dealt must be one of"):
        busy_share([1], 1, "random")
    with pytest.raises(ValueError, match="programs must be"):
        busy_share([1], 0, "fixed")
