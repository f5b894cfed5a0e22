"""Eight bits a moment: nearest values of the dynamic map, and AdamW that goes on with them."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from labcore.optim import (
    AdamW,
    AdamW8bit,
    adamw,
    dequantize_blocks,
    dynamic_map,
    largest_error,
    quantize_blocks,
)
from tests.optim.lists import awkward, largest_difference, run, states, train

SIGNS = pytest.mark.parametrize("signed", [True, False])


def wide(shape: tuple[int, ...], seed: int, *, signed: bool) -> Tensor:
    """Numbers over ten powers of ten, as squared gradients are."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 ** (10 * torch.rand(shape, generator=generator) - 8)
    return x * torch.randn(shape, generator=generator).sign() if signed else x


@SIGNS
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (256,), (257,), (5, 1001)], ids=str)
@pytest.mark.parametrize("block_size", [1, 64, 256])
def test_each_number_becomes_the_nearest_value(signed, shape, block_size: int, seed: int) -> None:
    x = wide(shape, seed, signed=signed)
    codes, scales = quantize_blocks(x, signed=signed, block_size=block_size)
    assert codes.shape == x.shape and codes.dtype == torch.uint8
    assert scales.shape == (-(-x.numel() // block_size),)
    back = dequantize_blocks(codes, scales, signed=signed, block_size=block_size)
    scale = torch.stack([block.abs().max() for block in x.view(-1).split(block_size)])
    assert torch.equal(scales, scale)
    scale = scale.double().repeat_interleave(block_size)[: x.numel()].view(shape)
    error = (back.double() - x.double()).abs() / scale
    values = dynamic_map(signed=signed).double()
    least = (x.double() / scale).unsqueeze(-1).sub(values).abs().amin(-1)
    if not signed:  # but a positive number is never taken for 0
        least = (x.double() / scale).unsqueeze(-1).sub(values[1:]).abs().amin(-1)
    # Quotient and product round by 6e-8 of a number below 1.
    assert (error <= least + 2e-7).all()
    assert (error <= largest_error(signed=signed) + 2e-7).all()
    assert signed or (back > 0).all()


@SIGNS
def test_the_largest_error_is_reached_and_not_passed(signed: bool) -> None:
    x = torch.linspace(-1 if signed else 0, 1, 100_001)
    x[-1] = 1
    codes, scales = quantize_blocks(x, signed=signed, block_size=x.numel())
    error = (dequantize_blocks(codes, scales, signed=signed, block_size=x.numel()) - x).abs().max()
    assert error.item() == pytest.approx(largest_error(signed=signed), rel=2e-2)
    assert largest_error(signed=signed) == pytest.approx(0.9 / (128 if signed else 256), rel=1e-4)


@SIGNS
def test_zeros_are_exact_what_was_rounded_stays_and_nan_shows(signed: bool, seed: int) -> None:
    x = wide((1000,), seed, signed=signed)
    x[:256] = 0
    x[300] = 0
    codes, scales = quantize_blocks(x, signed=signed)
    back = dequantize_blocks(codes, scales, signed=signed)
    assert (back[:256] == 0).all() and back[300] == 0 and scales[0] == 0
    if not signed:  # -0.993 is the least signed value: a block with its largest below 0 shrinks
        again = quantize_blocks(back, signed=signed)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    for bad in (float("nan"), float("inf")):
        x[600] = bad
        back = dequantize_blocks(*quantize_blocks(x, signed=signed), signed=signed)
        assert not back[600].isfinite()
        assert back[:512].isfinite().all() and back[768:].isfinite().all()


def test_parity_with_torchao(seed: int) -> None:
    torchao = pytest.importorskip("torchao.optim")
    peers = pytest.importorskip("torchao.optim.quant_utils")
    for signed in (True, False):
        values = torch.tensor(peers.create_dynamic_map(signed=signed))
        assert (dynamic_map(signed=signed) - values).abs().max() < 1e-7
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(64, 256, generator=generator) + 1e-3
        x = x * (torch.randn(64, 256, generator=generator).sign() if signed else 1)
        unit, scales = peers.scale_tensor(x, 256)
        codes = peers.quantize_8bit_with_qmap(unit, values)
        ours, our_scales = quantize_blocks(x, signed=signed)
        assert torch.equal(our_scales, scales)
        # Numbers within a rounding of a border: 16,384 of them, 128 borders, 1e-7 each.
        assert (ours != codes).sum() <= 8
    ours, theirs = (awkward(torch.float32, seed, [(64, 256)])[:1] for _ in range(2))
    makers = (AdamW8bit(ours, lr=1e-2), torchao.AdamW8bit(theirs, lr=1e-2))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(5):
            grad = torch.rand(64, 256, generator=generator) + 0.5
            for params, optimizer in zip((ours, theirs), makers, strict=True):
                params[0].grad = grad
                optimizer.step()
    # A code that went to the other side of a border: a percent of one moment, of a step of 1e-2.
    gaps = (ours[0] - theirs[0]).abs()
    assert (gaps > 1e-6).sum() <= 40 and gaps.max() < 2e-3


@pytest.mark.parametrize("shape", [(64, 65), (70_001,), (3, 40, 41)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_is_adamw_between_two_roundings(shape, dtype, transposed, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    start = start.mT.contiguous().mT if transposed and start.dim() > 1 else start
    weight = torch.nn.Parameter(start.clone(memory_format=torch.preserve_format))
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = AdamW8bit([weight], block_size=64, **settings)
    state = optimizer.state[weight]
    moments = {"exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
    for step in range(3):
        grad = torch.randn(shape, generator=generator).to(dtype)
        before = weight.detach().to(torch.promote_types(dtype, torch.float32), copy=True)
        weight.grad = grad
        optimizer.step()
        expected, after = adamw(
            before,
            grad.to(before.dtype),
            {"step": step, **{k: v.to(before.dtype) for k, v in moments.items()}},
            **settings,
        )
        assert (weight - expected.to(dtype)).abs().max() <= (2**-5 if dtype.itemsize == 2 else 1e-6)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, scales = quantize_blocks(after[name], signed=signed, block_size=64)
            # One rounding apart, a few codes may lie on the other side of a border.
            assert (codes != state[name]).sum() <= 20
            assert (scales - state[f"{name}_scales"]).abs().max() <= 1e-6 * scales.max()
            moments[name] = dequantize_blocks(
                state[name], state[f"{name}_scales"], signed=signed, block_size=64
            )


def test_small_parameters_are_adamw_itself(seed: int) -> None:
    shapes = [(3, 5), (4095,), ()]
    ours, plain = awkward(torch.float64, seed, shapes), awkward(torch.float64, seed, shapes)
    run(ours, lambda p: AdamW8bit(p, lr=1e-2), seed=seed, steps=9)
    run(plain, lambda p: AdamW(p, lr=1e-2, foreach=False), seed=seed, steps=9)
    assert largest_difference(ours, plain) < 1e-12


def test_a_rare_weight_beside_busy_ones_is_not_thrown_away(seed: int) -> None:
    # v of the rare weight is 1e-8 of its neighbor's: below half of the least value of the map.
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0.0)
    for step in range(10):
        weight.grad = torch.randn(4096, generator=generator)
        weight.grad[::256] = 1e-4 if step == 0 else 0.0
        optimizer.step()
    assert weight[::256].abs().max() <= 10 * 1e-3


def test_it_trains_as_adamw_does(seed: int) -> None:
    ends = {}
    for cls in (AdamW, AdamW8bit):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(80, 64, generator=generator)
        weight = torch.nn.Parameter(torch.zeros(80, 64))
        optimizer = cls([weight], lr=0.05, weight_decay=0.0)
        for step in range(300):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
            noise = 0.1 * torch.randn(80, 64, generator=generator)
            weight.grad = weight.detach() - target + noise
            optimizer.step()
        ends[cls] = (weight.detach() - target).square().mean().item()
    # Over seeds AdamW ends at 1.7e-4 to 1.9e-4, from 1, and 8 bits at 1.06 to 1.11 times that.
    assert ends[AdamW8bit] < 1.25 * ends[AdamW] and ends[AdamW] < 3e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [64, 256])
def test_state_is_two_bytes_a_weight_as_predicted(dtype, block_size: int, seed: int) -> None:
    params = awkward(dtype, seed)
    optimizer = run(params, lambda p: AdamW8bit(p, block_size=block_size), seed=seed, steps=1)
    width = 8 if dtype == torch.float64 else 4
    for param in params:
        actual = sum(v.numel() * v.element_size() for v in optimizer.state[param].values())
        assert actual == AdamW8bit.state_bytes(param.shape, dtype, block_size=block_size)
        n = param.numel()
        blocks = -(-n // block_size)
        assert actual == 4 + (2 * (n + 4 * blocks) if n >= 4096 else 2 * width * n)
    assert AdamW8bit.state_bytes((4096, 11_008)) == 4 + 2 * 4096 * 11_008 * (256 + 4) // 256


def test_loading_keeps_codes_in_eight_bits(seed: int) -> None:
    shapes = [(70_001,), (3, 5)]
    ours, again = awkward(torch.float32, seed, shapes), awkward(torch.float32, seed, shapes)
    first = run(ours, lambda p: AdamW8bit(p), seed=seed, steps=3)
    for mine, theirs in zip(again, ours, strict=True):
        mine.data.copy_(theirs)
    second = AdamW8bit(again, lr=0.5)
    second.load_state_dict(first.state_dict())
    assert {v.dtype for v in states(second)} == {torch.uint8, torch.float32}
    train(ours, first, seed=seed + 1, steps=2)
    train(again, second, seed=seed + 1, steps=2)
    assert largest_difference(ours, again) == 0
    with pytest.raises(ValueError, match="AdamW8bit keeps .*got a state with"):
        AdamW8bit(ours, block_size=64).load_state_dict(
            {
                **first.state_dict(),
                "param_groups": AdamW8bit(ours, block_size=64).state_dict()["param_groups"],
            }
        )


def test_a_round_trip_adds_no_setting() -> None:
    optimizer = AdamW8bit([torch.nn.Parameter(torch.ones(5000))])
    loaded = AdamW8bit([torch.nn.Parameter(torch.ones(5000))])
    loaded.load_state_dict(optimizer.state_dict())
    for other in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_dict() == optimizer.state_dict()


def test_a_bad_setting_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="eps must be .*at least 0, got -1"):
        AdamW8bit([weight], eps=-1.0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        AdamW8bit([weight], block_size=0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        quantize_blocks(weight.detach(), block_size=0)
