"""The experiments run small: what a claim asks for is there, and means what it says."""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from benchmarks import ghost_norm as cases
from benchmarks.ghost_norm import SMALL
from benchmarks.runner import Measurement, cases_of
from labcore.models import Llama, LlamaConfig
from labcore.studies.ghost_norm import comparisons, gradients, large_batches, sweeps
from labcore.studies.language import bench
from labcore.studies.language.tuning import REPORT_SEEDS, Setting
from tests.benchmarks.measurements import asked, by_quantity

TEXT = {"tokens": 32_768}


def run(name: str, **sizes: object) -> dict[str, Measurement]:
    (case,) = (case for case in cases_of("ghost_norm") if case.name == name)
    return by_quantity(case.function(replace(SMALL, **sizes)))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MNIST-1D with 2,048 rows, and a rate that no record has to choose."""
    small = replace(large_batches.SOURCES["MNIST-1D"], rows=2048)
    monkeypatch.setitem(large_batches.SOURCES, "MNIST-1D", small)
    monkeypatch.setattr(sweeps, "best_rate", lambda kind, batch: 0.1)
    large_batches._mnist1d.cache_clear()
    yield
    large_batches._mnist1d.cache_clear()


def test_a_sweep_takes_the_best_rate(few: None) -> None:
    item = run("sweep/ghosts of 8, batch 128")["validation accuracy"]
    assert set(item.details["rates"]) == {"0.1", "1e-06"}
    means = {rate: fmean(each["accuracy"]) for rate, each in item.details["rates"].items()}
    assert item.details["best"] == float(max(means, key=means.__getitem__)) == 0.1
    assert item.samples == item.details["rates"]["0.1"]["accuracy"]
    for each in item.details["rates"].values():
        count = len(each["updates"])
        assert len(each["curve"]) == len(each["training loss"]) == count
        assert each["updates"][-1] == 16
        assert each["curve"][-1] == pytest.approx(fmean(each["accuracy"]), abs=1e-3)


def test_a_length_is_a_run_for_each_seed(few: None) -> None:
    names = {case.name for case in cases_of("ghost_norm")}
    for (kind, batch), lengths in sweeps.CURVES.items():
        for epochs in lengths:
            assert f"lengths/{kind}, batch {batch}/{epochs} epochs" in names
    item = run("lengths/ghosts of 32, batch 512/20 epochs")["accuracy"]
    regime = sweeps.regime("ghosts of 32", 512, 0.1, epochs=1)
    runs = large_batches.train(regime, SMALL.seeds)
    assert item.samples == [each.accuracy for each in runs]
    assert item.details["training loss"] == [each.end.training_loss for each in runs]
    fresh = run("fresh/batch norm, batch 512/10 epochs", epochs=2)["accuracy"]
    again = run("lengths/batch norm, batch 512/10 epochs", epochs=2)["accuracy"]
    assert fresh.details["training loss"] != again.details["training loss"]


def test_what_is_compared_is_what_claims_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = {name for name in asked("ghost_norm", "equal") if "ratio" not in name}
    told = {name.removeprefix("test loss/"): [1.0, 2.0] for name in asks}
    monkeypatch.setattr(comparisons, "differences", lambda what: told)
    monkeypatch.setattr(comparisons, "costs", lambda kind, loss: {512: [0.25, loss]})
    found = run("equal")
    assert asked("ghost_norm", "equal") <= set(found)
    for kind in comparisons.NORMS:
        rows = found[f"rows ratio, batch 512 over 32/{kind}, to training loss 0.5"].samples
        assert rows == [16 * 0.25, 16 * 0.5]


def test_digits_are_tuned_and_then_compared_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "DIGITS_RATES", (0.1, 1e-6))
    found = run("digits/all images")
    assert asked("ghost_norm", "digits/all images") <= set(found)
    for name, regime in SMALL.digits.items():
        item = found[f"accuracy/{name}"]
        grid = {float(rate): fmean(each) for rate, each in item.details["validation"].items()}
        assert item.details["lr"] == max(grid, key=grid.__getitem__)
        runs = large_batches.train(replace(regime, lr=item.details["lr"]), SMALL.digits_seeds)
        assert item.samples == [each.accuracy for each in runs]
    for name, (mine, other) in sweeps.DIGITS_PAIRS.items():
        pairs = zip(
            found[f"accuracy/{mine}"].samples, found[f"accuracy/{other}"].samples, strict=True
        )
        assert found[name].samples == [100 * (a - b) for a, b in pairs]


def test_variance_has_a_row_for_each_seed(few: None) -> None:
    found = run("gradients/variance", draws=5)
    assert asked("ghost_norm", "gradients/variance") <= set(found)
    for name in gradients.KINDS:
        details = found[f"variance ratio, batch 512 over 32/{name}"].details
        assert details["predicted"] == pytest.approx([1536 / 2016 / 16])
        assert len(details["variance"]) == len(SMALL.seeds)


def test_times_are_ratios_within_a_repetition(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = asked("ghost_norm", "throughput") - {"time ratio, batch 512 over 32/of an epoch"}
    costs = {name.split("/")[1]: [0.5, 0.25] for name in names}
    monkeypatch.setattr(comparisons, "updates", lambda: costs)
    found = run("throughput")
    assert names and asked("ghost_norm", "throughput") <= set(found)
    name = "time ratio, batch 512 over 32"
    small, large = (found[f"rows a second/batch {b}"].samples for b in (32, 512))
    epoch = found[f"{name}/of an epoch"].samples  # one round: its ratio is the medians'
    assert epoch == pytest.approx([a / b for a, b in zip(small, large, strict=True)])
    steps = [16 * each for each in epoch]
    for each in costs:
        if each != comparisons.GHOSTS_GOAL:
            wanted = [0.5 * steps[0], 0.25 * steps[1]]
            assert found[f"{name}/{each}"].samples == pytest.approx(wanted)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """The bench with a tiny model, random text and short rows; a setting without tuning."""
    text = torch.randint(31, (50_000,), generator=generator)  # more than is read
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    monkeypatch.setattr(bench, "text", lambda name, max_files=None: text)
    monkeypatch.setattr(
        bench,
        "language_model",
        lambda seed: Llama(config, generator=torch.Generator().manual_seed(seed)),
    )
    monkeypatch.setattr(bench, "LENGTH", 8)
    monkeypatch.setattr(cases, "best", lambda batch, optimizer: Setting(lr=0.01, decay=0.1))


def test_a_language_run_is_a_case(tiny: None) -> None:
    names = {case.name: case for case in cases_of("ghost_norm") if case.name.startswith("language")}
    assert len(names) == (3 + 1) * len(REPORT_SEEDS) + 2
    assert all(case.minutes < 5 for case in names.values())
    # They come before the case that reads them.
    assert max(names, key=lambda name: names[name].minutes) == "language/compared"
    many, most = (
        run(f"language/{name}/seed 1", **TEXT)["held-out loss"]
        for name in ("4096/square root", "32768/unchanged")
    )
    assert many.details["setting"]["lr"] == pytest.approx(0.01 * 0.5**0.5)
    assert most.details["setting"]["lr"] == 0.01
    assert len(many.details["losses"]) == 8 and len(most.details["losses"]) == 1
    assert all(map(math.isfinite, many.samples + most.samples))
    warm = run("language/warm-up/seed 1", **TEXT)["held-out loss"]
    assert set(warm.details["noise"]) == {"0.03125", "0.125", "0.5", "1"}
    assert len(warm.details["losses"]) == 5 + 2  # of 2,048 and of 8,192 tokens
    assert set(warm.details["noise"]["1"]) == {"signal", "noise"}
