"""Gradients by batch: means over joined pieces, and what follows from signal and noise."""

import math
import re

import pytest
import torch

from labcore.models import Llama, next_token_loss
from labcore.studies.adamw_epsilon import gradient_batches, gradient_scale
from tests.models.shapes import CONFIGS


def pieces(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(37, (count, 3, 8), generator=generator)  # 21 predicted tokens each


@pytest.mark.parametrize("name", ["plain", "tied", "grouped"])
def test_a_batch_is_the_mean_of_its_pieces(name: str, generator: torch.Generator) -> None:
    model = Llama(CONFIGS[name], generator=generator, dtype=torch.float64)
    rows = pieces(generator, 6)
    found = gradient_batches.measure(model, rows, joined=(1, 3, 6))
    assert list(found.squares) == [21, 63, 126]
    assert found.batches == {21: 6, 63: 2, 126: 1}
    for many in (1, 3, 6):
        batches = rows.reshape(6 // many, many * 3, 8)
        right = gradient_scale.gradient_rms(model, batches)["all"]
        assert found.rms()[21 * many] == pytest.approx(right, rel=1e-9)
    loss, count = next_token_loss(model, rows.reshape(18, 8))
    whole = torch.autograd.grad(loss / count, list(model.parameters()))
    flat = torch.cat([one.flatten().abs() for one in whole])
    torch.testing.assert_close(found.roots(126).sort().values, flat.sort().values)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_partition_the_model(name: str) -> None:
    model = Llama(CONFIGS[name])
    parts = gradient_batches.layers(model)
    every = parts.pop("all")
    placed = [id(parameter) for part in parts.values() for parameter in part]
    assert sorted(placed) == sorted(map(id, every)) == sorted(map(id, model.parameters()))
    depth = CONFIGS[name].num_hidden_layers
    assert [key for key in parts if key.startswith("layer ")] == [
        f"layer {n + 1}" for n in range(depth)
    ]


def test_signal_and_noise_are_told_apart(generator: torch.Generator) -> None:
    signal, noise = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    sizes = {batch: math.sqrt(signal**2 + noise**2 / batch) for batch in (8, 32, 4096)}
    for batch in (8, 32, 100, 4096, 10**7):
        right = math.sqrt(signal**2 + noise**2 / batch)
        assert gradient_batches.predict_rms(sizes, batch) == pytest.approx(right)
    # A gradient that falls faster than noise can has no signal.
    assert gradient_batches.predict_rms({1: 1.0, 4: 0.4}, 16) < 0.3
    with pytest.raises(ValueError, match=re.escape("at least two batch sizes, got [8]")):
        gradient_batches.predict_rms({8: 1.0}, 16)


def test_measured_noise_falls_as_the_batch_grows(generator: torch.Generator) -> None:
    """Between batches of 1, 4 and 16 pieces of random tokens the RMS about halves each time."""
    model = Llama(CONFIGS["plain"], generator=generator)
    rms = gradient_batches.measure(model, pieces(generator, 64), joined=(1, 4, 16)).rms()
    sizes = [rms[21], rms[84], rms[336]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_eps_leaves_is_a_mean_over_weights_that_move() -> None:
    roots = torch.tensor([0.0, 1e-8, 3e-8, 1.0], dtype=torch.float64)
    kept = gradient_batches.share_kept(roots, 1e-8)
    assert kept == pytest.approx((0.5 + 0.75 + 1) / 3)
    assert gradient_batches.share_kept(roots, 0.0) == 1.0
    assert math.isnan(gradient_batches.share_kept(roots[:1], 1e-8))


def test_each_weight_stands_in_one_bin(generator: torch.Generator) -> None:
    exponents = -13 + 13 * torch.rand(997, generator=generator, dtype=torch.float64)
    shares = gradient_batches.histogram(10**exponents)
    assert len(shares) == len(gradient_batches.BINS) - 1
    assert sum(shares) == pytest.approx(1)
    low, high = gradient_batches.BINS[20], gradient_batches.BINS[21]
    inside = ((exponents >= low) & (exponents < high)).double().mean().item()
    assert shares[20] == pytest.approx(inside)
    ends = gradient_batches.histogram([0.0, 1e-40, 5.0])
    assert ends[0] == pytest.approx(2 / 3) and ends[-1] == pytest.approx(1 / 3)


def test_a_description_has_each_layer_and_eps(generator: torch.Generator) -> None:
    roots = {"all": torch.rand(50, generator=generator, dtype=torch.float64) + 1e-3}
    found = gradient_batches.sizes_of(roots, (1e-8, 0.5))["all"]
    assert found["below"] == {"1e-08": 0.0, "0.5": pytest.approx((roots["all"] < 0.5).sum() / 50)}
    assert found["kept"]["1e-08"] > 0.999 > found["kept"]["0.5"] > 0
    assert found["rms"] == pytest.approx(roots["all"].square().mean().sqrt().item())


def test_wrong_pieces_are_named() -> None:
    model = Llama(CONFIGS["plain"])
    with pytest.raises(ValueError, match=re.escape("got torch.int64 (3, 8)")):
        gradient_batches.measure(model, torch.zeros(3, 8, dtype=torch.int64), joined=(1,))
    with pytest.raises(ValueError, match="3 pieces must be a multiple of joined, got 2"):
        gradient_batches.measure(model, torch.zeros(3, 2, 8, dtype=torch.int64), joined=(1, 2))
