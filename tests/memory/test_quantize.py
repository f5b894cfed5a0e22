"""Codes within half a step, bytes to the byte, and torchao beside the form to read."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labcore.memory import quantize as module
from labcore.memory.quantize import (
    INT4,
    INT8,
    QuantizedLinear,
    Scheme,
    Torchao,
    convert,
    pack,
    quantize,
    quantized_bytes,
    quantized_price,
    stored_bytes,
    unpack,
)
from labcore.models import Llama, LlamaConfig
from tests.memory.steps import AWKWARD, config

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


def restored(quantized: module.Quantized) -> torch.Tensor:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", AWKWARD)
def test_a_llamas_bytes_are_those_predicted(name, dtype) -> None:
    shape = config(name)
    for scheme in (None, INT8, Scheme(bits=4, group_size=4, symmetric=False)):
        keep = ("layers.1.mlp.down_proj",) if scheme else ()
        model = Llama(shape).to(dtype)
        if scheme:
            convert(model, scheme, keep=keep)
            assert type(model.layers[1].mlp.down_proj) is nn.Linear
            assert not isinstance(model.layers[0].mlp.down_proj, nn.Linear)
        told = quantized_bytes(shape, scheme, keep=keep, dtype=dtype)
        assert told.total == told.parameters == stored_bytes(model)


def test_a_shared_storage_counts_once() -> None:
    layer = nn.Linear(6, 5, bias=False)
    layer.register_buffer("view", layer.weight.detach()[2:])
    assert stored_bytes(layer) == 6 * 5 * 4


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


def test_converted_llama_differs_only_in_its_rounded_weights(seed, generator) -> None:
    shape = config("biased")
    model = Llama(shape, generator=generator)
    rounded, scheme = copy.deepcopy(model), Scheme(bits=4, group_size=20, symmetric=False)
    keep = [name for name, part in model.named_modules() if getattr(part, "in_features", 0) == 64]
    for name, part in rounded.named_modules():
        if isinstance(part, nn.Linear) and name not in keep:
            part.weight.data = quantize(part.weight, scheme).dequantize()
    convert(model, scheme, keep=keep)
    tokens = torch.randint(shape.vocab_size, (2, 9), generator=generator)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, rounded(tokens).logits)
    again = Llama(shape)
    convert(again, scheme, keep=keep)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
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

    model = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 3))
    with pytest.raises(ValueError, match="rows of 1, got 32 for 6 inputs; .*divisor or keep"):
        convert(model, INT4)
    assert all(type(part) is nn.Linear for part in model)
    with pytest.raises(ValueError, match=r"keep must name linear layers.*, got \['2'\]"):
        convert(model, INT8, keep=["1", "2"])
    model[1].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="1.weight must be finite, got 1 of 18"):
        convert(model, INT8)
    assert all(type(part) is nn.Linear for part in model)
    with pytest.raises(ValueError, match="nn.Linear that is not kept, got none"):
        convert(model, INT8, keep=["0", "1"])


def test_the_price_of_a_scheme_is_that_of_a_copy(generator) -> None:
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    model = Llama(shape, generator=generator)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain, eight, four = (
        quantized_price(model, scheme, repeats=1) for scheme in (None, INT8, INT4)
    )
    for one in (plain, eight, four):
        assert one.predicted == one.stored and one.seconds.n == 1
    assert four.stored < eight.stored < plain.stored
    # Of the 6 nats of a random model 8 bits change 0.003, 4 bits 0.08, over seeds at most.
    assert abs(eight.loss - plain.loss) < 0.02
    assert abs(four.loss - plain.loss) < 0.4
    assert len({plain.loss, eight.loss, four.loss}) > 1  # one may agree by chance, not both
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def bounds(x: torch.Tensor, *steps: torch.Tensor) -> torch.Tensor:
    """How far two products may lie apart whose weights [O, I] err by half of their steps [O, I]."""
    return x.double().abs() @ (sum(step.double() for step in steps) / 2).t() * 1.001 + 1e-5


def test_torchaos_int8_agrees_with_the_form_to_read(generator) -> None:
    pytest.importorskip("torchao")
    linear = nn.Linear(50, 7, bias=False)
    x = torch.randn(3, 50, generator=generator)
    ours, theirs, rounding = (nn.Sequential(copy.deepcopy(linear)) for _ in range(3))
    convert(ours, INT8)
    convert(theirs, Torchao())
    convert(rounding, Torchao(method="int8 dynamic"))
    assert stored_bytes(theirs) == Torchao().bytes(7, 50)
    assert stored_bytes(rounding) == Torchao(method="int8 dynamic").bytes(7, 50)
    step, their_step, coarse = (
        scale.expand(7, 50)
        for scale in (ours[0].scales, theirs[0].weight.scale, rounding[0].weight.scale)
    )
    exact = F.linear(x.double(), linear.weight.double())
    with torch.no_grad():
        assert ((ours(x) - exact).abs() <= bounds(x, step)).all()
        assert ((theirs(x) - ours(x)).abs() <= bounds(x, step, their_step)).all()
        # A token's largest activation becomes code 63 or more of either sign.
        tokens = (x.double().abs().amax(1, keepdim=True) / 63 / 2) * (
            linear.weight.double().abs().sum(1) + 50 * coarse[:, 0].double()
        )
        assert ((rounding(x) - exact).abs() <= bounds(x, coarse) + tokens).all()
        assert not torch.equal(rounding(x), theirs(x))


def test_torchaos_int4_agrees_with_the_form_to_read(generator) -> None:
    pytest.importorskip("torchao")
    for size, dtype in ((32, torch.float32), (64, torch.bfloat16)):
        linear = nn.Linear(192, 48, bias=False)
        linear.weight.data = torch.randn(48, 192, generator=generator).to(dtype)
        ours, theirs = (nn.Sequential(copy.deepcopy(linear)) for _ in range(2))
        convert(ours, Scheme(bits=4, group_size=size, symmetric=False))
        convert(theirs, Torchao(method="int4", group_size=size))
        told = Torchao(method="int4", group_size=size).bytes(48, 192, dtype)
        assert stored_bytes(theirs) == told
        steps = ours[0].scales.repeat_interleave(size, 1).double()
        with torch.no_grad():
            weight = theirs(torch.eye(192, dtype=dtype)).t().double()  # what it multiplies by
        apart = (weight - linear.weight.double()).abs() / steps
        # bfloat16 rounds scale and zero, too: 2⁻⁸ of numbers up to 8 steps and more.
        assert apart.max() <= (0.501 if dtype == torch.float32 else 0.7)
        if dtype == torch.float32:  # one code of ten thousand may fall on the other side of a tie
            near = (weight - ours[0].weight.double()).abs() < 1e-3 * steps
            assert near.double().mean() > 0.999


# Over seeds the logits move by 0.5, 1.3 and 7 % at most.
@pytest.mark.parametrize(
    ("method", "most"), [("int8", 0.01), ("int8 dynamic", 0.03), ("int4", 0.15)]
)
def test_torchao_quantizes_a_llama(method, most, generator) -> None:
    pytest.importorskip("torchao")
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        qkv_bias=True,
    )
    scheme = Torchao(method=method)
    model = Llama(shape, generator=generator)
    tokens = torch.randint(64, (2, 9), generator=generator)
    with torch.no_grad():
        before = model(tokens).logits
        convert(model, scheme, keep=["lm_head"])
        after = model(tokens).logits
    told = quantized_bytes(shape, scheme, keep=["lm_head"])
    assert told.parameters == stored_bytes(model)
    assert not torch.equal(after, before)
    assert (after - before).norm() < most * before.norm()


def test_torchaos_limits_are_sentences(monkeypatch) -> None:
    with pytest.raises(ValueError, match="method must be one of .* got 'int2'"):
        Torchao(method="int2")
    with pytest.raises(ValueError, match="group_size must be one of 32, 64, 128, got 16"):
        Torchao(group_size=16)
    for shape in ((48, 16), (32, 17)):
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(*shape))
        with pytest.raises(ValueError, match="got .* for 1; choose another group_size or keep"):
            convert(model, Torchao(method="int4"))
        assert type(model[0].weight) is nn.Parameter
        sizes = shape[1], shape[0]
        with pytest.raises(ValueError, match=rf"int4 .* got \({sizes[0]}, {sizes[1]}\) for weight"):
            Torchao(method="int4").bytes(*sizes)
    model = nn.Sequential(nn.Linear(32, 16, device="meta"))
    with pytest.raises(ValueError, match="runs on a CPU here, got 0 on meta; move the model"):
        Torchao(method="int4").check("0", model[0].weight)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(RuntimeError, match="needs torchao, which is not installed; run pip"):
        convert(nn.Sequential(nn.Linear(32, 16)), Torchao())
