"""A language model's batch: carried rates, noise, and a batch that grows."""

import functools
import math

import pytest
import torch

from labcore.models import Llama, LlamaConfig
from labcore.models.training import next_token_loss, windows
from labcore.studies.ghost_norm import language
from labcore.studies.ghost_norm.language import Noise
from labcore.studies.language import bench
from labcore.studies.language.tuning import Setting

TINY = LlamaConfig(
    vocab_size=31,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
)


def test_a_carried_rate_follows_its_rule() -> None:
    tuned = Setting(lr=0.008, decay=0.1)
    assert language.carried(tuned, 2_048, "unchanged") == tuned
    halved = language.carried(tuned, 2_048, "square root")
    assert (halved.lr, halved.decay) == (pytest.approx(0.004), 0.1)
    assert language.carried(tuned, 32_768, "square root").lr == pytest.approx(0.016)
    with pytest.raises(ValueError, match="rule must be one of"):
        language.carried(tuned, 2_048, "linear")


def test_two_batches_tell_signal_from_noise(seed: int) -> None:
    signal, noise = 0.7, 5.3
    squares = [signal + noise / size for size in (12, 300)]
    found = language.two_batch_estimate(*squares, (12, 300))
    assert (found.signal, found.noise) == (pytest.approx(signal), pytest.approx(noise))
    assert found.scale == pytest.approx(noise / signal)
    assert Noise(signal=-0.1, noise=2.0).scale == math.inf
    # Means of 4 and of 64 normal numbers of mean 1 and variance 9, many times.
    drawn = 1 + 3 * torch.randn(20_000, 64, generator=torch.Generator().manual_seed(seed))
    few, many = (drawn[:, :size].mean(1).square().mean().item() for size in (4, 64))
    found = language.two_batch_estimate(few, many, (4, 64))
    assert found.noise == pytest.approx(9, rel=0.1) and found.signal == pytest.approx(1, rel=0.1)


def test_noise_scale_of_a_model_is_that_of_its_gradients(generator: torch.Generator) -> None:
    model = Llama(TINY, generator=generator)
    text = torch.randint(31, (400,), generator=generator)
    batches = windows(text, batch=3, length=9, seed=4)
    gradients = []
    for n in range(5):
        loss, predicted = next_token_loss(model, batches(n)[0])
        each = torch.autograd.grad(loss / predicted, list(model.parameters()))
        gradients.append(torch.cat([one.flatten() for one in each]).double())
    small = sum(each.square().sum() for each in gradients).item() / 5
    large = (sum(gradients) / 5).square().sum().item()
    before = [p.clone() for p in model.parameters()]
    found = language.noise_scale(model, batches, count=5)
    wanted = language.two_batch_estimate(small, large, (27, 135))
    assert found.signal == pytest.approx(wanted.signal, rel=1e-3)
    assert found.noise == pytest.approx(wanted.noise, rel=1e-3)
    for p, was in zip(model.parameters(), before, strict=True):
        assert p.grad is None and torch.equal(p, was)


@pytest.fixture
def tiny(few_windows: None, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """The bench with a tiny model and passes of 2 rows of 8 tokens."""
    text = torch.randint(31, (5000,), generator=generator)
    monkeypatch.setattr(bench, "text", lambda name, max_files=None: text)
    monkeypatch.setattr(bench, "ROWS", 2)
    monkeypatch.setattr(bench, "LENGTH", 8)
    monkeypatch.setattr(
        bench,
        "language_model",
        lambda seed: Llama(TINY, generator=torch.Generator().manual_seed(seed)),
    )
    monkeypatch.setattr(language, "FIRST", 16)
    monkeypatch.setattr(language, "TUNED_AT", 64)


def test_batch_warm_up_reads_the_text_once_at_the_rates_of_its_tokens(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, steps = [], []

    class Watched(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step()

    train = language.train

    def watched(model: Llama, batches: object, *given: object, **options: object) -> object:
        steps.append((options["steps"], options["accumulate"], batches(0)[0]))
        return train(model, batches, *given, **options)

    monkeypatch.setattr(language, "train", watched)
    run = language.train_warming_up(
        lambda model: Watched(model.parameters(), lr=0.5),
        seed=3,
        tokens=40 * 16,
        points=(1 / 40, 0.5, 1.0),
        micro_batches=2,
    )
    assert [each[:2] for each in steps] == [(13, 1), (6, 4)]  # 13 and 27 // 4 passes
    read = windows(bench.text("report"), batch=2, length=8, seed=3)
    assert torch.equal(steps[0][2], read(0)[0]) and torch.equal(steps[1][2], read(13)[0])
    assert len(run.losses) == len(rates) == 19 and math.isfinite(run.loss)
    places = [*range(13), *range(13, 37, 4)]
    factors = [0.25**0.5] * 13 + [1.0] * 6  # of the batches' ratio, by the square root
    wanted = [bench.warmup_and_decay(each, 40) for each in places]
    assert rates == pytest.approx([0.5 * a * b for a, b in zip(factors, wanted, strict=True)])
    assert set(run.noise) == {1 / 40, 0.5, 1.0}


def test_measuring_leaves_the_run_as_it_is(tiny: None) -> None:
    make = functools.partial(bench.OPTIMIZERS["AdamW"], lr=0.01, decay=0.1)
    plain, measured = (
        language.train_warming_up(make, seed=1, tokens=32 * 16, points=points, micro_batches=2)
        for points in ((), (0.25, 1.0))
    )
    assert plain.losses == measured.losses and plain.loss == measured.loss
    assert set(measured.noise) == {0.25, 1.0}


def test_a_constant_batch_makes_as_many_steps_as_the_warm_up() -> None:
    steps = language.SHARE / language.FIRST + (1 - language.SHARE) / language.TUNED_AT
    assert steps == pytest.approx(1 / language.CONSTANT)
