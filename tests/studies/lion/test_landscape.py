"""Walks over surfaces: their gradients, their start, and what noise and divergence do."""

import pytest
import torch

from labcore.optim import rules
from labcore.studies.lion import landscape

FORMS = sorted(landscape.SURFACES)


@pytest.mark.parametrize("name", FORMS)
def test_the_named_minimum_is_lowest_and_flat(name: str) -> None:
    surface = landscape.SURFACES[name]
    lowest = torch.tensor(surface.minimum, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(surface.loss(lowest), lowest)
    assert slope.abs().max() == 0
    assert landscape.grid(surface, cells=61)[2].min() >= surface.loss(lowest).item() - 1e-12


@pytest.mark.parametrize("rule", sorted(landscape.RULES))
@pytest.mark.parametrize("name", FORMS)
def test_walk_begins_at_the_start_with_the_losses_of_its_points(rule: str, name: str) -> None:
    surface = landscape.SURFACES[name]
    walk = landscape.trajectory(rule, name, lr=3e-3, steps=37)
    assert walk.points.shape == (38, 2)
    assert walk.points[0].tolist() == list(surface.start)
    assert torch.equal(walk.losses, surface.loss(walk.points))
    assert walk.losses[-1] < walk.losses[0]


def test_one_step_of_gradient_descent_goes_down_the_true_slope() -> None:
    # The bowl's slope at (x, y) is (x, 25 y).
    x, y = landscape.SURFACES["bowl"].start
    walk = landscape.trajectory("gradient descent", "bowl", lr=0.01, steps=1)
    assert walk.points[1].tolist() == pytest.approx([x - 0.01 * x, y - 0.01 * 25 * y], rel=1e-12)


def test_every_step_of_lion_has_the_length_of_the_learning_rate() -> None:
    walk = landscape.trajectory("Lion", "valley", lr=0.013, steps=50)
    steps = walk.points.diff(dim=0).abs()
    assert torch.allclose(steps, torch.full_like(steps, 0.013), rtol=0, atol=1e-12)


def test_noise_follows_the_seed_and_is_shared_by_rules(seed: int) -> None:
    def noisy(rule: str, number: int) -> torch.Tensor:
        return landscape.trajectory(
            rule, "saddle", lr=0.01, noise=0.7, steps=25, seed=number
        ).points

    assert torch.equal(noisy("Adam", seed), noisy("Adam", seed))
    assert not torch.equal(noisy("Adam", seed), noisy("Adam", seed + 1))
    # Adam's and AdamW's first steps see the same gradient and differ by the decay alone.
    first, start = noisy("Adam", seed)[1], noisy("Adam", seed)[0]
    assert torch.allclose(noisy("AdamW", seed)[1], first - 0.01 * 0.01 * start, atol=1e-12)


def test_the_rules_settings_reach_the_rule() -> None:
    slow = landscape.trajectory(rules.momentum, "bowl", lr=0.001, steps=20, beta=0.0)
    plain = landscape.trajectory("gradient descent", "bowl", lr=0.001, steps=20)
    assert torch.equal(slow.points, plain.points)


def test_a_walk_that_diverges_stays_finite() -> None:
    walk = landscape.trajectory("gradient descent", "valley", lr=1.0, steps=60)
    assert torch.isfinite(walk.points).all() and torch.isfinite(walk.losses).all()


def test_grid_rows_run_along_y() -> None:
    surface = landscape.SURFACES["bowl"]
    x, y, loss = landscape.grid(surface, cells=7)
    point = torch.stack([x[2], y[5]])
    assert loss.shape == (7, 7)
    assert loss[5, 2] == surface.loss(point)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rule": "Lyon"}, "rule must be one of .* did you mean 'Lion'"),
        ({"surface": "bowls"}, "surface must be one of .* did you mean 'bowl'"),
        ({"lr": -0.1}, "lr must be a finite number, at least 0, got -0.1"),
        ({"noise": -1.0}, "noise must be a finite number, at least 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_bad_input_says_what_to_do(arguments: dict, sentence: str) -> None:
    asked = {"rule": "Lion", "surface": "bowl", "lr": 0.1, **arguments}
    with pytest.raises(ValueError, match=sentence):
        landscape.trajectory(asked.pop("rule"), asked.pop("surface"), **asked)
