"""The experiments run small: every quantity that a claim asks for is there, and is what it says."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import memory as cases
from benchmarks.memory import SMALL
from benchmarks.runner import Measurement
from labcore import memory
from labcore.memory import accumulation, checkpointing, distill, experts, precision
from labcore.memory.model import CONFIG
from tests.benchmarks.measurements import asked, by_quantity


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out text is longer than all the training here."""
    for module in (cases, memory.offload_runs):
        monkeypatch.setattr(module, "held_out_loss", short_loss)


@torch.no_grad()
def short_loss(model: memory.model.Llama) -> float:
    return float(cases.mean_loss(model, cases.held_out_rows(2)[:, :9]))


def checked(case: str, found: list[Measurement]) -> dict[str, Measurement]:
    """What a claim asks of the case is there, and the numbers of each kind are what they say."""
    named = by_quantity(found)
    # The lengths here are not those of the claims.
    assert {name for name in asked("memory", case) if "tokens" not in name} <= set(named)
    for name, item in named.items():
        if name.startswith("peak/"):
            assert item.samples == [sum(item.details["measured"].values())]
            if "predicted" in item.details:
                assert list(item.peers["predicted"]) == [sum(item.details["predicted"].values())]
            ratio = named[name.replace("peak/", "peak over plain/")]
            assert ratio.samples == [item.samples[0] / sum(item.details["plain"].values())]
            assert ratio.details["exact"]
        if name.startswith("loss minus plain/"):
            pairs = zip(item.details["loss"], item.details["plain loss"], strict=True)
            assert list(item.samples) == [mine - plain for mine, plain in pairs]
            assert len(item.samples) == len(item.details["seeds"])
            time = named[name.replace("loss minus plain/", "time over plain/")]
            assert len(time.samples) == len(item.samples) and min(time.samples) > 0
    return named


def gaps(named: dict[str, Measurement]) -> dict[str, float]:
    """How far each prediction of a peak lies from what was measured."""
    return {
        name: item.peers["predicted"][0] / item.samples[0] - 1
        for name, item in named.items()
        if name.startswith("peak/") and "predicted" in item.peers
    }


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("bytes/accumulation", cases.bytes_of_accumulation),
        ("bytes/checkpointing", cases.bytes_of_checkpointing),
        ("bytes/optimizers", cases.bytes_of_optimizers),
        ("bytes/experts", cases.bytes_of_experts),
        ("bytes/distillation", cases.bytes_of_distillation),
        ("bytes/precision", cases.bytes_of_precision),
        ("bytes/offload", cases.bytes_of_offload),
    ],
)
def test_bytes_are_near_their_prediction(
    case: str, function: Callable[..., list[Measurement]]
) -> None:
    if case == "bytes/optimizers":
        pytest.importorskip("torchao")
    named = checked(case, function(SMALL))
    found = gaps(named)
    assert found
    for name, gap in found.items():
        assert abs(gap) < 0.05, (name, gap)


def test_quantized_bytes_are_those_predicted() -> None:
    pytest.importorskip("torchao")
    named = checked("bytes/quantization", cases.bytes_of_quantization(SMALL))
    assert set(gaps(named)) == {f"peak/{name}" for name in cases.SCHEMES}
    assert all(gap == 0 for gap in gaps(named).values())


def test_ways_that_compute_the_same_lose_nothing() -> None:
    named = checked("price/checkpointing", cases.price_of_checkpointing(SMALL))
    for name, item in named.items():
        if name.startswith("loss minus plain/"):
            assert list(item.samples) == [0, 0]
    named = checked("price/accumulation", cases.price_of_accumulation(SMALL))
    assert max(map(abs, named["loss minus plain/4 parts"].samples)) < 1e-3
    named = checked("price/offload", cases.price_of_offload(SMALL))
    for way in cases.OFFLOADS:
        assert list(named[f"loss minus plain/{way}"].samples) == [0, 0]


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("price/precision", cases.price_of_precision),
        ("price/distillation", cases.price_of_distillation),
        ("price/experts", cases.price_of_experts),
    ],
)
def test_prices_have_a_sample_a_seed(case: str, function: Callable[..., list[Measurement]]) -> None:
    named = checked(case, function(SMALL))
    for name, item in named.items():
        if name.startswith(("busiest", "dropped")):
            assert all(0 <= share <= 1 for share in item.samples)
            assert len(item.samples) == 2


def test_each_optimizer_has_its_own_price() -> None:
    named = checked("price/optimizers", cases.price_of_optimizers(SMALL))
    for name in cases.LESS_STATE:
        if name != "torchao AdamW8bit":
            assert named[f"loss minus plain/{name}"].samples[0] != 0


def test_a_quantized_model_pays_by_its_loss() -> None:
    pytest.importorskip("torchao")
    named = checked("price/quantization", cases.price_of_quantization(SMALL))
    for name in ("int8", "int4"):  # which costs more, a model this small can't tell
        assert 0 < abs(named[f"loss minus plain/{name}"].samples[0]) < 0.5


@pytest.mark.parametrize(
    ("way", "train"),
    [
        (cases.way, partial(checkpointing.try_checkpointing, how=None)),
        (partial(cases.way, checkpointing=1), partial(checkpointing.try_checkpointing, how=1)),
        (partial(cases.way, parts=2), partial(accumulation.try_accumulation, parts=2)),
        (cases.experts_way, partial(experts.try_experts, experts=cases.EXPERTS)),
        (partial(cases.student_way, taught=False), partial(distill.try_distillation, teacher=None)),
        (
            partial(cases.way, recipe="bfloat16"),
            partial(precision.try_precision, recipe=precision.RECIPES["bfloat16"]),
        ),
    ],
    ids=["plain", "checkpointing", "accumulation", "experts", "student", "bfloat16"],
)
def test_a_way_trains_as_the_package_does(
    way: Callable[..., cases.Way], train: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"batch": 4, "length": 5}
    for module in (memory.trials, memory.precision, memory.distill):
        monkeypatch.setattr(module, "held_out_loss", short_loss)
    made = way(3, **size)
    for n in range(2):
        made.step(n)
    trial = train(3, steps=2, **size)
    assert short_loss(made.model) == getattr(trial, "trial", trial).loss


def test_sums_are_exact_and_means_are_not() -> None:
    named = checked("gradient/accumulation", cases.gradient_of_accumulation(SMALL))
    error = {name.removeprefix("relative error/"): x.samples for name, x in named.items()}
    for name in ("exact, equal rows", "exact, ragged rows", "mean of means, equal rows"):
        assert max(error[name]) < 1e-4
    assert max(error["mean of means, ragged rows"]) > 1e-2


def test_scores_are_predicted_by_length() -> None:
    named = checked("bytes/attention", cases.bytes_of_attention(SMALL))
    for item in named.values():
        assert item.peers["predicted"] == [pytest.approx(item.samples[0], rel=0.01)]
    few, many = (named[f"peak, naive over flash/model, {n} tokens"].samples[0] for n in (9, 300))
    assert few < many


def test_a_combination_is_measured_and_predicted_together() -> None:
    named = checked("combination", cases.combination(SMALL))
    assert len(gaps(named)) == 5
    for name, gap in gaps(named).items():
        assert abs(gap) < 0.05, (name, gap)


def test_the_largest_error_of_the_estimate_is_the_largest() -> None:
    named = checked("estimate/error", cases.error_of_estimate(SMALL))
    errors = [abs(x.samples[0]) for n, x in named.items() if n.startswith("relative")]
    assert named["largest relative error"].samples == [max(errors)] and max(errors) < 0.05


def test_what_divided_training_holds_is_what_was_predicted() -> None:
    named = checked("bytes/zero", cases.bytes_of_zero(SMALL))
    for name, gap in gaps(named).items():
        assert abs(gap) < 0.05, (name, gap)


def test_a_pipeline_waits_as_long_as_its_bubble() -> None:
    named = checked("bytes/pipeline", cases.bytes_of_pipeline(SMALL))
    stages = [named[f"fullest stage over plain/{name}"].samples[0] for name in cases.SCHEDULES]
    assert stages[1] <= stages[0] < 1
    waits = by_quantity(cases.bubbles(SMALL))
    for item in waits.values():
        assert item.peers["predicted"] == [pytest.approx(item.samples[0], abs=1e-9)]


def test_divided_training_has_the_losses_of_plain_training() -> None:
    for case, function in (
        ("price/zero", cases.price_of_zero),
        ("price/pipeline", cases.price_of_pipeline),
    ):
        named = checked(case, function(SMALL))
        for name, item in named.items():
            if name.startswith("loss minus plain/"):
                assert max(map(abs, item.samples)) < 1e-3


def test_what_is_slow_the_first_time_is_in_no_time() -> None:
    assert cases.pace([0, 50, 70, 71, 72, 73]) == 1
    assert cases.warm((3, 4)) == [3, 3, 4]


def test_a_mixture_of_digits_is_counted_in_points() -> None:
    named = checked("digits/distillation", cases.digits_of_distillation(SMALL))
    for item in named.values():
        pairs = zip(item.details["distilled"], item.details["alone"], strict=True)
        assert list(item.samples) == [100 * (told - alone) for told, alone in pairs]


def test_contexts_are_rows_of_their_own_table() -> None:
    windows = torch.tensor([[1, 2, 3, 9], [200, 2, 3, 9], [1, 2, 255, 9]])
    rows = cases.contexts(windows)
    for order in range(cases.ORDERS):
        column = rows[:, order]
        assert (order * cases.ROWS <= column).all() and (column < (order + 1) * cases.ROWS).all()
    assert torch.equal(rows[0, :2], rows[1, :2]) and rows[0, 2] != rows[1, 2]
    assert rows[0, 0] != rows[2, 0]
    named = checked("sparse/SM3", cases.sparse_of_sm3(SMALL))
    losses = named["loss minus AdamW/SM3"].details["loss"]
    assert all(math.isfinite(x) for each in losses.values() for x in each)


def test_the_peak_of_zero_is_predicted_for_each_stage() -> None:
    named = checked("peak/zero", cases.peak_of_zero(SMALL))
    assert len(named) == 8
    tokens = [item for name, item in named.items() if name.endswith("many tokens")]
    totals = [item.samples[0] for item in tokens]
    assert totals == sorted(totals, reverse=True)
    for item in tokens:
        assert item.samples[0] == pytest.approx(item.peers["predicted"][0], rel=0.15)


def test_lora_has_its_bytes_and_its_losses() -> None:
    named = checked("bytes/lora", cases.bytes_of_lora(SMALL))
    low, lower = (named[f"peak/{name}"].samples[0] for name in ("LoRA", "QLoRA"))
    assert lower < low < cases.plain(**{**SMALL.big, "batch": 1})[0].total
    named = checked("price/lora", cases.price_of_lora(SMALL))
    assert set(named) == {f"loss minus full/{name}" for name in ("not tuned", "LoRA", "QLoRA")}
    assert all(len(item.samples) == len(SMALL.few) for item in named.values())


def test_the_seeds_are_not_those_that_chose_the_rates() -> None:
    assert not {100, 101} & set(cases.FULL.seeds)
    assert memory.estimate(CONFIG, batch=1, length=1).total > 0


def test_a_pool_runs_about_as_many_requests_as_the_lengths_predict() -> None:
    found = by_quantity(cases.requests_at_once(SMALL))
    crowds = {name: found[f"requests at once/{name}"] for name in cases.POOLS}
    for name, item in crowds.items():
        (measured,), (predicted,) = item.samples, item.peers["predicted"]
        assert measured == pytest.approx(predicted, rel=0.15)
        bytes_held = item.details["blocks"] * item.details["page"] * found[
            f"bytes per token/{name}"
        ].samples[0]  # fmt: skip
        assert 0.8 * item.details["budget"] < bytes_held <= item.details["budget"] or (
            name == "pages of 256"
        )
        assert 0 <= found[f"wasted/{name}"].samples[0] < 1
    for more, less in (
        ("pages of 16", "contiguous"),
        ("pages of 16, int8", "pages of 16"),
        ("pages of 16, GQA", "pages of 16, int8"),
        ("pages of 16, GQA, int8", "pages of 16, GQA"),
    ):
        assert crowds[more].samples[0] > crowds[less].samples[0]


def test_a_rounded_cache_is_compared_seed_by_seed() -> None:
    found = by_quantity(cases.rounded_cache(SMALL))
    assert set(found) == {f"loss minus float32/{kind}" for kind in ("bfloat16", "int8", "float8")}
    for item in found.values():
        pairs = zip(item.details["loss"], item.details["float32"], strict=True)
        assert list(item.samples) == [mine - plain for mine, plain in pairs]
        assert 0 < max(map(abs, item.samples)) < 0.2
