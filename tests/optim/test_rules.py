"""The rules follow torch's optimizers in float64, and never change what they are given."""

import math

import pytest
import torch

from labcore.optim import (
    adafactor,
    adagrad,
    adam,
    adamw,
    gradient_descent,
    lion,
    momentum,
    rmsprop,
    sm3,
)
from labcore.optim.rules import sign_or_nan

PEERS = {
    "gradient_descent": (gradient_descent, lambda p: torch.optim.SGD(p, lr=0.01)),
    "momentum": (momentum, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "adagrad": (adagrad, lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-10)),
    "rmsprop": (rmsprop, lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, eps=1e-8)),
    "adam": (adam, lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (adamw, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_rule_follows_its_torch_peer_for_50_steps(name: str, generator: torch.Generator) -> None:
    rule, make = PEERS[name]
    param = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    peer = param.clone().requires_grad_()
    optimizer, state = make([peer]), {}
    for _ in range(50):
        grad = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        param, state = rule(param, grad, state, lr=0.01)
        peer.grad = grad
        optimizer.step()
    assert (param - peer).abs().max() < 1e-12


@pytest.mark.parametrize("rule", [r for r, _ in PEERS.values()] + [lion, adafactor, sm3])
def test_a_rule_changes_nothing_in_place(rule, generator: torch.Generator) -> None:
    param, grad = torch.randn(2, 6, generator=generator)
    _, state = rule(param, grad, {}, lr=0.1)
    before = {name: torch.as_tensor(value).clone() for name, value in state.items()}
    kept = param.clone(), grad.clone()
    rule(param, grad, state, lr=0.1)
    assert torch.equal(param, kept[0]) and torch.equal(grad, kept[1])
    assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in before.items())


def test_every_place_of_eps_is_what_its_formula_says(
    generator: torch.Generator,
) -> None:
    param = torch.zeros(64, dtype=torch.float64)
    grad = torch.randn(64, generator=generator, dtype=torch.float64) * 1e-3
    # On the first step m̂ = g and v̂ = g², whatever the betas.
    forms = {
        "outside": ({"eps": 0.02}, grad / (grad.abs() + 0.02)),
        "root": ({"eps": 0.02, "eps_root": 3e-4}, grad / ((grad**2 + 3e-4).sqrt() + 0.02)),
        "inside": ({"eps": 3e-4, "eps_mode": "inside"}, grad / (grad**2 + 3e-4).sqrt()),
        "atan2": ({"eps_mode": "atan2"}, torch.atan2(grad, grad.abs())),
    }
    for name, (choices, update) in forms.items():
        new, _ = adamw(param, grad, {}, lr=0.5, weight_decay=0.0, **choices)
        assert (new + 0.5 * update).abs().max() < 1e-12, name


def test_atan2_does_not_see_the_scale_of_the_gradient(generator: torch.Generator) -> None:
    param = torch.zeros(32, dtype=torch.float64)
    grads = torch.randn(9, 32, generator=generator, dtype=torch.float64)
    ends = {}
    for mode in ("atan2", "outside"):
        for scale in (1.0, 1e-12):
            new, state = param, {}
            for grad in grads:
                new, state = adamw(
                    new, scale * grad, state, lr=0.1, weight_decay=0.0, eps_mode=mode
                )
            ends[mode, scale] = new
    assert (ends["atan2", 1.0] - ends["atan2", 1e-12]).abs().max() < 1e-12
    assert ends["outside", 1e-12].abs().max() < 1e-3 * ends["outside", 1.0].abs().max()


def test_float16_arithmetic_falls_into_the_epsilon_trap() -> None:
    weight = torch.ones(3, dtype=torch.float16)
    zero, _ = adamw(weight, torch.zeros(3, dtype=torch.float16), {}, lr=1e-3, weight_decay=0.0)
    assert zero.isnan().all()  # 0 / (0 + eps), and eps = 1e-8 is 0 in float16
    small = torch.tensor([1e-6, 1e-5, 1e-4], dtype=torch.float16)
    moved, _ = adamw(weight, small, {}, lr=1e-3, weight_decay=0.0)
    assert not moved.isfinite().any()
    rescued, _ = adamw(weight, small, {}, lr=1e-3, weight_decay=0.0, eps=1e-6)
    assert (rescued - 1).abs().max() > 0.05  # finite, and fifty times too far


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["outside", "inside", "atan2"])
def test_adamw_shows_a_gradient_that_is_not_finite(bad: float, mode: str) -> None:
    grad = torch.tensor([1.0, bad, -1.0])
    new, _ = adamw(torch.ones(3), grad, {}, lr=0.1, eps_mode=mode)
    assert new.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_lion_shows_a_gradient_that_is_not_finite(bad: float) -> None:
    new, _ = lion(torch.ones(3), torch.tensor([1.0, bad, -1.0]), {}, lr=0.1)
    assert new.isnan().tolist() == [False, True, False]
    assert torch.sign(torch.tensor(math.nan)) == 0  # the trap itself


def test_sign_or_nan_is_sign_where_finite(generator: torch.Generator) -> None:
    x = torch.cat([torch.randn(100, generator=generator), torch.tensor([0.0, -0.0, 1e-45, -1e-45])])
    assert torch.equal(sign_or_nan(x), torch.sign(x))


def test_decay_acts_on_the_weight_alone(generator: torch.Generator) -> None:
    param, grad = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    for rule in (lion, adamw):
        plain, state = rule(param, grad, {}, lr=0.1, weight_decay=0.0)
        decayed, other = rule(param, grad, {}, lr=0.1, weight_decay=0.3)
        assert (plain - decayed - 0.1 * 0.3 * param).abs().max() < 1e-12
        assert torch.equal(state["exp_avg"], other["exp_avg"])


def test_an_unknown_eps_mode_is_named() -> None:
    with pytest.raises(ValueError, match="eps_mode must be one of .*got 'insied'.*'inside'"):
        adamw(torch.ones(1), torch.ones(1), {}, lr=0.1, eps_mode="insied")
