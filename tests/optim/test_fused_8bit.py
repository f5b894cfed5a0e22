"""The fused path of AdamW8bit: the codes of quantize_blocks, and the same steps as without it."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from labcore import device
from labcore.optim import (
    AdamW8bit,
    dequantize_blocks,
    dynamic_map,
    fused,
    fused_8bit,
    largest_error,
    quantize_blocks,
)
from labcore.optim.adamw8bit_optimizer import SMALLEST
from tests.optim.lists import awkward, far, run, states, train

triton = pytest.importorskip("triton", reason=device.triton_problem() or "Triton")
if not device.interpreting():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
tl = triton.language
nearest_code = pytest.importorskip("labcore.optim.kernels_8bit").nearest_code

SIZES = (4096, 4097, 8191, 3 * 8192 + 5)
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
BLOCKS = pytest.mark.parametrize("block_size", fused_8bit.BLOCK_SIZES)
# Weights are below 8: one unit in the last place of 4 to 8, in float32 two of them.
ULP = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}
LR = 1e-2
# One rounding apart, two moments lie on different sides of a border about once in 1e5 elements.
RARE = 1e-3


@triton.jit
def codes_kernel(x_ptr, codes_ptr, borders_ptr, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(codes_ptr + offs, nearest_code(x, borders_ptr, SIGNED), mask=offs < n)


def large(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Parameters of SIZES and small ones, then some of at least 4096 elements with odd strides."""
    params = awkward(dtype, seed, [*((size,) for size in SIZES), (3, 5), (0,)])
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    params.append(nn.Parameter(draw(4, 9, 11, 13).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(draw(65, 67).t()))
    params.append(draw(90, 80)[:, 1:74].requires_grad_())  # strided: not dense
    params.append(draw(5001)[1:].requires_grad_())  # its address is no multiple of 16
    return params


def launches(monkeypatch: pytest.MonkeyPatch) -> list[fused.Launch]:
    seen: list[fused.Launch] = []
    original = fused_8bit._run

    def counted(launch, *arguments, **keywords) -> None:
        seen.append(launch)
        original(launch, *arguments, **keywords)

    monkeypatch.setattr(fused_8bit, "_run", counted)
    return seen


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_counts_the_borders_below(signed: bool, seed: int) -> None:
    values = dynamic_map(signed=signed)
    borders = (values[1:] + values[:-1]) / 2
    tens = torch.tensor([10.0**-k for k in range(9)])
    exact = torch.cat([borders, tens, -tens, torch.zeros(1)])
    near = exact.view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (-9 * torch.rand(100_000, generator=generator))
    x = torch.cat([near.view(torch.float32).flatten(), spread, -spread, torch.tensor([math.nan])])
    x = x[~(x.abs() > 1)]
    codes = torch.empty(len(x), dtype=torch.int32)
    codes_kernel[(triton.cdiv(len(x), 1 << 16),)](x, codes, borders, len(x), signed, 1 << 16)
    assert torch.equal(codes, torch.bucketize(x, borders, out_int32=True, right=True))
    assert codes[-1] == 255 and codes.unique().numel() == 256


@BLOCKS
@pytest.mark.parametrize("size", SIZES)
def test_equal_moments_get_equal_codes_and_scales(size: int, block_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad = 10 ** (-10 * torch.rand(size, generator=generator))
    grad *= torch.randn(size, generator=generator)
    starts = torch.randperm(size // block_size, generator=generator) * block_size
    # Zeros, subnormal first moments, subnormal second ones, and a block whose largest is negative.
    for start, factor in zip(starts.tolist(), (0.0, 1e-40, 1e-22, -1.0), strict=False):
        block = slice(start, start + block_size)
        grad[block] = factor * grad[block].abs()
    weight = nn.Parameter(torch.zeros(size))
    weight.grad = grad
    # The first moments are then the gradient and its square, without any rounding but the square's.
    optimizer = AdamW8bit([weight], betas=(0.0, 0.0), block_size=block_size, fused=True)
    optimizer.step()
    state = optimizer.state[weight]
    for name, moment in {"exp_avg": grad, "exp_avg_sq": grad * grad}.items():
        codes, scales = quantize_blocks(moment, signed=SIGNED[name], block_size=block_size)
        assert torch.equal(state[name], codes)
        assert torch.equal(state[f"{name}_scales"], scales)
    assert (state["exp_avg_sq"][grad * grad > 0] > 0).all()


@BLOCKS
def test_codes_are_restored_exactly(block_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(SIZES[-1]))
    weight.grad = torch.zeros_like(weight)
    optimizer = AdamW8bit([weight], betas=(0.5, 0.5), block_size=block_size, fused=True)
    optimizer.step()
    state, halves = optimizer.state[weight], {}
    for name, signed in SIGNED.items():
        codes, scales = state[name], state[f"{name}_scales"]
        codes.random_(256, generator=generator)
        scales.copy_(10 ** (-20 * torch.rand(scales.shape, generator=generator)))
        halves[name] = dequantize_blocks(codes, scales, signed=signed, block_size=block_size) / 2
    optimizer.step()  # without a gradient, betas of 1/2 halve the moments, which rounds nothing
    for name, signed in SIGNED.items():
        codes, scales = quantize_blocks(halves[name], signed=signed, block_size=block_size)
        assert torch.equal(state[name], codes)
        assert torch.equal(state[f"{name}_scales"], scales)


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(
    "choice", [{}, {"maximize": True, "weight_decay": 0.3}, {"master_weights": True}], ids=str
)
def test_fused_is_the_unfused_step(dtype, choice, seed: int, monkeypatch) -> None:
    seen = launches(monkeypatch)
    plain, ours = large(dtype, seed), large(dtype, seed)
    settings = {"lr": LR, "weight_decay": 0.1, "block_size": 64 << seed % 5, **choice}

    def missing(step: int, index: int) -> bool:
        return step == 1 and index == 3

    one = run(plain, lambda p: AdamW8bit(p, **settings), seed=seed, steps=4, missing=missing)
    assert not seen
    two = run(
        ours, lambda p: AdamW8bit(p, fused=True, **settings), seed=seed, steps=4, missing=missing
    )
    # Aligned, of an older step count after a missing gradient, and not aligned.
    sizes = [len(launch.operands) for launch in seen]
    assert sizes == [7, 1] + [6, 1] + [6, 1, 1] * 2
    total = sum(param.numel() for param in ours)
    # Where a code differs, the moments do, and the weight moves otherwise, by some steps of lr.
    assert far(plain, ours, ULP[dtype] + LR * 2**-16) <= RARE * total
    assert far(plain, ours, ULP[dtype] + 4 * LR) == 0
    for left, right in zip(plain, ours, strict=True):
        for name, signed in SIGNED.items():
            if left.numel() >= SMALLEST:
                first, second = (
                    dequantize_blocks(
                        state[name],
                        state[f"{name}_scales"],
                        signed=signed,
                        block_size=settings["block_size"],
                    )
                    for state in (one.state[left], two.state[right])
                )
                scale = float(first.abs().max())
                assert far([first], [second], 1e-6 * scale) <= RARE * total
                # Where a code differs in each step, moments grow apart by a gap of the map in each.
                assert far([first], [second], 4 * 2 * largest_error(signed=signed) * scale) == 0


def test_a_list_of_one_dtype_takes_one_launch(monkeypatch) -> None:
    seen = launches(monkeypatch)
    params = [nn.Parameter(torch.ones(size)) for size in (7, 4096, 70_001, 1)]
    optimizer = run(params, lambda p: AdamW8bit(p, fused=True), seed=0, steps=1)
    assert [len(launch.operands) for launch in seen] == [2]  # the small ones are AdamW's
    kept = optimizer._tables._kept
    before = {key: tables.table.data_ptr() for key, tables in kept.items()}
    train(params, optimizer, seed=1, steps=1)
    assert len(before) == 3  # AdamW's, the operands' and the scales'
    assert {key: tables.table.data_ptr() for key, tables in kept.items()} == before


def test_nothing_is_written_outside_the_tensors(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    optimizer = run(params, lambda p: AdamW8bit(p, fused=True), seed=seed, steps=1)
    guarded = []

    def guard(tensor: Tensor) -> Tensor:
        room = torch.full((tensor.numel() + 64,), 77, dtype=tensor.dtype)
        room[32:-32] = tensor.detach()
        guarded.append(room)
        return room[32:-32]

    for param in params:
        param.data = guard(param)
        state = optimizer.state[param]
        for name in state.keys() - {"step"}:
            state[name] = guard(state[name])
    train(params, optimizer, seed=seed, steps=2)
    assert len(guarded) == 5 * len(SIZES)
    for room in guarded:
        assert (room[:32] == 77).all() and (room[-32:] == 77).all()


def test_fused_stochastic_rounding_is_unbiased(seed: int) -> None:
    n = 40_000
    settings = {"lr": 1e-3, "weight_decay": 0.0, "stochastic_rounding": True, "fused": True}
    ends = []
    for _ in range(2):
        weight = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(seed)
        optimizer = AdamW8bit([weight], generator=generator, **settings)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        ends.append(weight)
    # As for AdamW: a binomial count, and six standard deviations.
    share = 1e-3 * 2**8
    down = int((ends[0] == 1 - 2**-8).sum())
    assert down + int((ends[0] == 1).sum()) == n
    assert abs(down - n * share) < 6 * math.sqrt(n * share * (1 - share))
    assert torch.equal(*ends)  # the generator decides


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_spoils_its_block_as_without_fused(bad: float, seed: int) -> None:
    ends = []
    for choice in (None, True):
        weight = nn.Parameter(torch.zeros(5000))
        optimizer = AdamW8bit([weight], fused=choice)
        generator = torch.Generator().manual_seed(seed)
        for step in range(2):
            weight.grad = torch.randn(5000, generator=generator)
            if step == 0:
                weight.grad[300] = bad
            optimizer.step()
        ends.append((weight, optimizer.state[weight]))
    (plain, one), (ours, two) = ends
    assert ours[256:512].isnan().all() and ours[:256].isfinite().all()
    assert torch.equal(ours.isnan(), plain.isnan())
    for name in SIGNED:
        assert torch.equal(one[name][256:512], two[name][256:512])
        assert torch.equal(one[f"{name}_scales"].isnan(), two[f"{name}_scales"].isnan())


def test_a_bad_gradient_can_be_skipped_or_refused(seed: int) -> None:
    params = [nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(5000))]
    optimizer = AdamW8bit(params, fused=True, nonfinite="skip")
    params[0].grad, params[1].grad = torch.full((5000,), math.inf), torch.ones(5000)
    optimizer.step()
    assert optimizer.skipped == 1 and (params[0] == 0).all() and (params[1] != 0).all()
    with pytest.raises(RuntimeError, match="AdamW8bit needs finite gradients"):
        optimizer.param_groups[0]["nonfinite"] = "raise"
        optimizer.step()


def test_either_form_goes_on_with_the_state_of_the_other(seed: int) -> None:
    first, second, third = (large(torch.float32, seed) for _ in range(3))
    plain = run(first, lambda p: AdamW8bit(p, lr=LR), seed=seed, steps=2)
    ours = AdamW8bit(second, fused=True)
    ours.load_state_dict(plain.state_dict())
    again = AdamW8bit(third)
    again.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["fused"] and not again.param_groups[0]["fused"]
    for left, right in zip(states(plain), states(again), strict=True):
        assert torch.equal(left, right)
    for params in (second, third):
        for param, start in zip(params, first, strict=True):
            param.data.copy_(start)
    train(second, ours, seed=seed + 1, steps=1)
    train(third, again, seed=seed + 1, steps=1)
    assert far(second, third, 1e-6) == 0
    for left, right in zip(states(ours), states(again), strict=True):
        if left.dtype == torch.uint8:  # one step from the same state: one rounding apart
            apart = (left.int() - right.int()).abs()
            assert apart.max() <= 1 and apart.count_nonzero() <= 2 + RARE * left.numel()
        else:
            assert torch.allclose(left, right, rtol=1e-6, atol=1e-6)


def test_a_copy_goes_on_alone(seed: int) -> None:
    weight = nn.Parameter(torch.zeros(5000))
    optimizer = run([weight], lambda p: AdamW8bit(p, fused=True), seed=seed, steps=2)
    other = copy.deepcopy(optimizer)
    (twin,) = other.param_groups[0]["params"]
    before = weight.detach().clone()
    train([twin], other, seed=seed + 1, steps=2)
    assert torch.equal(weight, before) and not torch.equal(twin, before)
    train([weight], optimizer, seed=seed + 1, steps=2)
    assert torch.equal(weight, twin)


def test_autograd_hears_of_the_change() -> None:
    param = nn.Parameter(torch.ones(5000))
    loss = (param**2).sum()  # keeps the weight for its backward
    param.grad = torch.ones(5000)
    AdamW8bit([param], fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("block_size", [1, 32, 100, 2048])
def test_other_block_sizes_are_refused(block_size: int) -> None:
    weight = nn.Parameter(torch.ones(5000))
    AdamW8bit([weight], block_size=block_size)
    with pytest.raises(ValueError, match="block_size with fused=True must be one of 64, 128"):
        AdamW8bit([weight], block_size=block_size, fused=True)


def test_what_cannot_be_fused_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="got a torch.float64 parameter; use fused=False"):
        AdamW8bit([nn.Parameter(torch.ones(2, dtype=torch.float64))], fused=True)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="fused=True cannot run; use fused=False: AdamW8bit: "):
        AdamW8bit([nn.Parameter(torch.ones(2))], fused=True)
