"""Codes within half a step, bytes to the byte, and layers that multiply by what codes stand for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labcore.memory.quantization.conversion import stored_bytes
from labcore.memory.quantization.scheme import (
    INT8,
    Quantized,
    QuantizedLinear,
    Scheme,
    pack,
    quantize,
    unpack,
)

SCHEMES = [
    INT8,
    Scheme(bits=8, group_size=3),
    Scheme(bits=8, symmetric=False),
    Scheme(bits=8, group_size=5, symmetric=False),
    Scheme(bits=4),
    Scheme(bits=4, group_size=6),
    Scheme(bits=4, symmetric=False),
    Scheme(bits=4, group_size=10, symmetric=False),
]


def restored(quantized: Quantized) -> torch.Tensor:
    """The weights behind the codes, in float64, an element at a time."""
    scheme, groups = quantized.scheme, quantized.scales.shape[1]
    codes = quantized.codes if scheme.bits == 8 else unpack(quantized.codes)
    values = codes.double() - (8 if scheme.bits == 4 and scheme.symmetric else 0)
    wide = values.unflatten(1, (groups, -1)) * quantized.scales.double()[..., None]
    if quantized.lows is not None:
        wide += quantized.lows.double()[..., None]
    return wide.flatten(1)


def awkward(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of every size, one of zeros, one of equal weights, one far from zero."""
    weight = torch.randn(rows, inputs, generator=generator)
    weight *= 10.0 ** torch.randint(-30, 30, (rows, 1), generator=generator)
    weight[0], weight[1] = 0.0, -3.7
    weight[2] = 100 + torch.rand(inputs, generator=generator)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_weight_errs_by_more_than_half_a_step(scheme, dtype, generator) -> None:
    weight = awkward(37, 90, generator).to(dtype)
    quantized = quantize(weight, scheme)
    exact = weight.double()
    groups = exact.unflatten(1, (quantized.scales.shape[1], -1))
    # A dozen float32 roundings of numbers no larger than the group's largest, 2⁻²⁴ each.
    slack = 2.0**-20 * groups.abs().amax(-1)
    error = (restored(quantized) - exact).abs().unflatten(1, groups.shape[1:])
    steps = quantized.scales.double()
    assert (error.amax(-1) <= steps / 2 + slack).all()
    most = 2**scheme.bits - 1
    ranges = groups.amax(-1) - groups.amin(-1) if quantized.lows is not None else None
    stated = groups.abs().amax(-1) / (most // 2) if ranges is None else ranges / most
    assert ((steps - stated).abs() <= slack).all()
    told = quantized.dequantize()
    assert told.dtype == torch.float32
    apart = (told.double() - restored(quantized)).abs().unflatten(1, groups.shape[1:])
    assert (apart.amax(-1) <= slack).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_as_large_as_expected_and_no_better(bits, symmetric, generator) -> None:
    weight = torch.randn(300, 90, generator=generator)
    quantized = quantize(weight, Scheme(bits=bits, symmetric=symmetric))
    error = quantized.dequantize().double() - weight.double()
    # 27,000 errors: their mean square is known to 0.6 %; a row's ends, which are exact, take 2 %.
    assert error.square().mean().sqrt().item() == pytest.approx(quantized.expected_rms(), rel=0.06)
    assert (error.abs() / quantized.scales).max() > 0.45


def test_symmetric_codes_keep_zeros_and_others_equal_weights(generator) -> None:
    weight = awkward(9, 12, generator)
    weight[:, ::5] = 0.0
    for bits in (4, 8):
        even = quantize(weight, Scheme(bits=bits, group_size=6)).dequantize()
        assert (even[weight == 0] == 0).all()
        mirrored = quantize(-weight, Scheme(bits=bits, group_size=6)).dequantize()
        assert torch.equal(mirrored, -even)
        level = torch.full((3, 12), 0.1)
        assert torch.equal(quantize(level, Scheme(bits=bits, symmetric=False)).dequantize(), level)


class Finite(TorchDispatchMode):
    """No operation may give NaN or infinity: what integer that becomes is up to the machine."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.isfinite().all(), op
        return result


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_group_of_equal_weights_is_a_number_on_the_way(scheme, generator) -> None:
    weight = awkward(9, 30, generator)
    weight[3] *= 1e-44  # so small that its scale may be 0 as well
    with Finite():
        quantize(weight, scheme)


def test_two_codes_share_a_byte(generator) -> None:
    codes = torch.randint(16, (7, 22), generator=generator, dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (7, 11) and packed.dtype == torch.uint8
    assert packed[3, 4].item() == codes[3, 8].item() + 16 * codes[3, 9].item()
    assert torch.equal(unpack(packed), codes)
    assert pack(codes[:0]).shape == (0, 11)
    for wrong in (codes[:, :3], codes + 16, codes.int(), codes[0]):
        with pytest.raises(ValueError, match="codes must be uint8 .O, I. of 0 to 15 with I even"):
            pack(wrong)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_bytes_are_those_predicted(scheme, generator) -> None:
    quantized = quantize(torch.randn(7, 30, generator=generator), scheme)
    kept = [quantized.codes, quantized.scales, quantized.lows]
    held = sum(part.untyped_storage().nbytes() for part in kept if part is not None)
    assert held == scheme.bytes(7, 30)
    layer = QuantizedLinear(nn.Linear(30, 7), scheme)
    assert stored_bytes(layer) == scheme.bytes(7, 30) + 7 * 4


@pytest.mark.parametrize("scheme", [INT8, Scheme(bits=4, group_size=6, symmetric=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_what_its_codes_stand_for(scheme, dtype, generator) -> None:
    linear = nn.Linear(18, 5, dtype=dtype)
    layer = QuantizedLinear(linear, scheme)
    x = torch.randn(2, 3, 18, generator=generator).to(dtype).requires_grad_()
    weight = restored(quantize(linear.weight, scheme)).to(dtype)
    expected = F.linear(x.double(), weight.double(), linear.bias.double())
    told = layer(x)
    assert told.dtype == dtype
    # Sums of at most 19 products of size 1 or so, each rounded to 2⁻⁸ of it or to 2⁻²⁴.
    close = {"rtol": 0.0, "atol": 0.1 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(told.double(), expected, **close)
    told.sum().backward()
    torch.testing.assert_close(x.grad[0, 0].double(), weight.double().sum(0), **close)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.randn(4, 30)
    cases = [
        (weight, Scheme(group_size=7), "group_size must divide .* weight, got 7 for 30"),
        (weight, Scheme(bits=4, group_size=5), "group_size must be even where two codes"),
        (weight[:, :29], Scheme(bits=4), "group_size must be even where two codes"),
        (weight[:, :0], INT8, "group_size must divide the rows"),
        (weight[0], INT8, "weight must be .outputs, inputs., got shape"),
        (weight / 0, INT8, "weight must be finite, got 120 of 120"),
        (torch.full((2, 30), 1e39, dtype=torch.float64), INT8, "weight must be finite, got 60 of"),
    ]
    for given, scheme, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            quantize(given, scheme)
    with pytest.raises(TypeError, match="weight must be floating point"):
        quantize(weight.int(), INT8)
    with pytest.raises(ValueError, match="bits must be one of 8, 4, got 3"):
        Scheme(bits=3)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        Scheme(group_size=0)
