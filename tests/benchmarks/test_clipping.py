"""The experiments run small: every quantity that a claim asks for is there, and is what it says."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from benchmarks import clipping as cases
from benchmarks.runner import Measurement, cases_of
from labcore.models import Llama, LlamaConfig
from labcore.studies.clipping import damage, exploding, language, population
from labcore.studies.language import bench
from labcore.studies.language.tuning import REPORT_SEEDS, Setting
from tests.benchmarks.measurements import asked, by_quantity

TINY = LlamaConfig(
    vocab_size=bench.CONFIG.vocab_size,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=bench.LENGTH,
    tie_word_embeddings=True,
)


def case_named(name: str):
    return next(case.function for case in cases_of("clipping") if case.name == name)


def one_a_seed(found: list[Measurement]) -> dict[str, Measurement]:
    assert all(len(item.samples) == 2 for item in found)
    return by_quantity(found)


def test_every_network_in_use_is_counted_new_and_trained() -> None:
    found = by_quantity(cases.growth_common(cases.SMALL))
    assert asked("clipping", "growth/common") <= set(found)
    for family, networks in population.IN_USE.items():
        item = found[f"explodes/{family}"]
        assert list(item.details["log10"]) == list(networks)
        assert len(item.samples) == 2 * len(networks) * 2
        ways = [
            way
            for states in item.details["log10"].values()
            for state in ("new", "trained")
            for way in states[state]
        ]
        assert [float(way >= 2) for way in ways] == list(item.samples)


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


def test_damage_is_compared_with_the_same_clipping_undamaged() -> None:
    found = one_a_seed(cases.damage_adamw(cases.SMALL))
    assert asked("clipping", "damage/AdamW") <= set(found)
    assert len(found) == 3 * len(cases.SMALL.kinds) * len(damage.LENGTHS) * 3
    settings = {"at": cases.SMALL.bad_step, **cases.SMALL.training("RNN")}
    for method in ("global", exploding.UPDATES):
        args = (method, "AdamW", 1)
        clean = damage.damaged("RNN", "none", *args, **settings)
        run = damage.damaged("RNN", cases.WORST, *args, bad=5, **settings)
        item = found[f"accuracy lost/AdamW, {cases.WORST}, 5, {method}"]
        assert item.samples[1] == 100 * (clean.accuracy - run.accuracy)
        last = cases.SMALL.bad_step + 4
        assert item.details["excess"]["20"][1] == run.losses[last + 20] - clean.losses[last + 20]


@pytest.mark.parametrize(
    ("case", "function"),
    [("damage/SGD", cases.damage_sgd), ("damage/conv", cases.damage_conv)],
)
def test_every_other_damage_has_what_claims_ask_for(case: str, function) -> None:
    found = one_a_seed(function(cases.SMALL))
    assert asked("clipping", case) <= set(found)
    for name, item in found.items():
        if name.startswith("not finite"):
            assert set(item.samples) <= {0.0, 1.0}


def test_natural_explosions_are_compared_with_smaller_weights() -> None:
    found = one_a_seed(cases.natural(cases.SMALL))
    assert asked("clipping", "natural/RNN") <= set(found)
    training = cases.SMALL.training("RNN")
    clean = exploding.run("RNN", "none", "AdamW", 1, **training, **exploding.HEALTHY["RNN"])
    item = found["accuracy lost/AdamW, global"]
    assert item.samples[1] == 100 * (clean.accuracy - item.details["accuracy"][1])


@pytest.mark.parametrize("network", exploding.LOUD)
def test_local_is_compared_with_global_each_at_its_best_limit(network: str) -> None:
    found = one_a_seed(case_named(f"loud-layer/{network}")(cases.SMALL))
    assert asked("clipping", f"loud-layer/{network}") <= set(found)
    for optimizer in exploding.OPTIMIZERS:
        item = found[f"local minus global/{optimizer}"]
        means = item.details["accuracy"]
        pairs = zip(means["local, per layer"], means["global"], strict=True)
        assert list(item.samples) == [100 * (local - whole) for local, whole in pairs]
        for method, limit in item.details["limits"].items():
            tried = item.details["tried"][method]
            assert tried[f"{limit:g}"] == max(tried.values())
            settings = {"layer": cases.SMALL.loud[network], **cases.SMALL.training(network)}
            run = exploding.loud_run(network, method, optimizer, 1, limit=limit, **settings)
            assert run.accuracy == means[method][1]
    assert not set(item.details["tuning_seeds"]) & set(cases.SMALL.seeds)


def test_a_limit_is_judged_by_the_undamaged_run_without_clipping() -> None:
    found = one_a_seed(cases.damage_by_limit(cases.SMALL))
    assert len(found) == 2 * len(cases.SMALL.limits) * 3
    settings = {"at": cases.SMALL.bad_step, **cases.SMALL.training("RNN")}
    clean = damage.damaged("RNN", "none", "none", "SGD", 1, **settings)
    for bad, kind in ((0, "none"), (5, cases.WORST)):
        item = found[f"accuracy lost/SGD, {bad}, 0.01"]
        extra = {"limit": 0.01, "bad": max(bad, 1)}
        run = damage.damaged("RNN", kind, "global", "SGD", 1, **settings, **extra)
        assert item.samples[1] == 100 * (clean.accuracy - run.accuracy)
        assert item.details["usual_norms"][1] == statistics.median(clean.norms[1:21])


def test_each_moment_is_restored_alone() -> None:
    found = one_a_seed(cases.damage_moments(cases.SMALL))
    assert len(found) == len(damage.MOMENTS) + 1
    settings = {"at": cases.SMALL.bad_step, **cases.SMALL.training("RNN")}
    clean, bad = (
        damage.damaged("RNN", kind, "none", "AdamW", 1, **settings)
        for kind in ("none", cases.WORST)
    )
    lost = found["accuracy lost/restored: nothing"]
    assert lost.samples[1] == 100 * (clean.accuracy - bad.accuracy)
    assert len({tuple(item.samples) for item in found.values()}) > 2


def test_shares_by_seed_are_means_over_a_list_of_networks(monkeypatch) -> None:
    ways = {"one": {"new": [2.0, 1.9], "trained": [3.0, -9.0]}, "other": {"new": [0.0, 5.0]}}
    record = SimpleNamespace(details={"log10": ways})
    monkeypatch.setattr(cases.records, "find", lambda *_: record)
    for item in cases.growth_by_seed():
        assert item.samples == pytest.approx([2 / 3, 1 / 3])
    assert asked("clipping", "growth/by seed") <= {item.quantity for item in cases.growth_by_seed()}


def test_bad_step_is_measured_against_the_twenty_before_it() -> None:
    moves = [5.0] + [1.0] * 10 + [3.0] * 10 + [40.0, 1.0, 1.0]
    assert cases.bad_step(moves, at=21) == 40 / 2.0


def test_the_step_at_a_bad_batch_is_measured_at_every_age() -> None:
    found = one_a_seed(cases.damage_by_age(cases.SMALL))
    assert list(found) == [f"bad step over its median/step {at}" for at in cases.SMALL.ages]
    settings = {**cases.SMALL.training("RNN"), "steps": 25, "at": 24}
    run = damage.damaged("RNN", cases.WORST, "none", "AdamW", 1, **settings)
    assert found["bad step over its median/step 24"].samples[1] == cases.bad_step(run.moves, 24)


# The language model -------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch) -> dict[tuple[str, str], SimpleNamespace]:
    """A tiny model, a setting, and what the cases record, by case and quantity."""

    def tiny(seed: int) -> Llama:
        return Llama(TINY, generator=torch.Generator().manual_seed(seed))

    monkeypatch.setattr(bench, "language_model", tiny)
    monkeypatch.setattr(cases, "best", lambda *_: Setting(lr=1e-2, decay=0.1))
    found: dict[tuple[str, str], SimpleNamespace] = {}

    def run_record(batch: int, optimizer: str, what: str) -> SimpleNamespace:
        return found[f"language:{batch}/{optimizer}/{what}", "held-out loss"]

    monkeypatch.setattr(cases, "run_record", run_record)
    monkeypatch.setattr(cases.records, "find", lambda _slug, *key: found[key])
    return found


def entry(value: float, **details) -> SimpleNamespace:
    return SimpleNamespace(p50=value, details=details)


@pytest.mark.parametrize("limit", language.LIMITS)
def test_a_limit_is_run_with_the_norms_before_clipping(limit: str, recorded) -> None:
    found = by_quantity(case_named(f"language/{limit}/seed 2")(cases.SMALL))
    (item,) = found.values()
    assert len(item.details["losses"]) == len(item.details["norms"]) == 3
    assert item.details["setting"] == {"lr": 1e-2, "decay": 0.1}
    assert 0 < item.samples[0] < 20


def test_limits_are_compared_with_the_bench_seed_by_seed(recorded) -> None:
    for seed in REPORT_SEEDS:
        recorded[f"language:8192/AdamW/seed {seed}", "held-out loss"] = entry(2.0 + seed)
        for number, limit in enumerate(language.LIMITS):
            key = f"language/{limit}/seed {seed}", "held-out loss"
            recorded[key] = entry(2.0 + seed + 0.1 * number)
    for number, limit in enumerate(language.LIMITS):
        (found,) = case_named(f"language/limits/{limit}")()
        assert found.samples == pytest.approx([0.1 * number] * len(REPORT_SEEDS))


def test_clipped_steps_are_counted_by_phase(recorded) -> None:
    norms = [3.0, 2.0, *[0.5] * 8, *[1.5] * 2, *[0.5] * 7, 2.0]
    for batch in bench.BATCHES:
        for seed in REPORT_SEEDS:
            recorded[f"language:{batch}/AdamW/seed {seed}", "held-out loss"] = entry(
                2.0, norms=norms
            )
    for batch in bench.BATCHES:
        found = by_quantity(case_named(f"language/clipped share/{batch}")())
    shares = {name: found[f"clipped/{name}"].samples[0] for name in language.PHASES}
    assert shares == {"warmup": 1.0, "to the middle": 0.0, "second half": pytest.approx(0.3)}
    assert found["clipped/whole run"].samples[0] == pytest.approx(0.25)
    assert found["largest norm over the median after warmup"].samples[0] == 4


def test_branches_are_recorded_and_compared_with_undamaged_ones(recorded) -> None:
    small = cases.SMALL
    for kind in ("none", "repeated"):
        name = f"language-damage/{kind}/seed 1"
        for item in case_named(name)(small):
            assert len(item.details["losses"]) == small.branch_steps - small.branch_at
            recorded[name, item.quantity] = entry(item.samples[0], **item.details)
    names = {
        kind: {q for case, q in recorded if f"/{kind}/" in case} for kind in ("none", "repeated")
    }
    fewer = {f"held-out loss/{n}, {language.FEWER}" for n in damage.LENGTHS}
    assert names["none"] == fewer | {f"held-out loss/1, {name}" for name in language.METHODS}
    assert len(names["repeated"]) == 2 * len(language.METHODS)


def test_branches_are_paired_seed_by_seed(recorded) -> None:
    for seed in REPORT_SEEDS:
        none = f"language-damage/none/seed {seed}"
        for steps in damage.LENGTHS:
            recorded[none, f"held-out loss/{steps}, {language.FEWER}"] = entry(3.0 + 0.1 * steps)
        for number, method in enumerate(language.METHODS):
            for kind in ("none", *language.KINDS):
                for bad in damage.LENGTHS:
                    raised = 0.5 * (kind != "none") * (bad == 5) / (1 + number)
                    key = f"language-damage/{kind}/seed {seed}", f"held-out loss/{bad}, {method}"
                    recorded[key] = entry(3.0 + raised, left_out=[0, seed + 1])
    found = by_quantity(cases.language_harm())
    assert len(found) == len(language.METHODS) * len(language.KINDS) * 2
    item = found["higher loss/stale, 5, none"]
    assert item.samples == [0.5] * len(REPORT_SEEDS)
    assert found["higher loss/stale, 1, skip"].details["left_out"][2] == [0, 3]
    assert found["higher loss/stale, 1, none"].samples == [0.0] * len(REPORT_SEEDS)
    fewer = by_quantity(cases.language_fewer())
    assert fewer["higher loss/5"].samples == pytest.approx([0.5] * len(REPORT_SEEDS))
    assert fewer["beyond/stale, 5, none"].samples == pytest.approx([0.0] * len(REPORT_SEEDS))
    assert fewer["beyond/stale, 1, skip"].samples == pytest.approx([-0.1] * len(REPORT_SEEDS))
    saved = by_quantity(cases.language_saved())
    assert len(saved) == (1 + 2 * len(language.KINDS)) * (len(language.METHODS) - 1)
    assert saved["saved/stale, 5, max_norm 1.0"].samples == [0.25] * len(REPORT_SEEDS)
    assert saved["saved/none, 1, skip"].samples == [0.0] * len(REPORT_SEEDS)


def test_a_loss_that_is_not_finite_is_recorded_as_none() -> None:
    assert cases._finite(math.nan) is None and cases._finite(2.0) == 2.0
