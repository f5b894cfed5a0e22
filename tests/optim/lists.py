"""Parameter lists with awkward shapes and strides, and runs over them."""

import os
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from labcore import device
from labcore.optim import elementwise

# A test's `path`: `fused` as on a CPU, and as on a GPU, in Triton's interpreter.
COMPILED, TRITON = {"fused": True}, {"fused": True}
SHAPES = ((3, 5), (70_001,), (), (1,), (0,), (17, 3, 5, 5), (300, 301))


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `fused` run the kernels on CPU tensors too, or skip the test."""
    if not device.interpreting():
        pytest.skip("needs Triton's interpreter, which a machine with a GPU lacks")
    monkeypatch.setattr(elementwise, "by_triton", lambda _: True)


def needs_compiler() -> None:
    """Skip the test on a user's machine without a C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and "CI" not in os.environ:
        pytest.skip("needs a C++ compiler: apt install g++")


def awkward(
    dtype: torch.dtype, seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    """Leaves of `shapes`, then a channels-last, a transposed, a sliced and an odd-addressed one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = [nn.Parameter(draw(*shape)) for shape in shapes]
    params.append(nn.Parameter(draw(2, 3, 5, 7).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(draw(5, 9).t()))
    params.append(draw(9, 8)[:, 1:6].requires_grad_())  # strided: not dense
    params.append(draw(102)[1:].requires_grad_())  # its address is no multiple of 16
    return params


def run(
    params: list[Tensor],
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    seed: int,
    steps: int = 50,
    missing: Callable[[int, int], bool] = lambda _step, _index: False,
) -> torch.optim.Optimizer:
    """`steps` steps under random gradients; `missing(step, index)` leaves a gradient out."""
    optimizer = make(params)
    train(params, optimizer, seed=seed, steps=steps, missing=missing)
    return optimizer


def nothing_outside(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], sizes: Sequence[int], seed: int
) -> None:
    """Step vectors that lie between NaNs, and check that these are still there."""
    generator = torch.Generator().manual_seed(seed)
    rooms = [torch.full((size + 64,), torch.nan) for size in sizes]
    for room in rooms:
        room[32:-32] = torch.randn(len(room) - 64, generator=generator)
    params = [room[32:-32].requires_grad_() for room in rooms]
    run(params, make, seed=seed, steps=2)
    for room, param in zip(rooms, params, strict=True):
        assert room[:32].isnan().all() and room[-32:].isnan().all()
        assert param.isfinite().all()


def train(
    params: list[Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    steps: int,
    missing: Callable[[int, int], bool] = lambda _step, _index: False,
) -> None:
    """Go on with an optimizer, as `run` does."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, param in enumerate(params):
            real = torch.float64 if param.dtype != torch.complex128 else torch.complex128
            grad = torch.randn(param.shape, generator=generator, dtype=real).to(param.dtype)
            param.grad = None if missing(step, index) else grad
        optimizer.step()


def largest_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest absolute difference over two lists; NaN counts as infinite."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if a.numel():
            gap = (a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs().max()
            worst = max(worst, float(gap.nan_to_num(nan=float("inf"))))
    return worst


def far(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> int:
    """How many elements differ by more than `tolerance`, NaN included.

    Lion's update jumps where the blend of momentum and gradient crosses 0: two right ways of
    rounding differ there. In float32 that is one element in ten million a step.
    """
    gaps = [
        (a.detach().double() - b.detach().double()).abs() for a, b in zip(left, right, strict=True)
    ]
    return sum(int((~(gap <= tolerance)).sum()) for gap in gaps)


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every state tensor, in the order of parameters and names."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = optimizer.state.get(param, {})
            found += [entry[name] for name in sorted(entry)]
    return found
