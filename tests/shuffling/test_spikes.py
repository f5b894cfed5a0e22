"""Spikes are found at their step with their data, and noise seldom looks like one."""

import json
import math
import random
import statistics

import pytest
import torch

from labcore.shuffling import LossSpikeDetector, Spike


def run(losses, **settings) -> LossSpikeDetector:
    detector = LossSpikeDetector(**settings)
    for step, loss in enumerate(losses):
        detector.update(step, loss, provenance={"rows": [step]})
    return detector


def noise(count: int, seed: int, level: float = 3.0, sigma: float = 0.1) -> list[float]:
    dice = random.Random(seed)
    return [dice.gauss(level, sigma) for _ in range(count)]


def test_false_alarms_on_normal_noise_stay_below_the_stated_rate(seed: int) -> None:
    # A baseline of 50 normal losses is itself uncertain: one in 2,500 independent losses is more
    # than 6 MADs above it (4.2 million simulated). 20,000 make 8 of those on average, with a
    # standard deviation of 3 and at most 16 in 150 simulated runs; 40 is 11 deviations away.
    assert len(run(noise(20_000, seed), floor=0.0).spikes) < 40


def test_a_planted_spike_is_found_at_its_step_with_its_rows(seed: int) -> None:
    losses = noise(400, seed)
    losses[123] += 4.0
    losses[300:310] = [loss + 4.0 for loss in losses[300:310]]
    losses[305] += 1.0
    found = run(losses, threshold=12.0).spikes
    assert [(spike.step, spike.length) for spike in found] == [(123, 1), (300, 10)]
    assert found[0].provenance == {"rows": [123]} and found[0].loss == losses[123]
    assert (found[1].peak_step, found[1].peak) == (305, losses[305])
    before = losses[250:300]
    median = statistics.median(before)
    mad = statistics.median(abs(loss - median) for loss in before)
    assert (found[1].baseline, found[1].mad) == (median, mad)
    assert found[1].score == (losses[300] - median) / mad > 12


def test_update_answers_at_the_first_step_of_an_event_alone() -> None:
    detector = LossSpikeDetector(window=4, patience=2)
    answers = [detector.update(i, x) for i, x in enumerate([1.0] * 4 + [9, 9, 1, 9, 1, 1, 9])]
    assert [i for i, spike in enumerate(answers) if spike] == [4, 10]
    # One quiet step is below the patience: the second peak belongs to the first event.
    assert [(spike.step, spike.length) for spike in detector.spikes] == [(4, 4), (10, 1)]
    assert isinstance(answers[4], Spike) and answers[4].length == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 3, 40])
def test_a_loss_that_is_not_finite_is_caught_at_once(bad: float, at: int) -> None:
    losses = [2.0 + 0.1 * (i % 3) for i in range(60)]
    losses[at] = bad
    (spike,) = run(losses, window=20).spikes
    assert (spike.step, spike.score, spike.length) == (at, math.inf, 1)
    assert math.isnan(spike.baseline) == (at == 0)
    assert spike.peak == bad or math.isnan(spike.peak) == math.isnan(bad)


def test_nan_is_the_peak_of_its_event_and_never_in_the_window() -> None:
    losses = [1.0] * 10 + [5.0, math.nan, 7.0] + [1.0] * 20 + [5.0]
    detector = run(losses, window=10)
    first, second = detector.spikes
    assert (first.step, first.length, first.peak_step) == (10, 3, 11) and math.isnan(first.peak)
    assert (second.step, second.baseline) == (33, 1.0)
    assert len(run([1.0] * 10 + [math.nan] * 100, window=10).spikes) == 1


def test_spikes_do_not_hide_the_next_ones(seed: int) -> None:
    # Every fifth loss is a spike: a mean of the window would rise to a fifth of their height.
    losses = noise(300, seed)
    planted = list(range(60, 300, 5))
    for step in planted:
        losses[step] += 3.0
    found = run(losses, threshold=12.0, patience=1).spikes
    assert [spike.step for spike in found] == planted
    assert all(abs(spike.baseline - 3.0) < 0.15 for spike in found)


def test_loss_that_stays_high_becomes_baseline_after_one_window() -> None:
    losses = [1.0] * 10 + [4.0] * 10 + [4.0] * 30 + [9.0]
    found = run(losses, window=10).spikes
    assert [(spike.step, spike.length, spike.baseline) for spike in found] == [
        (10, 10, 1.0),
        (50, 1, 4.0),
    ]


def test_the_floor_keeps_a_constant_loss_calm() -> None:
    still = [2.0] * 50
    assert run([*still, 2.0, 2.1], floor=0.01).spikes == ()  # 6 floors of 0.02 are 0.12
    assert len(run([*still, 2.13], floor=0.01).spikes) == 1
    assert run([*still, 2.0000001], floor=0.0).spikes[0].score == math.inf
    assert len(run([0.0] * 50 + [1e-9]).spikes) == 1  # a share of nothing is no floor
    assert run([*still, 0.0]).spikes == ()  # a fall is no spike
    negative = run([-2.0] * 50 + [-1.5])
    assert len(negative.spikes) == 1 and negative.spikes[0].mad == pytest.approx(0.02)


def test_a_state_goes_on_as_if_nothing_had_happened(seed: int) -> None:
    dice = random.Random(seed)
    losses = [
        loss + dice.choice([0, 0, 0, 0, 2, math.nan]) * (i > 30)
        for i, loss in enumerate(noise(200, seed))
    ]
    whole = run(losses, window=20)
    for cut in dice.sample(range(200), 10):
        begun = run(losses[:cut], window=20)
        again = LossSpikeDetector(window=20)
        again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        for step in range(cut, 200):
            again.update(step, losses[step], {"rows": [step]})
        assert repr(again.spikes) == repr(whole.spikes)


def test_a_tensor_is_a_loss() -> None:
    detector = LossSpikeDetector(window=3)
    for step in range(3):
        assert detector.update(step, torch.tensor(1.0)) is None
    spike = detector.update(3, torch.tensor([5.0], requires_grad=True).detach(), ("a.py", "b.py"))
    assert spike is not None and spike.loss == 5.0 and spike.provenance == ("a.py", "b.py")


def test_bad_arguments_say_what_to_do() -> None:
    for name in ("window", "threshold", "patience", "floor"):
        with pytest.raises(ValueError, match=name):
            LossSpikeDetector(**{name: -1})
    detector = LossSpikeDetector()
    detector.update(5, 1.0)
    with pytest.raises(ValueError, match="steps must increase, got 5 after 5"):
        detector.update(5, 1.0)
    with pytest.raises(ValueError, match="same window"):
        LossSpikeDetector(window=3).load_state_dict(detector.state_dict())


def test_the_training_loss_itself_may_be_given() -> None:
    detector = LossSpikeDetector()
    assert detector.update(0, torch.tensor(2.0, requires_grad=True) * 3) is None  # no warning
