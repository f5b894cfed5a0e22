"""Clipping under a GradScaler: what the right recipes do and what the wrong ones do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from labcore.clipping import scaling

SCALE = 65536.0


def setting() -> tuple[Tensor, torch.optim.Optimizer, GradScaler]:
    weight = nn.Parameter(torch.zeros(2))
    return weight, torch.optim.SGD([weight], lr=1.0), GradScaler("cpu", init_scale=SCALE)


def loss(weight: Tensor, norm: float) -> Tensor:
    """Its gradient has this norm."""
    return norm * (0.6 * weight[0] + 0.8 * weight[1])


@pytest.mark.parametrize("norm", [0.25, 5.0, 1e6])
def test_the_right_order_clips_the_true_gradient(norm: float) -> None:
    weight, optimizer, scaler = setting()
    clipped = scaling.clipped_step(loss(weight, norm), optimizer, scaler, weight, 1.0)
    assert clipped.norm.item() == pytest.approx(norm)
    assert weight.norm().item() == pytest.approx(min(norm, 1.0))
    assert weight.grad is None


def test_clipping_before_unscaling_shrinks_the_step_by_the_scale() -> None:
    weight, optimizer, scaler = setting()
    function = scaling.step_clipped_before_unscaling
    clipped = function(loss(weight, 5.0), optimizer, scaler, weight, 1.0)
    assert clipped.norm.item() == pytest.approx(5 * SCALE)
    assert weight.norm().item() == pytest.approx(1 / SCALE)  # 1.5e-5 for 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_an_overflow_leaves_the_step_out_and_lowers_the_scale(norm: float) -> None:
    weight, optimizer, scaler = setting()
    clipped = scaling.clipped_step(loss(weight, norm), optimizer, scaler, weight, 1.0)
    assert not clipped.finite
    assert (weight == 0).all() and scaler.get_scale() == SCALE / 2
    scaling.clipped_step(loss(weight, 5.0), optimizer, scaler, weight, 1.0)
    assert weight.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("norm", [50.0, math.inf])
def test_a_spike_is_skipped_and_the_next_step_goes_on(norm: float) -> None:
    weight, optimizer, scaler = setting()
    step = scaling.step_or_skip
    assert not step(loss(weight, norm), optimizer, scaler, weight, 1.0, spike=10.0)
    assert (weight == 0).all()
    assert scaler.get_scale() == (SCALE if norm == 50 else SCALE / 2)
    assert step(loss(weight, 5.0), optimizer, scaler, weight, 1.0, spike=10.0)
    assert weight.norm().item() == pytest.approx(1.0)


def test_a_skip_without_update_breaks_the_next_step() -> None:
    weight, optimizer, scaler = setting()
    step = scaling.step_or_skip_without_update
    assert step(loss(weight, 5.0), optimizer, scaler, weight, 1.0, spike=10.0)
    assert not step(loss(weight, math.inf), optimizer, scaler, weight, 1.0, spike=10.0)
    assert scaler.get_scale() == SCALE
    with pytest.raises(RuntimeError, match="already been called"):
        step(loss(weight, 5.0), optimizer, scaler, weight, 1.0, spike=10.0)


@pytest.mark.parametrize("spike", [0.0, -1.0, math.nan])
def test_a_spike_that_means_nothing_is_refused(spike: float) -> None:
    weight, optimizer, scaler = setting()
    with pytest.raises(ValueError, match="spike"):
        scaling.step_or_skip(loss(weight, 5.0), optimizer, scaler, weight, 1.0, spike=spike)
