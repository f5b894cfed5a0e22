"""The cases run small: every quantity that a claim asks for is there and means what it says."""

import dataclasses
import types
from collections.abc import Iterable

import pytest
import torch

from benchmarks import adamw_epsilon as cases
from benchmarks import runner
from benchmarks.adamw_epsilon import SMALL
from labcore.models import Llama
from labcore.optim import AdamW
from labcore.studies.adamw_epsilon import epsilon, gradient_scale, low_precision
from labcore.studies.language import bench
from labcore.studies.language.tuning import Setting
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


def test_outcomes_are_shares_of_a_models_weights_and_follow_the_dtype() -> None:
    found = by_quantity(cases.rounding_outcomes(SMALL))
    assert asked("adamw_epsilon", "rounding/outcomes") <= set(found)
    assert len(found) == 3 * len(cases.GRID_EPSILONS)
    for item in found.values():
        pairs = zip(item.samples, item.details["shares"], strict=True)
        assert all(wrong == pytest.approx(1 - shares["right"]) for wrong, shares in pairs)
    half = found["wrong first update/fp16, eps 1e-08"]
    assert half.details["eps as stored"] == 0
    assert min(half.samples) > 0.5
    for name in ("bf16", "fp32"):
        assert found[f"wrong first update/{name}, eps 1e-08"].samples == [0.0, 0.0]


def test_the_loss_scale_case_has_every_eps_and_atan2() -> None:
    (item,) = by_quantity(cases.loss_scale(SMALL)).values()
    assert item.quantity == "accuracy/loss times 1e-08"
    assert set(item.peers) == {"eps 1e-15", "eps 1e-06", "atan2"}
    assert list(item.samples) == [low_precision.accuracy_at(1e-8, 1e-8, seed) for seed in (0, 1)]


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


def test_naive_fp16_diverges_on_its_first_step_and_fp32_does_not() -> None:
    found = by_quantity(cases.divergence_of_llamas(SMALL))
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


# The language model -------------------------------------------------------


@pytest.fixture
def quick(few_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs train a small model for no time, on no text, with no tuning to look up."""
    text = torch.randint(2048, (3000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(bench, "text", lambda name, *, max_files=None: text)
    monkeypatch.setattr(cases.language, "best", lambda *_: Setting(lr=8e-3, decay=0.1))
    monkeypatch.setattr(bench, "CONFIG", dataclasses.replace(bench.CONFIG, num_hidden_layers=1))
    monkeypatch.setattr(
        bench, "language_model", lambda seed, _=None: Llama(cases.language.shape_config(64, 1))
    )


def language_case(name: str) -> runner.Case:
    return next(one for one in runner.cases_of("adamw_epsilon") if one.name == name)


def test_each_run_is_a_case_and_all_of_them_fit_an_hour_and_a_half() -> None:
    runs = [one for one in runner.cases_of("adamw_epsilon") if "/seed " in one.name]
    assert len(runs) == 4 * 3 + 3 * 2 + 4 * 5
    assert max(one.minutes for one in runs) < 5
    assert sum(one.minutes for one in runs) < 84
    reading = ("language/eps", "language/gradients", "language/shapes")
    assert min(language_case(name).minutes for name in reading) > max(one.minutes for one in runs)


@pytest.mark.usefixtures("quick")
def test_the_runs_without_eps_are_measured_too() -> None:
    found = by_quantity(language_case("language/eps 1e-15, fp32/seed 2").function(SMALL))
    assert set(found) == {"held-out loss", "gradient rms/2048 tokens", "gradient rms/4096 tokens"}
    assert len(found["held-out loss"].details["losses"]) == 2
    layers = {"embedding", "layer 1", "last norm", "all"}
    assert set(found["held-out loss"].details["second moments"]) == layers
    for batch in SMALL.batches:
        item = found[f"gradient rms/{batch} tokens"]
        assert set(item.details["layers"]) == layers
        assert item.samples == [item.details["layers"]["all"]["rms"]]
        assert item.details["batches"] == SMALL.measured_tokens // batch
    (alone,) = language_case("language/eps 1e-08, bf16/seed 0").function(SMALL)
    assert set(alone.details["second moments"]) == {"all"}


@pytest.mark.usefixtures("quick")
def test_a_shape_has_its_gradients_by_batch_and_what_each_eps_leaves() -> None:
    found = by_quantity(language_case("language/width 64, depth 5/seed 1").function(SMALL))
    sizes = {f"gradient rms/{batch} tokens" for batch in SMALL.shape_batches}
    kept = {f"kept/eps {eps:g}" for eps in cases.gradient_batches.DECADES}
    assert set(found) == sizes | kept


def recorded(numbers: dict[str, float]) -> types.SimpleNamespace:
    """Records by the part of their case's name that has a number here, plus a tenth per seed."""

    def find(slug: str, case: str, quantity: str) -> types.SimpleNamespace:
        key, _, seed = case.partition("/seed ")
        value = numbers.get(f"{key}|{quantity}", numbers.get(key)) + int(seed) / 10
        layer = {"below": {f"{e:g}": e for e in cases.language.EPSILONS}}
        layer["kept"] = {f"{e:g}": 1 - e for e in cases.language.EPSILONS}
        width, _, depth = key.removeprefix("language/width ").partition(", depth ")
        shape = (int(width), int(depth)) if depth else (0, 0)
        details = {
            "second moments": {"embedding": layer, "layer 1": layer, "all": layer},
            "parameters": shape[0] ** 2 * shape[1],
        }
        return types.SimpleNamespace(p50=value, details=details)

    return find


def test_differences_are_taken_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"8192/AdamW": 3.0, "language/eps 1e-08, bf16": 3.5, "language/eps 1e-15, bf16": 3.25}
    numbers |= {f"language/eps {eps}, fp32": 3.0 + gap for eps, gap in GAPS.items()}
    monkeypatch.setattr(cases.results.records, "find", recorded(numbers))
    found = by_quantity(cases.language_eps())
    for eps, gap in GAPS.items():
        assert found[f"minus eps 1e-08/eps {eps}"].samples == pytest.approx([gap] * 4)
    assert found["bf16 minus fp32/eps 1e-08"].samples == pytest.approx([0.5] * 3)
    assert found["minus eps 1e-08/eps 1e-15, bf16"].samples == pytest.approx([-0.25] * 3)


GAPS = {"1e-15": -0.5, "1e-05": 0.25, "0.001": 1.0}


def test_gradients_are_gathered_by_batch_with_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {
        f"language/eps 1e-15, fp32|gradient rms/{batch} tokens": 100 / batch**0.5
        for batch in cases.FULL.batches
    }
    monkeypatch.setattr(
        cases.results.records, "find", recorded({**numbers, "language/eps 1e-15, fp32": 0.0})
    )
    found = by_quantity(cases.language_gradients())
    assert found["exponent against the batch"].samples[0] == pytest.approx(-0.5)
    for batch in cases.FULL.batches:
        item = found[f"rms/{batch} tokens"]
        assert item.peers["predicted"][0] == pytest.approx(item.samples[0])
    assert found["below/eps 1e-05"].samples == [1e-5] * 4
    assert found["kept/eps 0.001"].details["layers"]["embedding"] == [0.999] * 4
    assert found["kept in the layers/eps 0.001"].samples == pytest.approx([0.999] * 4)
    assert found["below in the embedding/eps 0.001"].samples == [1e-3] * 4


def test_shapes_give_an_exponent_per_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {
        f"language/width {width}, depth {depth}": 1e6 / width**0.5 / depth
        for width, depth in cases.language.SHAPES
    }
    monkeypatch.setattr(cases.results.records, "find", recorded(numbers))
    found = by_quantity(cases.language_shapes())
    assert found["exponent against weights/width"].samples == pytest.approx([-0.25] * 4, abs=1e-3)
    assert found["exponent against weights/depth"].samples == pytest.approx([-1.0] * 4, abs=1e-3)
