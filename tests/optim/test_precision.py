"""Stochastic rounding is unbiased, and low precision computes in float32."""

import math

import pytest
import torch

from labcore.optim import Adafactor, AdamW, Lion
from labcore.optim.precision import compute_dtype, stochastic_round


def test_stochastic_rounding_is_unbiased(seed: int) -> None:
    # x lies a quarter of the way between two neighbors: up with p = 1/4. The count of n draws is
    # binomial; six standard deviations are exceeded with probability 2e-9.
    generator, n = torch.Generator().manual_seed(seed), 200_000
    for sign in (1.0, -1.0):
        x = torch.full((n,), sign * (1 + 2**-7 / 4))
        up = (stochastic_round(x, generator).abs() > 1).sum().item()
        assert abs(up - n / 4) < 6 * math.sqrt(n * 3 / 16)


def test_stochastic_rounding_keeps_what_bfloat16_holds(generator: torch.Generator) -> None:
    exact = torch.randn(500, generator=generator).to(torch.bfloat16)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=torch.bfloat16)
    x = torch.cat([exact, special])
    assert torch.equal(stochastic_round(x.float(), generator), x)
    strange = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert stochastic_round(strange, generator).isnan().all()


def test_stochastic_rounding_takes_strided_tensors(generator: torch.Generator) -> None:
    x = torch.randn(6, 4, generator=generator).to(torch.bfloat16).float().t()
    assert torch.equal(stochastic_round(x, generator), x.to(torch.bfloat16))


def test_computing_is_never_in_low_precision() -> None:
    low = (torch.float16, torch.bfloat16, torch.float32)
    assert {compute_dtype(dtype) for dtype in low} == {torch.float32}
    assert compute_dtype(torch.float64) == torch.float64


def after(cls: type, steps: int, dtype: torch.dtype, **choices) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    optimizer = cls([weight], lr=1e-4, weight_decay=0.0, **choices)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().float()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("cls", [Lion, AdamW, Adafactor])
def test_a_bfloat16_weight_stalls_and_two_choices_free_it(
    cls: type, foreach: bool, seed: int
) -> None:
    bf16, paths = torch.bfloat16, {"foreach": foreach}
    assert torch.equal(after(cls, 50, bf16, **paths), torch.ones(4096))  # the stall
    master = after(cls, 50, bf16, master_weights=True, **paths)
    assert (master - 0.995).abs().max() <= 2**-9  # half a bfloat16 step below 1
    generator = torch.Generator().manual_seed(seed)
    rounded = after(cls, 50, bf16, stochastic_rounding=True, generator=generator, **paths)
    # One rounding has a standard deviation of at most 2^-8 / 2; 50 of them, over 4096 weights.
    sigma = 2**-9 * math.sqrt(50) / math.sqrt(4096)
    assert abs(rounded.mean().item() - 0.995) < 6 * sigma  # false alarm: 2e-9


@pytest.mark.parametrize("state", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("cls", [Lion, AdamW])
def test_float16_weights_stay_finite(cls: type, state: torch.dtype | None) -> None:
    grad = torch.tensor([0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1.0], dtype=torch.float16)
    weight = torch.nn.Parameter(torch.ones_like(grad))
    optimizer = cls([weight], lr=1e-3, weight_decay=0.0, state_dtype=state)
    weight.grad = grad
    optimizer.step()
    assert weight.isfinite().all()
    assert (weight - 1).abs().max() <= 2e-3  # nobody is thrown away on the first step
    naive = torch.nn.Parameter(torch.ones_like(grad))
    naive.grad = grad
    torch.optim.AdamW([naive], lr=1e-3, weight_decay=0.0, foreach=False).step()
    assert naive[0].isnan() and not naive[1].isfinite()  # what the trap looks like in torch


def test_float16_weights_train_unless_their_state_is_float16_too(seed: int) -> None:
    ends = {}
    for state in (None, torch.float16):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
        optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, state_dtype=state)
        sizes = 1e-4 + 1e-3 * torch.rand(64, generator=generator)
        for step in range(20):  # one gradient whose square float16 cannot hold, then none
            weight.grad = (sizes * (step == 0)).half()
            optimizer.step()
        ends[state] = (weight.detach().float() - 1).abs()
    assert ends[None].max() <= 20 * 2e-3
    assert not (ends[torch.float16] <= 1).any()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 7), (2, 3, 1025)], ids=str)
def test_stochastic_rounding_gives_a_neighbor_for_any_shape(shape, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    below = (x.view(torch.int32) & -65536).view(torch.float32)  # toward zero
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    rounded = stochastic_round(x.mT if x.dim() > 1 else x, generator).float()
    rounded = rounded.mT if x.dim() > 1 else rounded
    assert ((rounded == below) | (rounded == above)).all()
    if x.numel() > 1000:
        assert 0.3 < (rounded == above).float().mean() < 0.7


def test_bfloat16_state_no_longer_decays_and_float32_state_does() -> None:
    kept = {}
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = AdamW([weight], lr=0.0, state_dtype=dtype)
        weight.grad = torch.full((1,), 22.0)
        for _ in range(1000):
            optimizer.step()
            weight.grad = torch.zeros(1)
        kept[dtype] = optimizer.state[weight]["exp_avg_sq"].item()
    assert kept[torch.bfloat16] == pytest.approx(0.484, rel=0.01)
    assert kept[torch.float32] == pytest.approx(0.484 * 0.999**999, rel=0.01)
