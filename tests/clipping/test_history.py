"""AutoClip and ZClip: their formulas, the authors' package, NaN, windows and resuming."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import zclip
from torch import Tensor, nn

from labcore.clipping import AutoClip, ZClip


def norms_of(seed: int, steps: int = 120) -> list[float]:
    """Slowly falling norms with spikes."""
    dice = random.Random(seed)
    plain = [3 * 0.995**step * dice.lognormvariate(0, 0.15) for step in range(steps)]
    found = [norm * (20 if dice.random() < 0.05 and i > 30 else 1) for i, norm in enumerate(plain)]
    if steps > 35:
        found[35] = 20 * plain[35]  # one for sure: of 100 seeds one draws none
    return found


def parameter(norm: float) -> Tensor:
    """A gradient of that norm."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.grad = torch.tensor([0.1, -0.7, 0.5, 0.5], dtype=torch.float64) * norm
    return param


@pytest.mark.parametrize("percentile", [0.0, 37.5, 100.0])
@pytest.mark.parametrize("window", [None, 7])
def test_autoclip_is_the_percentile_of_the_norms_so_far(
    percentile: float, window: int | None, seed: int
) -> None:
    clipper, seen = AutoClip(percentile, window=window), []
    norms = norms_of(seed, 300 if window is None else 40)
    for step, norm in enumerate(norms):
        seen.append(norm)
        param = parameter(norm)
        clipped = clipper.clip(param)
        if step % 7 == 0 or step > len(norms) - 5:
            counted = seen[-window:] if window else seen
            limit = np.percentile(counted, percentile)
            assert clipper.threshold().item() == pytest.approx(limit)
            assert clipped.norm.item() == pytest.approx(norm)
            assert param.grad.norm().item() == pytest.approx(min(norm, limit))
            assert clipper.history.tolist() == pytest.approx(counted)


def test_autoclip_forgets_what_was_not_finite() -> None:
    clipper = AutoClip(50.0, nonfinite="skip")
    assert clipper.threshold().item() == math.inf
    clipper.clip(parameter(math.nan))
    assert clipper.threshold().item() == math.inf
    for norm in (1.0, math.inf, 3.0):
        clipper.clip(parameter(norm))
    assert clipper.threshold().item() == pytest.approx(2.0)
    raising = AutoClip()
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        raising.clip(parameter(math.nan))
    assert len(raising.history) == 0


@pytest.mark.parametrize("window", [None, 5, 400])
def test_autoclip_resumes(window: int | None, seed: int) -> None:
    norms = norms_of(seed, 310)
    one, other = AutoClip(20.0, window=window), AutoClip(20.0, window=window)
    for norm in norms[:280]:
        one.clip(parameter(norm))
    other.load_state_dict(one.state_dict())
    for norm in norms[280:]:
        first, second = one.clip(parameter(norm)), other.clip(parameter(norm))
        assert torch.equal(first.coefficients, second.coefficients)


@pytest.mark.parametrize("max_norm", [math.inf, 4.0])
@pytest.mark.parametrize(("z", "alpha", "warmup"), [(2.5, 0.97, 25), (1.0, 0.8, 5)])
def test_zclip_is_its_authors_package(
    z: float, alpha: float, warmup: int, max_norm: float, seed: int
) -> None:
    ours = ZClip(z, alpha, warmup=warmup, max_norm=max_norm)
    theirs = zclip.ZClip(
        alpha=alpha,
        z_thresh=z,
        max_grad_norm=None if max_norm == math.inf else max_norm,
        warmup_steps=warmup,
    )
    spikes = 0
    for step, norm in enumerate(norms_of(seed)):
        param, model = parameter(norm), nn.Linear(4, 1, bias=False).double()
        model.weight.grad = param.grad[None].clone()
        clipped = ours.clip(param)
        theirs.step(model)
        torch.testing.assert_close(param.grad, model.weight.grad[0], rtol=3e-6, atol=0)
        spikes += bool(clipped.coefficients < 1)
        if step >= warmup:
            assert ours.mean.item() == pytest.approx(theirs.mean, rel=1e-6)
            assert ours.variance.item() == pytest.approx(theirs.var, rel=1e-5)
    assert spikes > 0


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("at", [3, 60])
def test_a_nan_does_not_poison_zclip_as_it_does_the_package(
    policy: str, at: int, seed: int
) -> None:
    ours, clean = ZClip(nonfinite=policy), ZClip()
    theirs = zclip.ZClip(max_grad_norm=None)
    for step, norm in enumerate(norms_of(seed)):
        if step == at:
            assert not ours.clip(parameter(math.nan)).finite
            model = nn.Linear(4, 1)
            model.weight.grad = torch.full((1, 4), math.nan)
            theirs.step(model)
        expected = clean.clip(parameter(norm))
        assert torch.equal(ours.clip(parameter(norm)).coefficients, expected.coefficients)
        model = nn.Linear(4, 1)
        model.weight.grad = parameter(norm).grad[None].float()
        theirs.step(model)
    assert torch.equal(ours.mean, clean.mean)
    assert math.isnan(theirs.mean)


def test_an_infinite_norm_does_not_enter_the_mean_either(seed: int) -> None:
    clipper = ZClip(nonfinite="skip", warmup=2)
    for norm in (1.0, 1.1, math.inf, 0.9):
        clipper.clip(parameter(norm))
    assert 0.9 < clipper.mean.item() < 1.1 and math.isfinite(clipper.variance.item())


def test_zclip_resumes(seed: int) -> None:
    norms = norms_of(seed)
    for until in (10, 70):
        one, other = ZClip(), ZClip()
        for norm in norms[:until]:
            one.clip(parameter(norm))
        other.load_state_dict(one.state_dict())
        for norm in norms[until:]:
            first, second = one.clip(parameter(norm)), other.clip(parameter(norm))
            assert torch.equal(first.coefficients, second.coefficients)


def test_zclip_in_warm_up_only_keeps_the_fixed_limit(seed: int) -> None:
    clipper = ZClip(warmup=10, max_norm=2.0)
    norms = [5.0, 1.0, 300.0, *norms_of(seed)[:7]]
    for norm in norms:
        assert clipper.clip(parameter(norm)).coefficients.item() == pytest.approx(min(1, 2 / norm))
    assert clipper.mean.item() == pytest.approx(np.mean(norms))
    assert clipper.variance.item() == pytest.approx(np.var(norms))


@pytest.mark.parametrize("wrong", [{"percentile": -1}, {"percentile": 101}, {"window": 0}])
def test_autoclip_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="percentile|window"):
        AutoClip(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"z": 0}, {"alpha": 1.0}, {"warmup": 0}, {"max_norm": -1.0}, {"nonfinite": "drop"}]
)
def test_zclip_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ZClip(**wrong)  # type: ignore[arg-type]
