"""The experiments run small: every quantity that a claim asks for is there, and is what it says."""

import math

import pytest

from benchmarks import clipping as cases
from benchmarks.runner import Measurement
from labcore.studies.clipping import exploding
from tests.benchmarks.measurements import asked, by_quantity

RNN, CONV = cases.SMALL.networks.values()


def one_a_seed(found: list[Measurement]) -> dict[str, Measurement]:
    assert all(len(item.samples) == 2 for item in found)
    return by_quantity(found)


def test_growth_has_a_prediction_beside_every_factor() -> None:
    found = one_a_seed(cases.growth_factor(cases.SMALL))
    assert asked("clipping", "growth/factor") <= set(found)
    for item in found.values():
        assert len(item.peers["predicted"]) == 2
        steps = 31 if "RNN" in item.quantity else CONV["depth"] - 1
        for factor, whole in zip(item.samples, item.details["whole way"], strict=True):
            assert factor**steps == pytest.approx(whole, rel=1e-6)


def test_directions_are_taken_at_a_tenth_of_each_norm() -> None:
    found = one_a_seed(cases.direction_by_depth(cases.SMALL))
    wanted = {
        name.replace("conv of 16", "conv of 3") for name in asked("clipping", "direction/depth")
    }
    assert wanted <= set(found)
    for depth in cases.SMALL.depths:
        whole = found[f"cosine/conv of {depth}, global"]
        assert list(whole.samples) == pytest.approx([1, 1])
        assert whole.details["kept"] == pytest.approx([0.1, 0.1], rel=1e-5)
    change = found["local cosine, 3 convolutions minus 2"].samples
    deep, shallow = (found[f"cosine/conv of {d}, local, per layer"].samples for d in (3, 2))
    assert list(change) == [one - other for one, other in zip(deep, shallow, strict=True)]


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("bad-batch/RNN", cases.bad_batch_recurrent),
        ("bad-batch/conv", cases.bad_batch_convolutional),
    ],
)
def test_accuracy_is_lost_seed_by_seed(case: str, function) -> None:
    found = one_a_seed(function(cases.SMALL))
    assert asked("clipping", case) <= set(found)
    for name, item in found.items():
        if name.startswith("accuracy lost"):
            pairs = zip(item.details["clean"], item.details["accuracy"], strict=True)
            assert list(item.samples) == [100 * (clean - lost) for clean, lost in pairs]
            assert len(item.details["losses of the first seed"]) <= cases.SMALL.steps
        if name.startswith("not finite"):
            assert set(item.samples) <= {0.0, 1.0}
    assert found["bad step over its median/SGD, none"].samples[0] > 50


def test_natural_explosions_are_compared_with_global_clipping() -> None:
    found = one_a_seed(cases.natural(cases.SMALL))
    assert asked("clipping", "natural/RNN") <= set(found)
    training = cases.SMALL.training("RNN")
    clean = [exploding.natural("global", "AdamW", seed, **training).accuracy for seed in (0, 1)]
    assert found["accuracy lost/AdamW, none"].details["clean"] == clean


def test_local_is_compared_with_global_seed_by_seed() -> None:
    found = one_a_seed(cases.loud_layer(cases.SMALL))
    assert asked("clipping", "loud-layer/training") <= set(found)
    for item in found.values():
        means = item.details["accuracy"]
        pairs = zip(means["local, per layer"], means["global"], strict=True)
        assert list(item.samples) == [100 * (local - whole) for local, whole in pairs]


def test_healthy_layers_keep_steps_under_local_norm_not_global() -> None:
    found = one_a_seed(cases.loud_first_step(cases.SMALL))
    assert asked("clipping", "loud-layer/first-step") <= set(found)
    for name, item in found.items():
        if "local" in name:
            assert list(item.samples) == pytest.approx([1, 1])
        elif "SGD" in name:
            assert max(item.samples) < 0.5


def test_bad_step_is_measured_against_the_twenty_before_it() -> None:
    moves = [5.0] + [1.0] * 10 + [3.0] * 10 + [40.0, 1.0, 1.0]
    assert cases.bad_step(moves, at=21) == 40 / 2.0
    assert cases.usual_step(moves, at=21) == 2.0


def test_what_was_not_clipped_has_no_cosine() -> None:
    run = exploding.train("conv", lr=1e-3, steps=3, **CONV)
    assert cases.clipped_cosine(run) is None
    clip = exploding.METHODS["value"](1e-4)
    assert 0 < cases.clipped_cosine(exploding.train("conv", clip, lr=1e-3, steps=3, **CONV)) < 1
    assert cases.finite([1.23456, math.nan, math.inf]) == [1.235, None, None]


def test_a_norm_that_overflows_is_wrong_by_all_of_it() -> None:
    found = by_quantity(cases.clip_accuracy(cases.SMALL))
    assert asked("clipping", "clip-accuracy") <= set(found)
    assert found["relative error/1e21"].peers["torch"] == [1.0]
    for scale in cases.SCALES:
        assert found[f"relative error/{scale}"].samples[0] < 1e-6
        assert found[f"norm over limit/{scale}"].samples == [pytest.approx(1, rel=1e-5)]
