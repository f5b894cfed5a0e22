"""Runs of several lengths are read as curves, and compared where they have one training loss."""

import math
from statistics import fmean

import pytest

from labcore.studies.ghost_norm import comparisons, sweeps
from labcore.studies.ghost_norm.large_batches import SOURCES
from labcore.studies.ghost_norm.sweeps import Lengths


def curve(loss: list[float], accuracy: list[float], updates: tuple[int, ...]) -> Lengths:
    """Two seeds, the second with half the loss and a point more."""
    return Lengths(
        epochs=(20, 40, 80)[: len(loss)],
        updates=updates,
        training_loss=tuple((each, each / 2) for each in loss),
        test_loss=tuple((each + 0.2, each / 2 + 0.2) for each in loss),
        accuracy=tuple((each, each + 0.01) for each in accuracy),
    )


def test_between_is_linear_between_the_first_neighbors() -> None:
    assert sweeps.between([0.0, 2.0, 1.0], [10.0, 20.0, 50.0], 1.5) == pytest.approx(17.5)
    assert sweeps.between([3.0, 3.0], [1.0, 5.0], 3.0) == 1.0
    assert sweeps.between([4.0, 1.0], [0.0, 1.0], 2.0) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="x must lie between 1 and 4, got 5"):
        sweeps.between([4.0, 1.0], [0.0, 1.0], 5.0)


def test_interpolation_is_in_the_logarithm_and_seed_by_seed() -> None:
    runs = curve([1.6, 0.4, 0.1], [0.6, 0.7, 0.8], (100, 400, 1600))
    assert runs.at("accuracy", 0.8) == pytest.approx([0.65, 0.61])
    assert runs.updates_at(0.2) == pytest.approx([800, 400])
    assert runs.at("test_loss", 0.8) == pytest.approx([1.2, 1.0])
    assert runs.after("accuracy", 40) == [0.7, 0.71]
    assert runs.updates_to([0.75, 0.66]) == pytest.approx([800, 200])
    with pytest.raises(ValueError, match="x must lie between"):
        runs.at("accuracy", 3.0)


def test_a_comparison_subtracts_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        ("batch norm", 32): curve([0.8, 0.2, 0.1], [0.7, 0.74, 0.76], (5120, 10240, 20480)),
        ("batch norm", 512): curve([0.8, 0.2, 0.1], [0.66, 0.72, 0.78], (320, 640, 1280)),
        ("ghosts of 32", 512): curve([0.8, 0.2, 0.1], [0.69, 0.75, 0.8], (320, 640, 1280)),
        ("layer norm", 32): curve([0.8, 0.2], [0.6, 0.7], (5120, 10240)),
        ("layer norm", 512): curve([0.8, 0.2], [0.5, 0.6], (320, 640)),
    }
    others = {(kind, batch) for kind in comparisons.NORMS for batch in sweeps.BATCHES}
    found |= dict.fromkeys(others - found.keys(), found["batch norm", 512])

    def lengths(kind: str, batch: int, *, fresh: bool = False) -> Lengths:
        return found[kind, batch]

    monkeypatch.setattr(sweeps, "lengths", lengths)
    monkeypatch.setattr(sweeps, "FRESH_LOSS", 0.3)
    monkeypatch.setattr(comparisons, "EQUAL_LOSSES", (0.4,))
    points, losses = (comparisons.differences(what) for what in ("accuracy", "test_loss"))
    # At a loss of 0.4 the first seed is half-way, in the logarithm; the second is at its start.
    assert points["at training loss 0.4/large minus small"] == pytest.approx([-3, -4])
    assert points["at training loss 0.4/ghosts' own effect"] == pytest.approx([3, 3])
    assert points["at training loss 0.4/layer norm, large minus small"] == pytest.approx([-10, -10])
    assert points["after 80 epochs/ghosts minus small after 20"] == pytest.approx([10, 10])
    assert points["after 40 epochs/large minus small after 20"] == pytest.approx([2, 2])
    assert points["after 80 epochs/large minus small after 40"] == pytest.approx([4, 4])
    assert points["fresh rows, after 20 epochs/ghosts' own effect"] == pytest.approx([3, 3])
    assert losses["after 80 epochs/large minus small after 20"] == pytest.approx([-0.7, -0.35])
    assert points.keys() == losses.keys()
    costs = comparisons.costs("layer norm", 0.3)
    assert costs[32] == [1.0, 1.0] and costs[512] == pytest.approx([1 / 16, 1 / 16])
    updates = comparisons.updates()
    assert updates["to training loss 0.4"] == pytest.approx([1 / 16, 1 / 16])
    # The first seed needs 0.70, a sixth of the way from 0.69 to 0.75.
    assert updates[comparisons.GHOSTS_GOAL][0] == pytest.approx(320 * 2 ** (1 / 6) / 5120)


def test_kinds_and_lengths_are_those_that_can_be_trained() -> None:
    for batch in sweeps.BATCHES:
        for kind in sweeps.sized(batch):
            assert sweeps.regime(kind, batch, 0.1).batch == batch
    assert sweeps.sized(128) == ["batch norm", "ghosts of 8", "ghosts of 32", "layer norm"]
    for kind, batch in [*sweeps.CURVES, *sweeps.FRESH]:
        assert kind in sweeps.sized(batch)
    few, many = sweeps.DIGITS["small batch"], sweeps.DIGITS["all images"]
    assert few.updates == many.updates == 480
    assert many.batch == SOURCES["digits"].rows


def test_the_best_rate_has_the_best_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {0.1: {"accuracy": [0.5, 0.7]}, 0.3: {"accuracy": [0.62, 0.6]}, 1.0: {"accuracy": [0]}}
    monkeypatch.setattr(sweeps, "sweep", lambda kind, batch: rates)
    assert sweeps.best_rate("batch norm", 32) == 0.3
    assert math.isclose(fmean(rates[0.3]["accuracy"]), 0.61)
