"""What the tests of the kernels share: small tiles, guarded memory, and which kernels ran."""

from __future__ import annotations

import math
import mmap
import random

import pytest
import torch
from torch import Tensor

from labcore import device
from labcore.attention import Pattern, launch

needs_interpreter = pytest.mark.skipif(
    not device.interpreting(), reason="needs Triton's interpreter, which a machine with a GPU lacks"
)
GUARD = 64  # elements of NaN before and behind a tensor
ROOMY = 3  # and between its rows
MAP_NORESERVE = 0x4000  # Linux; the module mmap lacks it


def guarded(x: Tensor) -> Tensor:
    """The same values between NaN on all sides: a read outside of them shows in the result."""
    batch, heads, tokens, dim = x.shape
    room = torch.full((batch, heads, tokens + 2 * ROOMY, dim + 2 * GUARD), math.nan, dtype=x.dtype)
    inside = room[:, :, ROOMY : ROOMY + tokens, GUARD : GUARD + dim]
    inside.copy_(x.detach())
    return inside


def spread(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same values with `strides`, which may reach past 2^31 elements, in memory of holes.

    An offset that wraps at 31 bits finds a hole before the values, and so zeros. Only the pages
    that are written take memory, 4 KiB each.
    """
    before, size = 1 << 31, (1 << 32) + (1 << 20)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    room = mmap.mmap(-1, size * x.element_size(), flags=flags)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=x.dtype).as_strided(x.shape, strides, before).copy_(x)


class Guards:
    """Stands for `new_heads`: what it gives lies between NaN, which `intact` finds unchanged."""

    def __init__(self) -> None:
        self.rooms: list[tuple[Tensor, Tensor]] = []

    def __call__(self, like: Tensor) -> Tensor:
        """An uninitialized [B, H, T, D] inside of NaN."""
        inside = guarded(torch.zeros(like.shape, dtype=like.dtype))
        room = inside.as_strided((inside.untyped_storage().nbytes() // inside.itemsize,), (1,), 0)
        self.rooms.append((room, inside))
        return inside

    def intact(self) -> bool:
        """Whether every result was written whole, and nothing outside of it."""
        outside = [int(room.isnan().sum()) == room.numel() - x.numel() for room, x in self.rooms]
        return len(outside) > 0 and all(outside)


def tile_cases(
    left: bool, right: bool, size: int, seed: int, *, of_keys: bool = False
) -> tuple[Tensor, list[Pattern]]:
    """Where a tile of `size` queries (or keys) may lie, with every remainder of the bounds by 8.

    int32 [cases, 6]: first row, T, S, shift, left, right; and each case's pattern.
    """
    draw = random.Random(seed)
    cases, patterns = [], []
    for case in range(32):
        q_len, k_len = draw.randint(1, 90), draw.randint(1, 90)
        start = draw.randrange(k_len if of_keys else q_len) // size * size
        bounds = case % 8 + 8 * draw.randint(0, 5), case * 3 % 8 + 8 * draw.randint(0, 5)
        pattern = Pattern(
            scale=1.0,
            window=(bounds[0] if left else None, bounds[1] if right else None),
            bottom_right=case % 4 == 0,
        )
        cases.append([start, q_len, k_len, pattern.shift(q_len, k_len), *bounds])
        patterns.append(pattern)
    return torch.tensor(cases, dtype=torch.int32), patterns


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched, in order."""
    seen: list[str] = []
    from labcore.attention import backward, delta, forward

    def counted(kernel, programs, where, **given) -> None:
        seen.append(kernel.fn.__name__)
        launch.launch(kernel, programs, where, **given)

    for module in (forward, delta, backward):
        monkeypatch.setattr(module, "launch", counted)
    return seen
