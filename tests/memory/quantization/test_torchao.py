"""torchao beside the form to read."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labcore.memory.quantization.conversion import convert, quantized_bytes, stored_bytes
from labcore.memory.quantization.scheme import INT8, Scheme
from labcore.memory.quantization.torchao import Torchao
from labcore.models import Llama, LlamaConfig


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
