"""How runs are made: what two regimes share, what chooses, and what judges."""

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from labcore.studies.ghost_norm import large_batches
from labcore.studies.ghost_norm.large_batches import Regime


def rows(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MNIST-1D with 256 rows and a narrow network."""
    small = dataclasses.replace(large_batches.SOURCES["MNIST-1D"], rows=256, hidden=9)
    monkeypatch.setitem(large_batches.SOURCES, "MNIST-1D", small)
    large_batches._mnist1d.cache_clear()
    yield
    large_batches._mnist1d.cache_clear()


def test_seeds_that_choose_are_not_seeds_that_report() -> None:
    assert not set(large_batches.TUNING_SEEDS) & set(large_batches.SEEDS)


@pytest.mark.parametrize("source", ["MNIST-1D", "digits"])
def test_a_split_never_judges_on_what_it_trains_on(source: str, seed: int, few: None) -> None:
    seed = seed % 1000
    test, validation = (
        large_batches.split(seed, source=source, part=part) for part in large_batches.PARTS
    )
    assert torch.equal(test.train_x, validation.train_x)
    trained = rows(test.train_x)
    assert len(test.train_x) == large_batches.SOURCES[source].rows
    for judged in (test, validation):
        assert len(judged.test_x) == len(judged.test_y)
        assert not trained & rows(judged.test_x)
    assert not rows(test.test_x) & rows(validation.test_x)
    other = large_batches.split(seed + 1, source=source)
    assert torch.equal(other.test_x, test.test_x)
    assert not torch.equal(other.train_x, test.train_x)


def test_updates_follow_from_epochs() -> None:
    assert Regime(batch=32, lr=0.1).updates == 20 * 256
    assert Regime(batch=512, lr=0.1, epochs=3).updates == 48
    assert Regime(batch=512, lr=0.1, source="digits", epochs=7).updates == 7
    assert Regime(batch=100, lr=0.1, epochs=1).updates == 81  # the rest of an epoch is left out


def test_a_run_depends_on_its_seed_and_regime_alone(seed: int, few: None) -> None:
    regime = Regime(batch=64, lr=0.3, ghost=16, epochs=2)
    pair = large_batches.train(regime, [seed, seed + 1], checks=4)
    (alone,) = large_batches.train(regime, [seed + 1], checks=1)
    assert [check.updates for check in pair[1].checks] == [2, 4, 6, 8]
    assert alone.end.training_loss == pytest.approx(pair[1].end.training_loss, rel=1e-4)
    assert alone.accuracy == pytest.approx(pair[1].accuracy, abs=0.002)
    assert pair[0].end.training_loss != pair[1].end.training_loss
    assert alone.end is alone.checks[-1] and alone.accuracy == alone.end.accuracy


def test_rate_falls_along_a_cosine_and_the_step_is_momentum(seed: int, few: None) -> None:
    """Three full-batch steps by hand, with the network's own gradients."""
    regime = Regime(batch=256, lr=0.05, epochs=3, norm="layer")
    data = large_batches.split(seed)
    stack, (dice,) = large_batches.network(regime, [seed])
    model = stack.member(0)
    weights = list(model.parameters())
    speed = [torch.zeros_like(w) for w in weights]
    for step in range(3):
        order = torch.randperm(256, generator=dice)
        loss = F.cross_entropy(model(data.train_x[order]), data.train_y[order])
        lr = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 3))
        for w, v, g in zip(weights, speed, torch.autograd.grad(loss, weights), strict=True):
            v.mul_(0.9).add_(g)
            w.data.sub_(lr * v)
    (run,) = large_batches.train(regime, [seed])
    for ours, theirs in zip(run.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_training_loss_uses_the_statistics_of_all_rows(seed: int, few: None) -> None:
    (run,) = large_batches.train(Regime(batch=64, lr=0.3, ghost=16, epochs=2), [seed])
    data = large_batches.split(seed)
    x = data.train_x.double()
    first, norm, second, norm2, head = (run.model[i] for i in (0, 1, 3, 4, 6))
    for layer, bn in ((first, norm), (second, norm2)):
        x = x @ layer.weight.double().T
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        x = (x * bn.weight.double() + bn.bias.double()).relu()
    logits = x @ head.weight.double().T + head.bias.double()
    loss = F.cross_entropy(logits, data.train_y).item()
    assert loss == pytest.approx(run.end.training_loss, rel=1e-4)
    right = (run.model(data.test_x).argmax(1) == data.test_y).double().mean().item()
    assert right == pytest.approx(run.accuracy, abs=0.002)


def test_fresh_rows_are_new_in_every_epoch(seed: int, few: None) -> None:
    regime = Regime(batch=64, lr=0.1, epochs=3, fresh=True)
    stream = large_batches._Stream(regime, [seed, seed + 1], "test")
    seen: list[set[tuple[float, ...]]] = [set(), set()]
    generators = [torch.Generator().manual_seed(each) for each in (seed, seed + 1)]
    for x, y in stream.batches(generators):
        assert x.shape == (2, 64, 40) and y.shape == (2, 64)
        for n in range(2):
            seen[n] |= rows(x[n])
    assert [len(each) for each in seen] == [3 * 256, 3 * 256]
    repeated = large_batches._Stream(dataclasses.replace(regime, fresh=False), [seed], "test")
    once = {row for x, _ in repeated.batches(generators[:1]) for row in rows(x[0])}
    assert len(once) == 256


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="at most the 512 training rows, got 513"):
        Regime(batch=513, lr=0.1, source="digits")
    with pytest.raises(ValueError, match="at most the batch of 32 rows, .* ghosts of 64"):
        Regime(batch=32, lr=0.1, ghost=64)
    with pytest.raises(ValueError, match='got norm "layer" and ghosts of 8'):
        Regime(batch=32, lr=0.1, ghost=8, norm="layer")
    with pytest.raises(ValueError, match="only MNIST-1D has fresh rows"):
        Regime(batch=32, lr=0.1, source="digits", fresh=True)
    with pytest.raises(ValueError, match="part must be one of 'test', 'validation'"):
        large_batches.split(0, part="train")
    lr = random.choice([0.0, -0.1, math.nan])
    with pytest.raises(ValueError, match="lr must be a finite number above 0"):
        Regime(batch=32, lr=lr)
