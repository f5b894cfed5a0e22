"""Runs on the language model: what changes, what stays as tuned, and what is read of records."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from labcore.studies.adamw_epsilon import gradient_batches, language, results
from labcore.studies.language import bench
from labcore.studies.language.tuning import REPORT_SEEDS, Setting


@pytest.fixture(autouse=True)
def no_text(few_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files are read and no tuning is looked up."""
    text = torch.randint(2048, (3000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(bench, "text", lambda name, *, max_files=None: text)
    monkeypatch.setattr(bench, "ROWS", 2)
    monkeypatch.setattr(language, "BATCH", 4 * bench.LENGTH)
    monkeypatch.setattr(language, "SHAPE_BATCH", 2 * bench.LENGTH)
    monkeypatch.setattr(language, "best", lambda batch, _: Setting(lr=8e-3, decay=0.1))


def run(eps: float, form: str = "fp32") -> language.Trained:
    return language.train_eps(eps, 1, form=form, tokens=2 * language.BATCH)


def test_only_eps_changes() -> None:
    small, large = run(1e-15), run(1e-3)
    for done, eps in ((small, 1e-15), (large, 1e-3)):
        (matrices, vectors) = done.optimizer.param_groups
        assert {matrices["eps"], vectors["eps"]} == {eps}
        assert matrices["initial_lr"] == 8e-3
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
        assert matrices["betas"] == (0.9, 0.95)
        assert len(done.run.curve.losses) == 2
    assert small.run.curve.losses[0] == large.run.curve.losses[0]
    assert small.run.loss != large.run.loss


def test_in_bf16_weights_and_state_have_8_digits_and_gradients_do_not() -> None:
    done = run(1e-8, "bf16")
    for parameter in done.model.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())
        state = done.optimizer.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    gradients = torch.cat([p.grad.flatten() for p in done.model.parameters()])
    assert not torch.equal(gradients, gradients.bfloat16().float())
    with pytest.raises(ValueError, match="form must be one of"):
        run(1e-8, "fp16")


@pytest.mark.parametrize(("width", "depth"), [(64, 2), (192, 1)])
def test_a_shape_keeps_the_heads_and_scales_the_rate(width: int, depth: int) -> None:
    config = language.shape_config(width, depth)
    assert config.hidden_size == width and config.num_hidden_layers == depth
    assert width // config.num_attention_heads == 32
    assert config.initializer_range == width**-0.5
    done = language.train_shape(width, depth, 0, tokens=2 * language.SHAPE_BATCH)
    assert done.optimizer.param_groups[0]["initial_lr"] == pytest.approx(8e-3 * 128 / width)


def test_the_benchs_own_shape_is_the_bench() -> None:
    assert language.shape_config(128, 5) == bench.CONFIG
    assert (128, 5) in language.SHAPES
    with pytest.raises(ValueError, match="multiple of 64, got 96"):
        language.shape_config(96, 5)


def test_the_second_moments_are_adams_own() -> None:
    done = run(1e-8)
    roots = language.second_moments(done)
    assert list(roots) == list(gradient_batches.layers(done.model))
    embedding = done.optimizer.state[done.model.embed_tokens.weight]
    corrected = embedding["exp_avg_sq"].double() / (1 - 0.95**2)
    torch.testing.assert_close(roots["embedding"], corrected.sqrt().flatten())
    assert len(roots["all"]) == sum(p.numel() for p in done.model.parameters())


def test_gradients_are_measured_on_batches_of_the_asked_sizes() -> None:
    model = bench.language_model(3)
    piece = bench.ROWS * bench.LENGTH
    found = language.gradients(model, 3, tokens=4 * piece, batches=(piece, 4 * piece))
    assert found.batches == {piece: 4, 4 * piece: 1}


# Records ------------------------------------------------------------------


def test_records_are_read_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(slug: str, case: str, quantity: str) -> SimpleNamespace:
        asked.append((slug, case, quantity))
        sizes = [int(number) for number in re.findall(r"\d+", case)]
        details = {"second moments": len(asked), "parameters": math.prod(sizes[:2])}
        return SimpleNamespace(p50=float(len(asked)), details=details)

    monkeypatch.setattr(results.records, "find", find)
    assert results.final_losses(results.BASE) == [1.0, 2.0, 3.0, 4.0]
    assert asked[0] == ("language", "8192/AdamW/seed 0", "held-out loss")
    results.final_losses((1e-5, "bf16"), (2,))
    assert asked[-1] == ("adamw_epsilon", "language/eps 1e-05, bf16/seed 2", "held-out loss")
    asked.clear()
    assert results.rms_by_batch((2048, 8192))[8192] == [5.0, 6.0, 7.0, 8.0]
    assert asked[0][1:] == ("language/eps 1e-15, fp32/seed 0", "gradient rms/2048 tokens")
    assert len(results.second_moments()) == len(REPORT_SEEDS)
    shapes = results.rms_by_shape(8192)
    assert {name: sorted(found) for name, found in shapes.items()} == {
        "width": [320, 640, 1280],
        "depth": [256, 640, 1280],
    }
    assert asked[-1][1:] == ("language/width 128, depth 10/seed 3", "gradient rms/8192 tokens")


def test_exponents_are_fitted_seed_by_seed() -> None:
    sizes = {x: [3 / x, 2 * x**0.25] for x in (64, 128, 256)}
    assert results.exponents(sizes) == pytest.approx([-1.0, 0.25])
