"""The digits runs: same start for all, no hidden randomness, and the bytes of state."""

import functools
import math

import pytest
import torch

from labcore.data import digits
from labcore.optim import AdamW, Lion
from labcore.studies import digits_runs
from labcore.studies.digits_runs import TrainConfig

LION = functools.partial(Lion, lr=5e-3)
SHORT = TrainConfig(steps=23, batch=48, hidden=17, check_every=6)


def test_run_repeats_by_its_seed_and_spares_torchs_generator(seed: int) -> None:
    config = TrainConfig(steps=12, batch=31, hidden=9, seed=seed)
    before = torch.get_rng_state()
    first = digits_runs.train_digits(LION, config, digits())
    assert torch.equal(torch.get_rng_state(), before)
    assert first == digits_runs.train_digits(LION, config, digits())
    other = TrainConfig(steps=12, batch=31, hidden=9, seed=seed + 1)
    assert first.losses != digits_runs.train_digits(LION, other, digits()).losses


def test_two_optimizers_meet_the_same_weights_and_batches() -> None:
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    lion = digits_runs.train_digits(functools.partial(Lion, lr=0.0), SHORT, digits())
    assert lion.losses == digits_runs.train_digits(frozen, SHORT, digits()).losses
    assert len(set(lion.losses)) > 1
    assert len({loss for _, loss in lion.checks}) == 1


def test_checks_are_at_their_steps_and_learning_lowers_the_loss() -> None:
    run = digits_runs.train_digits(LION, SHORT, digits())
    assert [step for step, _ in run.checks] == [0, 6, 12, 18, 23]
    assert [step for step, _ in run.update_rms] == [0, 6, 12, 18]
    assert len(run.losses) == 23
    assert run.checks[-1][1] < run.checks[0][1] - 0.2
    assert run.accuracy > 0.3


def test_cosine_schedule_ends_near_zero_and_constant_stays() -> None:
    seen: dict[str, list[float]] = {"cosine": [], "constant": []}

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen[schedule].append(self.param_groups[0]["lr"])
            return super().step(closure)

    for schedule in seen:
        config = TrainConfig(steps=40, schedule=schedule)
        digits_runs.train_digits(lambda p: Watched(p, lr=0.25), config, digits())
    assert set(seen["constant"]) == {0.25}
    expected = [0.125 * (1 + math.cos(math.pi * step / 40)) for step in range(40)]
    assert seen["cosine"] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (LION, "lion"),
        (AdamW, "adamw"),
        (torch.optim.Adam, "adam"),
        (functools.partial(torch.optim.SGD, lr=0.1), "gradient_descent"),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "momentum"),
        (torch.optim.Adagrad, "adagrad"),
        (torch.optim.RMSprop, "rmsprop"),
    ],
)
def test_state_bytes_are_predicted_up_to_the_step_counters(make, name, dtype) -> None:
    config = TrainConfig(steps=1, hidden=37, dtype=dtype)
    measured = digits_runs.train_digits(make, config, digits()).state_bytes
    weights = 64 * 37 + 37 + 37 * 10 + 10
    extra = measured - digits_runs.predict_state_bytes(weights, name, dtype)
    assert 0 <= extra <= 4 * 4  # at most one 4-byte counter for each of the four tensors


def test_lion_keeps_half_of_adamws_state_at_any_size(seed: int) -> None:
    count = 1 + seed % 10**10
    for dtype in (torch.float32, torch.bfloat16):
        lion = digits_runs.predict_state_bytes(count, "lion", dtype)
        assert 2 * lion == digits_runs.predict_state_bytes(count, "adamw", dtype)
    assert digits_runs.predict_state_bytes(7 * 10**9, "adamw") == 56 * 10**9


def test_steps_to_takes_the_first_check_at_or_below_the_target() -> None:
    run = digits_runs.train_digits(LION, SHORT, digits())
    step, loss = run.checks[2]
    assert run.steps_to(loss) == step
    assert run.steps_to(0.0) is None


@pytest.mark.parametrize("signal", [0.0, 0.4, 2.0])
def test_adams_update_size_follows_the_formula_and_lions_is_one(signal: float, seed: int) -> None:
    adam = functools.partial(AdamW, lr=1.0, weight_decay=0.0)
    measured = digits_runs.update_rms(adam, signal, seed=seed)
    # 3 % is above the bias of the second moment, whose average over 150 steps is still young.
    assert measured == pytest.approx(digits_runs.predict_update_rms(signal), rel=0.03)
    assert digits_runs.update_rms(functools.partial(Lion, lr=1.0), signal, seed=seed) == 1.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -4}, "batch must be at least 1, got -4"),
        ({"schedule": "cosin"}, "schedule must be one of .* did you mean 'cosine'"),
    ],
)
def test_bad_settings_say_what_to_do(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**arguments)


def test_bad_calls_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="batch must be at most the 1438 training images"):
        digits_runs.train_digits(LION, TrainConfig(batch=2000), digits())
    with pytest.raises(ValueError, match="optimizer must be one of .* did you mean 'adam'"):
        digits_runs.predict_state_bytes(10, "adamv")
    with pytest.raises(ValueError, match="parameters must be at least 1"):
        digits_runs.predict_state_bytes(0, "lion")
