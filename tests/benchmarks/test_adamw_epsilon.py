"""The cases run small: every quantity that a claim asks for is there and means what it says."""

import dataclasses
import math
from collections.abc import Iterable

import pytest
import torch

from benchmarks import adamw_epsilon as cases
from benchmarks.adamw_epsilon import SMALL
from labcore.optim import AdamW
from labcore.studies.adamw_epsilon import epsilon, gradient_scale, low_precision
from tests.benchmarks.measurements import asked, by_quantity


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No corpus is read, and torchao's first step compiles: half a minute that nothing needs."""
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(gradient_scale, "_corpus", lambda _: text)
    monkeypatch.setattr(cases, "torchao_adamw", lambda: plain_peer)


def plain_peer(
    parameters: Iterable[torch.nn.Parameter],
    *,
    bf16_stochastic_round: bool = False,
    **settings: object,
) -> AdamW:
    weights = list(parameters)
    low = bf16_stochastic_round and weights[0].dtype == torch.bfloat16
    return AdamW(weights, stochastic_rounding=low, **settings)


def test_law_is_exact_for_constant_gradients_and_close_in_noise() -> None:
    found = by_quantity(cases.attenuation_law(SMALL))
    assert found.pop("largest relative gap/constant gradient").samples[0] < 1e-12
    assert len(found) == len(cases.OVER_EPS)
    for item in found.values():
        assert sum(item.samples) / 2 == pytest.approx(item.peers["predicted"][0], rel=0.02)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (math.nan, "non-finite"),
        (math.inf, "non-finite"),
        (10.5, "thrown"),
        (1.0, "right"),
        (0.09, "frozen"),
        (0.0, "frozen"),
    ],
)
def test_an_update_has_one_outcome(size: float, expected: str) -> None:
    assert cases.outcome(size) == expected


def test_outcomes_are_shares_of_the_grid_and_follow_the_dtype() -> None:
    found = by_quantity(cases.rounding_outcomes())
    assert asked("adamw_epsilon", "rounding/outcomes") <= set(found)
    assert len(found) == 3 * len(cases.GRID_EPSILONS)
    for item in found.values():
        assert sum(item.details["shares"].values()) == pytest.approx(1)
        assert item.samples[0] == pytest.approx(1 - item.details["shares"]["right"])
    half = found["wrong first update/fp16, eps 1e-08"].details
    assert half["eps as stored"] == 0
    assert half["zero gradient"] == "non-finite"
    # In fp32 a gradient of 1e-8 meets an eps of its own size, and the law says what is left.
    single = found["wrong first update/fp32, eps 1e-06"].details
    predicted = [epsilon.predict_attenuation(g, 1e-6) for g in cases.GRADIENTS]
    assert single["outcomes"] == [cases.outcome(size) for size in predicted]


def test_the_moment_sticks_in_bf16_alone() -> None:
    found = by_quantity(cases.second_moment())
    over = {name.split("/")[1]: item.samples[0] for name, item in found.items()}
    assert over["fp32"] == pytest.approx(1, rel=1e-4)
    assert over["bf16"] > 2


def test_the_loss_scale_case_has_every_eps_and_atan2() -> None:
    (item,) = by_quantity(cases.loss_scale(SMALL)).values()
    assert item.quantity == "accuracy/loss times 1e-08"
    assert set(item.peers) == {"eps 1e-15", "eps 1e-06", "atan2"}
    assert list(item.samples) == [low_precision.accuracy_at(1e-8, 1e-8, seed) for seed in (0, 1)]


def test_a_run_of_the_benchmark_is_one_of_the_study() -> None:
    make, name = low_precision.REMEDIES["atan2"], "loss scaled by 1e-8 (fp32)"
    failure = dataclasses.replace(low_precision.FAILURES[name], steps=4)
    ours = cases.accuracy(lambda parameters, lr: make(parameters, lr, 0), failure, 1)
    assert ours == low_precision.accuracy("atan2", name, 1, steps=4)


def test_every_remedy_is_taken_seed_by_seed_from_the_healthy_run() -> None:
    found = by_quantity(cases.remedies(SMALL))
    assert asked("adamw_epsilon", "digits/remedies") <= set(found)
    for item in found.values():
        pairs = zip(item.details["accuracy"], item.details["healthy"], strict=True)
        assert list(item.samples) == [100 * (a - b) for a, b in pairs]


def test_the_exponents_have_one_sample_a_seed() -> None:
    found = by_quantity(cases.gradient_rms(SMALL))
    names = {name.replace("after 2 steps", "after 50 steps") for name in found}
    assert asked("adamw_epsilon", "llama/gradient-rms") == names
    for item in found.values():
        assert len(item.samples) == 2
        assert item.details["exponents"]["all"] == item.samples
        assert set(item.details["extrapolated"]) == {"5120", "16384"}


def test_wide_and_narrow_are_compared_seed_by_seed() -> None:
    found = by_quantity(cases.eps_by_width(SMALL))
    assert asked("adamw_epsilon", "llama/eps-by-width") <= set(found)
    losses = [found[f"loss/width {width}, eps 1e-08"] for width in (16, 32)]
    narrow, wide = (
        [a - b for a, b in zip(x.peers["eps 0.001"], x.samples, strict=True)] for x in losses
    )
    between = [a - b for a, b in zip(wide, narrow, strict=True)]
    assert found["penalty, widest minus narrowest/eps 0.001"].samples == between
    told = losses[0].details["eps 0.001"]
    assert told["predicted"]["all"] == epsilon.predict_attenuation(told["rms"]["all"], 1e-3)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 4.0, 3.0], None),
        ([5.0, 6.0, 3.0], None),
        ([5.0, 4.0, 6.0, 7.0], 2),
        ([5.0, 5.0], 1),
        ([5.0, 4.0, math.nan, 3.0], 2),
        ([math.nan, math.nan], 0),
        ([5.0, math.inf, 4.0], 1),
        ([5.0], None),
    ],
)
def test_the_first_bad_step(losses: list[float], expected: int | None) -> None:
    assert cases.first_bad_step(losses) == expected


def test_naive_fp16_diverges_on_its_first_step_and_fp32_does_not() -> None:
    found = by_quantity(cases.divergence(SMALL))
    assert asked("adamw_epsilon", "llama/divergence") <= set(found)
    half = found["diverged/fp16, torch AdamW"]
    assert half.samples == [1.0, 1.0]
    assert half.details["diverged at step"] == [1, 1]
    assert found["diverged/fp32, torch AdamW"].samples == [0.0, 0.0]


def test_the_peers_meet_every_failure() -> None:
    found = by_quantity(cases.digits_peers(SMALL))
    assert set(found) == {f"accuracy/{failure}" for failure in low_precision.FAILURES}
    for item in found.values():
        assert {cases.OURS, *item.peers} == set(cases.DIGITS_PEERS)
        assert all(len(each) == 2 for each in (item.samples, *item.peers.values()))


def test_stochastic_rounding_keeps_the_mean() -> None:
    """Each of 65536 weights moves by 100 updates with a chance of 1/100: the mean has sd 0.039."""
    for item in by_quantity(cases.stochastic_rounding(SMALL)).values():
        assert item.samples == pytest.approx([1.0, 1.0], abs=0.25)


def test_step_times_are_ratios_within_a_repetition() -> None:
    found = by_quantity(cases.step_time(SMALL))
    assert len(found["step/bf16, AdamW"].samples) == 2
    ratio = found["AdamW over optimi StableAdamW/fp32"]
    item = found["step/fp32, AdamW"]
    pairs = zip(item.samples, item.peers["optimi StableAdamW"], strict=True)
    assert ratio.samples == [a / b for a, b in pairs]  # one round a repetition


def test_a_peer_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(parameters: object, *, lr: float, **settings: object):
        return AdamW(parameters, lr=2 * lr, **settings)

    monkeypatch.setattr(cases, "torchao_adamw", lambda: twice)
    with pytest.raises(RuntimeError, match="AdamW and torchao AdamW must agree"):
        cases.step_time(SMALL)


def test_a_scheduled_learning_rate_reaches_torchao_as_a_tensor() -> None:
    from torchao.optim import _AdamW

    refused = torch.nn.Parameter(torch.ones(2))
    peer = _AdamW([refused])
    peer.param_groups[0]["lr"] = 0.25
    refused.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="non-Tensor"):
        peer.step()
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = cases.keeps_tensor_lr(AdamW([weights], lr=0.1, weight_decay=0.0))
    optimizer.param_groups[0]["lr"] = 0.25
    weights.grad = torch.ones(2)
    optimizer.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert weights.detach() == pytest.approx([0.75, 0.75])
