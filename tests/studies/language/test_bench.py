"""The language-model bench: runs of one seed are pairs, and tuning reads other files."""

import functools
import math

import pytest
import torch

from labcore.data import python_sources
from labcore.models import next_token_loss, windows
from labcore.studies.language import bench, curves, results, tuning
from labcore.studies.language.bench import BATCHES, LENGTH, OPTIMIZERS, ROWS, train_language

SHORT = {"tokens": 8_192, "max_files": 2}
JUDGE = bench.held_out_loss


@pytest.fixture(autouse=True)
def _judged_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "held_out_loss", functools.partial(JUDGE, rows=ROWS))


def make(name: str, lr: float = 1e-3) -> functools.partial:
    return functools.partial(OPTIMIZERS[name], lr=lr, decay=0.1)


def test_runs_of_one_seed_see_the_same_text_whatever_the_batch() -> None:
    small = train_language(make("AdamW", 0.0), batch=2_048, seed=3, **SHORT).curve
    large = train_language(make("Lion", 0.0), batch=8_192, seed=3, **SHORT).curve
    assert len(small.losses) == 4 and len(large.losses) == 1
    assert large.losses[0] == pytest.approx(sum(small.losses) / 4, rel=1e-6)
    other = train_language(make("AdamW", 0.0), batch=8_192, seed=4, **SHORT).curve
    assert abs(other.losses[0] - large.losses[0]) > 1e-3


def test_tuning_and_report_share_no_file() -> None:
    used = {name: bench.text(name, max_files=2) for name in bench.TEXTS}
    starts = {name: tuple(tokens[:200].tolist()) for name, tokens in used.items()}
    assert len(set(starts.values())) == 4
    for part in ("train", "held_out"):
        files = python_sources(part).files
        assert len(files[:: bench.TUNED_ON]) < len(files) / 2
    run = train_language(make("AdamW"), batch=8_192, seed=3, **SHORT)
    tuned = train_language(make("AdamW"), batch=8_192, seed=3, tuning=True, **SHORT)
    assert run.curve.losses != tuned.curve.losses and run.loss != tuned.loss


@pytest.mark.parametrize("steps", [24, 96, 384, 7])
def test_the_rate_rises_for_a_tenth_and_ends_near_zero(steps: int) -> None:
    factors = [bench.warmup_and_decay(step, steps) for step in range(steps)]
    top = max(1, steps // 10)
    assert max(factors) == factors[top - 1] == 1.0
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert 0 < factors[-1] <= 1 / (steps - top)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_weight_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    model = bench.language_model(0)
    optimizer = make(name)(model)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    for group in optimizer.param_groups:
        assert all((p.dim() == 2) == (group["weight_decay"] > 0) for p in group["params"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens = torch.arange(ROWS * (LENGTH + 1)).reshape(ROWS, -1) % 2_000
    next_token_loss(model, tokens)[0].backward()
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


def test_the_held_out_loss_is_the_mean_over_fixed_windows() -> None:
    model, text = bench.language_model(1), bench.text("held out", max_files=2)
    take = windows(text, batch=ROWS, length=LENGTH, seed=1)
    expected = [next_token_loss(model, take(n)[0])[0].item() / (ROWS * LENGTH) for n in range(3)]
    assert JUDGE(model, text, rows=3 * ROWS) == pytest.approx(sum(expected) / 3)


def test_the_model_has_about_a_million_weights_beside_its_embedding() -> None:
    model = bench.language_model(0)
    beside = sum(p.numel() for p in model.parameters()) - model.embed_tokens.weight.numel()
    assert 0.9e6 < beside < 1.1e6
    assert all(bench.TOKENS % batch == 0 for batch in BATCHES)


@pytest.mark.parametrize("batch", [1_000, 1_024, 0])
def test_a_batch_that_no_rows_fill_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match="batch must be"):
        train_language(make("Lion"), batch=batch, seed=0, **SHORT)


def test_the_second_stage_changes_one_thing_at_a_time() -> None:
    best = tuning.Setting(lr=0.25, decay=0.5)
    found = tuning.finer(best)
    assert {s.lr for s in found.values() if s.decay == 0.5} == {0.125, 0.5}
    assert [s for s in found.values() if s.decay != 0.5] == [tuning.Setting(lr=0.25, decay=5.0)]
    assert all(len(tuning.coarse(name)) == 3 for name in OPTIMIZERS)


def test_a_plateau_keeps_what_lies_within_the_noise_best_first() -> None:
    settings = [tuning.Setting(lr=lr, decay=0.0) for lr in (1.0, 2.0, 3.0, 4.0)]
    losses = dict(zip(settings, (5.2, 5.0, 5.1, math.inf), strict=True))
    assert tuning.plateau(losses, 0.15) == [settings[1], settings[2]]
    assert tuning.plateau(losses, 0.0) == [settings[1]]


def test_the_best_of_the_recorded_trials_is_chosen() -> None:
    first = results.tried(8_192, "AdamW", stages=1)
    both = results.tried(8_192, "AdamW")
    assert len(first) == 3 and len(both) == 6 and set(first) <= set(both)
    assert list(both.values()) == sorted(both.values())
    assert both[results.best(8_192, "AdamW")] == min(both.values())


def test_reported_runs_use_the_setting_that_tuning_chose() -> None:
    found = curves.reported(8_192, "AdamW")
    for seed in tuning.REPORT_SEEDS:
        record = results.run_record(8_192, "AdamW", f"seed {seed}")
        assert tuning.Setting(**record.details["setting"]) == found.setting
    assert found.steps == bench.TOKENS // 8_192 and len(found.held_out) == 4


def test_a_thinned_curve_is_the_means_of_its_pieces() -> None:
    assert curves.thinned([1.0, 3.0, 5.0, 7.0, 9.0], points=2) == (2.0, 6.0)
    assert curves.thinned([1.0, 2.0], points=24) == (1.0, 2.0)
