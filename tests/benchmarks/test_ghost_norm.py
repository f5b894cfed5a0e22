"""The experiments run small: what a claim asks for is there, and means what it says."""

import pytest

from benchmarks import ghost_norm as cases
from benchmarks.ghost_norm import SMALL
from labcore.studies.ghost_norm import large_batches
from tests.benchmarks.measurements import asked, by_quantity


def test_tuning_takes_the_best_rate_of_each_kind() -> None:
    found = by_quantity(cases.tuning(SMALL))
    assert len(found) == 4
    for item in found.values():
        grid = item.details["accuracy"]
        best = max(grid, key=lambda rate, grid=grid: sum(grid[rate]))
        assert item.details["best"] == float(best)
        assert item.samples == grid[best]


def test_the_study_took_the_rates_that_a_record_chose() -> None:
    from labcore import records

    kinds = {"small batch": large_batches.LEARNING_RATE}
    kinds["small batch, without normalization"] = large_batches.PLAIN_LEARNING_RATE
    for name, rate in kinds.items():
        quantity = f"validation accuracy/{name}"
        assert records.find("ghost_norm", "digits/tuning", quantity).details["best"] == rate


def test_regimes_are_compared_seed_by_seed() -> None:
    found = by_quantity(cases.regimes(SMALL))
    assert asked("ghost_norm", "digits/regimes") <= set(found)
    small = found["accuracy/small batch"].samples
    for name in SMALL.regimes:
        assert {f"trace/{name}", f"rise/{name}"} <= set(found)
        if name != "small batch":
            pairs = zip(found[f"accuracy/{name}"].samples, small, strict=True)
            points = found[f"minus small batch/{name}"].samples
            assert points == [100 * (a - b) for a, b in pairs]
    for name, (ghosts, whole) in cases.OWN_EFFECT.items():
        assert SMALL.regimes[ghosts].ghost and not SMALL.regimes[whole].ghost
        samples = (found[f"accuracy/{each}"].samples for each in (ghosts, whole))
        effect = [100 * (a - b) for a, b in zip(*samples, strict=True)]
        assert found[f"ghosts' own effect/{name}"].samples == effect
    run = large_batches.train(SMALL.regimes["large, root rate, ghosts"], 1)
    assert found["accuracy/large, root rate, ghosts"].samples[1] == run.accuracy


def test_plain_network_is_compared_with_its_own_small_batch() -> None:
    found = by_quantity(cases.without_normalization(SMALL))
    assert asked("ghost_norm", "digits/plain") <= set(found)
    run = large_batches.train(SMALL.plain_regimes["small batch"], 0)
    assert found["accuracy/small batch"].samples[0] == run.accuracy


def test_steps_are_counted_to_the_target_and_images_follow() -> None:
    found = by_quantity(cases.convergence(SMALL))
    assert asked("ghost_norm", "digits/convergence") <= set(found)
    for batch in SMALL.batches:
        item = found[f"steps/batch {batch}"]
        assert item.details["images"] == [batch * step for step in item.samples]
        regime = large_batches.sweep_regime(batch, batch, epochs=SMALL.epochs)
        run = large_batches.train(regime, 1, check_every=1)
        arrived = run.steps_to(SMALL.target)
        assert item.samples[1] == (regime.updates + 1 if arrived is None else arrived)
    steps, images = (found[f"{unit} ratio/batch 512 over 32"] for unit in ("steps", "images"))
    assert images.samples == pytest.approx([16 * ratio for ratio in steps.samples])


def test_sweep_has_every_ghost_up_to_the_batch_and_both_budgets() -> None:
    found = by_quantity(cases.sweep(SMALL))
    assert len(found) == 4
    points = found["accuracy/batch 512, equal updates"].details["ghosts"]
    assert set(points) == {"8", "32", "512"}
    assert set(found["accuracy/batch 32, equal epochs"].details["ghosts"]) == {"8", "32"}
    for point in points.values():
        assert len(point["accuracy"]) == 2
        assert len(point["steps"]) == len(point["loss"])
        assert point["steps"][-1] == 16
    regime = large_batches.sweep_regime(512, 8, many=True, epochs=SMALL.epochs)
    run = large_batches.train(regime, 1)
    assert points["8"]["accuracy"][1] == run.accuracy


def test_variance_has_a_row_a_seed_and_none_is_left_at_the_whole() -> None:
    found = by_quantity(cases.gradient_variance(SMALL))
    assert asked("ghost_norm", "gradients/variance") <= set(found)
    ratio, last = "variance ratio, batch 256 over 32", len(cases.GRADIENT_BATCHES) - 1
    for name in cases.GRADIENT_KINDS:
        details = found[f"{ratio}/{name}"].details
        assert details["predicted"] == pytest.approx([1 / 15])
        left = max(row[last] / row[2] for row in details["variance"])
        assert (left > 1e-6) == (name == "ghosts of 32")
    # At 32 images a batch is one ghost: the same gradients.
    both = [found[f"{ratio}/{n}"].details for n in ("batch normalization", "ghosts of 32")]
    assert both[0]["variance"][0][:3] == both[1]["variance"][0][:3]


def test_times_are_ratios_within_a_repetition() -> None:
    found = by_quantity(cases.throughput(SMALL))
    assert asked("ghost_norm", "throughput") <= set(found)
    name = "time ratio, batch 512 over 32"
    small, large = (found[f"images a second/batch {b}"].samples for b in (32, 512))
    epoch = found[f"{name}/of an epoch"].samples  # one round: its ratio is the medians'
    assert epoch == pytest.approx([a / b for a, b in zip(small, large, strict=True)])
    assert len(found[f"{name}/to the training loss"].samples) == 2
