"""How the study chooses and reports: apart from each other, and the same for both optimizers."""

import functools

import pytest

from labcore.studies import digits_runs
from labcore.studies.lion import tuning


def test_seeds_that_choose_are_not_seeds_that_report() -> None:
    assert not set(tuning.TUNING_SEEDS) & set(tuning.REPORT_SEEDS)


def test_every_batch_size_sees_the_same_number_of_images() -> None:
    assert len({batch * steps for batch, steps in tuning.STEPS.items()}) == 1
    for batch in tuning.STEPS:
        config = tuning.config(batch, checks=60)
        assert (config.batch, config.steps) == (batch, tuning.STEPS[batch])
        assert 60 <= config.steps / config.check_every < 120


def test_a_report_uses_the_setting_and_the_seeds_in_their_order() -> None:
    report = functools.partial(tuning.report, "Lion", batch=64, steps=9)
    setting = digits_runs.Setting(lr=0.01, weight_decay=0.5)
    both = report(setting, seeds=(5, 2))
    assert [run.losses for run in both] == [
        report(setting, seeds=(seed,))[0].losses for seed in (5, 2)
    ]
    other = digits_runs.Setting(lr=0.01, weight_decay=0.0)
    assert report(other, seeds=(5,))[0].checks != both[0].checks


def test_a_run_that_never_arrives_counts_one_step_more() -> None:
    setting = digits_runs.Setting(lr=1e-6, weight_decay=0.0)
    runs = tuning.report("Lion", setting, 64, seeds=(1,), steps=9)
    assert tuning.steps_to_target(runs) == [10]
    assert tuning.steps_to_target(runs, target=100.0) == [0]


def test_tuning_sees_no_reporting_seed_and_no_test_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def watched(optimizer, config, data, **grid):
        seen.update(images=len(data.train_x) + len(data.test_x), seeds=grid["seeds"])
        return "swept"

    monkeypatch.setattr(tuning, "sweep", watched)
    tuning.tuned.cache_clear()
    assert tuning.tuned("AdamW", 256) == "swept"
    tuning.tuned.cache_clear()
    assert seen == {"images": len(tuning.digits().train_x), "seeds": tuning.TUNING_SEEDS}


def test_unknown_names_and_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batch must be one of 16, 64, 256, got 65"):
        tuning.config(65)
    with pytest.raises(ValueError, match="optimizer must be one of .* got 'lion'"):
        tuning.tuned("lion", 64)
