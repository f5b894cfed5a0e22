"""The traps of a sign update, as laws."""

import functools

import pytest
import torch

from labcore.optim import AdamW, Lion
from labcore.studies.lion import traps


def test_lion_drifts_after_its_gradient_vanishes_and_adamw_rests() -> None:
    lion = traps.drift(functools.partial(Lion, lr=0.01), steps=400)
    adamw = traps.drift(functools.partial(AdamW, lr=0.01, weight_decay=0.0), steps=400)
    # Every one of the 400 steps has the length of the learning rate.
    assert lion[-1].item() == pytest.approx(1 - 400 * 0.01, abs=1e-4)
    assert (adamw[200:] - adamw[200]).abs().max() < 1e-5
    assert abs(adamw[-1].item() - 1) < 0.1


def test_drift_never_ends_because_momentum_never_reaches_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Lion([weight], lr=0.01)
    weight.grad = torch.ones(1)
    optimizer.step()
    momentum = optimizer.state[weight]["exp_avg"]
    for _ in range(12_000):
        momentum.lerp_(torch.zeros(1), 1 - 0.99)
    assert momentum.item() == 50 * 2.0**-149
    weight.grad, before = torch.zeros(1), weight.item()
    optimizer.step()
    assert weight.item() == pytest.approx(before - 0.01)


def test_a_nan_is_hidden_by_the_naive_sign_and_shown_by_ours() -> None:
    naive = traps.spoil_one_gradient(functools.partial(traps.NaiveLion, lr=0.02), at=10, steps=50)
    ours = traps.spoil_one_gradient(functools.partial(Lion, lr=0.02), at=10, steps=50)
    assert torch.isfinite(naive).all()
    assert (naive[11:, 0] == naive[10, 0]).all(), "the spoiled weight freezes in silence"
    assert (naive[12:, 1] != naive[11:-1, 1]).all(), "its neighbor goes on"
    assert torch.isnan(ours[11:, 0]).all()
    assert torch.equal(ours[:, 1], naive[:, 1])
    assert torch.equal(ours[:11, 0], naive[:11, 0])


def test_the_other_policies_raise_or_skip() -> None:
    raising = functools.partial(Lion, lr=0.02, nonfinite="raise")
    with pytest.raises(RuntimeError, match="(?i)nan|finite"):
        traps.spoil_one_gradient(raising, at=3, steps=5)
    skipping = functools.partial(Lion, lr=0.02, nonfinite="skip")
    path = traps.spoil_one_gradient(skipping, at=3, steps=9)
    assert torch.equal(path[3], path[4]) and torch.isfinite(path).all()
    assert (path[5] != path[4]).all()


def test_a_bfloat16_weight_stalls_and_both_remedies_move_it(seed: int) -> None:
    plain = functools.partial(Lion, lr=1e-4)
    stalled = traps.constant_pull(plain, dtype=torch.bfloat16, steps=300)
    assert (stalled == 1.0).all()
    expected = 1 - 300 * 1e-4
    free = traps.constant_pull(plain, dtype=torch.float32, steps=300)[-1].item()
    assert free == pytest.approx(expected, abs=1e-4)
    master = functools.partial(Lion, lr=1e-4, master_weights=True)
    moved = traps.constant_pull(master, dtype=torch.bfloat16, steps=300)[-1].item()
    assert moved == pytest.approx(expected, abs=2**-8)
    # Stochastic rounding is right on average: 300 steps of 1e-4 are 7.7 spacings of 2**-8, with a
    # standard deviation of at most sqrt(300 * p) = 2.8 of them; six of those is 17.
    generator = torch.Generator().manual_seed(seed)
    chance = functools.partial(Lion, lr=1e-4, stochastic_rounding=True, generator=generator)
    moved = traps.constant_pull(chance, dtype=torch.bfloat16, steps=300)[-1].item()
    assert abs(moved - expected) < 17 * 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lr", [3e-5, 2e-4, 1e-3, 0.05])
def test_predicted_share_of_moved_weights_matches_the_measured(
    dtype: torch.dtype, lr: float, generator: torch.Generator
) -> None:
    weights = (0.2 * torch.randn(4001, generator=generator)).to(dtype)
    measured = traps.moved_fraction(weights, lr)
    # A weight at a power of two has half the spacing below it: few weights, a small difference.
    assert traps.predict_moved_fraction(weights, lr, dtype) == pytest.approx(measured, abs=0.02)


def test_a_weight_path_keeps_every_step_and_the_start() -> None:
    start = torch.tensor([2.0, -3.0, 0.5])
    path = traps.weight_path(
        functools.partial(torch.optim.SGD, lr=0.5), lambda _, w: w, start=start, steps=4
    )
    expected = start.double() * 0.5 ** torch.arange(5, dtype=torch.float64)[:, None]
    assert torch.equal(path, expected)
    assert start.tolist() == [2.0, -3.0, 0.5]


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="start must be floating point"):
        traps.weight_path(Lion, lambda _, w: w, start=torch.ones(2, dtype=torch.int64), steps=1)
    with pytest.raises(ValueError, match="lr must be a finite number above 0"):
        traps.moved_fraction(torch.ones(3), 0.0)
