"""Gradients by group: a partition, exact norms, linear in the loss; the laws that are fitted."""

import math
import re

import pytest
import torch

from labcore.models import Llama, next_token_loss
from labcore.studies.adamw_epsilon import gradient_scale
from labcore.studies.adamw_epsilon.epsilon import predict_attenuation
from tests.models.shapes import CONFIGS


def tokens(generator: torch.Generator, *shape: int, vocabulary: int = 37) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=generator)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_parameter_stands_in_one_group(name: str) -> None:
    model = Llama(CONFIGS[name])
    parts = gradient_scale.groups(model)
    every = parts.pop("all")
    assert set(map(id, every)) == set(map(id, model.parameters()))
    placed = [id(parameter) for group in parts.values() for parameter in group]
    assert sorted(placed) == sorted(map(id, every))
    assert ("head" in parts) == (not CONFIGS[name].tie_word_embeddings)
    assert all(parameter.dim() == 1 for parameter in parts["norms"])
    assert len(parts["norms"]) == 2 * CONFIGS[name].num_hidden_layers + 1


@pytest.mark.parametrize("name", ["plain", "biased", "tied"])
def test_squares_of_groups_add_up_and_match_autograd(name: str, generator: torch.Generator) -> None:
    model = Llama(CONFIGS[name], generator=generator, dtype=torch.float64)
    rows = tokens(generator, 3, 7)
    measured = gradient_scale.gradient_rms(model, rows)
    loss, count = next_token_loss(model, rows)
    gradients = torch.autograd.grad(loss / count, list(model.parameters()))
    by_parameter = dict(zip(map(id, model.parameters()), gradients, strict=True))
    parts = gradient_scale.groups(model)
    sums = {}
    for group, parameters in parts.items():
        flat = torch.cat([by_parameter[id(parameter)].flatten() for parameter in parameters])
        torch.testing.assert_close(measured[group], flat.square().mean().sqrt().item())
        sums[group] = measured[group] ** 2 * flat.numel()
    assert math.isclose(sums.pop("all"), sum(sums.values()), rel_tol=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("scale", [1024.0, 1e-3])
def test_the_rms_is_linear_in_the_loss(scale: float, generator: torch.Generator) -> None:
    model = Llama(CONFIGS["grouped"], generator=generator, dtype=torch.float64)
    rows = tokens(generator, 2, 5)
    plain = gradient_scale.gradient_rms(model, rows)
    scaled = gradient_scale.gradient_rms(model, rows, loss_scale=scale)
    for group, size in plain.items():
        assert math.isclose(scaled[group], scale * size, rel_tol=1e-9)


def test_several_batches_give_the_mean_of_their_squares(generator: torch.Generator) -> None:
    model = Llama(CONFIGS["plain"], generator=generator, dtype=torch.float64)
    rows = tokens(generator, 3, 2, 5)
    together = gradient_scale.gradient_rms(model, rows)
    alone = [gradient_scale.gradient_rms(model, batch) for batch in rows]
    for group, size in together.items():
        mean = sum(each[group] ** 2 for each in alone) / 3
        assert math.isclose(size, math.sqrt(mean), rel_tol=1e-9)


def test_tokens_of_the_wrong_kind_are_named() -> None:
    model = Llama(CONFIGS["plain"])
    with pytest.raises(ValueError, match=re.escape("got torch.float32 (2, 3)")):
        gradient_scale.gradient_rms(model, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=re.escape("[N, B, T], got torch.int64 (3,)")):
        gradient_scale.gradient_rms(model, torch.zeros(3, dtype=torch.int64))


def test_a_power_law_is_found_again(generator: torch.Generator) -> None:
    exponent, factor = torch.randn(2, generator=generator).tolist()
    xs = [3.0, 5.0, 8.0, 40.0]
    found = gradient_scale.fit_power(xs, [math.exp(factor) * x**exponent for x in xs])
    assert found == pytest.approx((exponent, math.exp(factor)), rel=1e-9, abs=1e-9)
    for wrong in (([2.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 2.0])):
        with pytest.raises(ValueError, match=re.escape(f"got {wrong[0]} and {wrong[1]}")):
            gradient_scale.fit_power(*wrong)


def table(rms: torch.Tensor) -> gradient_scale.GradientScale:
    return gradient_scale.GradientScale(
        widths=(16, 32, 64),
        seeds=(0, 1),
        steps=0,
        init="0.02",
        rms={"all": rms},
        parameters=(1, 2, 3),
    )


def test_each_seed_has_its_own_exponent() -> None:
    widths = torch.tensor([16.0, 32.0, 64.0], dtype=torch.float64)
    found = table(torch.stack([widths**-1, 3 * widths**-0.5], dim=1))
    assert found.exponents() == pytest.approx([-1, -0.5])
    with pytest.raises(ValueError, match="group must be one of 'all', got 'head'"):
        found.exponents("head")


def test_a_run_by_width_has_each_seed_and_trains_on() -> None:
    found = gradient_scale.rms_by_width((16, 32), (3, 4), steps=(3, 0), init="0.02")
    assert sorted(found) == [0, 3]
    for steps, measured in found.items():
        assert (measured.steps, measured.widths, measured.seeds) == (steps, (16, 32), (3, 4))
        assert set(measured.rms) == set(gradient_scale.GROUPS)
        assert all(sizes.shape == (2, 2) for sizes in measured.rms.values())
    assert not torch.equal(found[0].rms["all"], found[3].rms["all"])
    # A run is the same whether or not it was measured on its way, and a seed whatever its place.
    again = gradient_scale.rms_by_width((32,), (4,), steps=(1, 3), init="0.02")
    assert again[3].rms["all"].item() == found[3].rms["all"][1, 1].item()
    model = gradient_scale.make(32, 4, init="0.02")
    assert found[0].parameters[1] == sum(p.numel() for p in model.parameters())


def test_the_first_gradient_is_the_one_of_the_first_batch(seed: int) -> None:
    found = gradient_scale.first_gradient(16, seed)
    model = gradient_scale.make(16, seed, init="0.02")
    rows, _ = gradient_scale.batches(seed)(0)
    assert found.shape == (sum(p.numel() for p in model.parameters()),)
    rms = gradient_scale.gradient_rms(model, rows)["all"]
    assert math.isclose(found.double().square().mean().sqrt().item(), rms, rel_tol=1e-6)


def test_fresh_weights_have_the_spread_that_init_says() -> None:
    assert gradient_scale.config(64).initializer_range == 1 / 8
    assert gradient_scale.config(64, init="0.02").initializer_range == 0.02
    with pytest.raises(ValueError, match="init must be one of"):
        gradient_scale.config(64, init="zeros")


def test_a_larger_eps_shrinks_the_update_and_stops_the_run() -> None:
    runs = [gradient_scale.loss_by_eps(16, eps, 0, steps=2) for eps in (1e-8, 1e-3, 1.0)]
    sizes = [run.attenuation["all"] for run in runs]
    assert sizes[0] == pytest.approx(1.0, abs=1e-2)
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert runs[0].loss < runs[2].loss


def test_byte_never_seen_makes_visible_nan_without_eps() -> None:
    """Its row of the embedding has no gradient: 0/0, also in fp32."""
    run = gradient_scale.loss_by_eps(16, 0.0, 0, steps=2)
    assert math.isnan(run.loss)
    assert math.isnan(run.attenuation["all"])


def test_attenuation_is_the_law_when_gradients_have_one_size(
    generator: torch.Generator,
) -> None:
    weights = torch.nn.Parameter(torch.zeros(31, dtype=torch.float64))
    idle = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    signs = torch.randn(31, generator=generator).sign().double()
    optimizer = torch.optim.AdamW([weights, idle], eps=0.7)
    for _ in range(3):
        weights.grad, idle.grad = 0.3 * signs, torch.zeros_like(idle)
        optimizer.step()
    for eps in (0.0, 1e-3, 0.3, 50.0):
        found = gradient_scale.update_attenuation(optimizer, [weights, idle], eps)
        assert math.isclose(found, predict_attenuation(0.3, eps), rel_tol=1e-9)
    assert math.isnan(gradient_scale.update_attenuation(optimizer, [idle], 0.1))


def test_one_number_for_all_gradients_predicts_too_little() -> None:
    """r / (r + eps) is concave in r and the update counts small gradients as much as large ones."""
    weights = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weights.grad = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    optimizer = torch.optim.AdamW([weights])
    optimizer.step()
    measured = gradient_scale.update_attenuation(optimizer, [weights], 0.1)
    assert measured < predict_attenuation(math.sqrt(0.5), 0.1)
