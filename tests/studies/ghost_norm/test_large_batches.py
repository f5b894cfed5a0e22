"""How runs are made: what two regimes share, what chooses, and what judges."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labcore.data import Digits
from labcore.norm import GhostBatchNorm1d
from labcore.studies.ghost_norm import large_batches
from labcore.studies.ghost_norm.large_batches import Regime


def test_seeds_that_choose_are_not_seeds_that_report() -> None:
    assert not set(large_batches.TUNING_SEEDS) & set(large_batches.SEEDS)


def test_a_split_never_judges_on_what_it_trains_on(seed: int) -> None:
    seed = seed % 1000
    test, validation = large_batches.split(seed), large_batches.split(seed, "validation")
    assert torch.equal(test.train_x, validation.train_x)
    rows = {tuple(row) for row in test.train_x.tolist()}
    for judged, count in ((test, 797), (validation, large_batches.POOL - large_batches.IMAGES)):
        assert len(judged.test_x) == len(judged.test_y) == count
        assert not rows & {tuple(row) for row in judged.test_x.tolist()}
    other = large_batches.split(seed + 1)
    assert torch.equal(other.test_x, test.test_x)
    assert not torch.equal(other.train_x, test.train_x)


def test_updates_follow_from_epochs_or_are_given() -> None:
    assert Regime(batch=32, lr=0.1).updates == 480
    assert Regime(batch=512, lr=0.1).updates == 30
    assert Regime(batch=512, lr=0.1, steps=7).updates == 7
    many = {
        name: regime.updates for name, regime in large_batches.REGIMES.items() if "more" in name
    }
    assert len(many) == 4 and set(many.values()) == {480}
    images = {r.updates * r.batch for name, r in large_batches.REGIMES.items() if name not in many}
    assert images == {large_batches.EPOCHS * large_batches.IMAGES}


def test_the_rates_follow_their_rules() -> None:
    small = large_batches.REGIMES["small batch"]
    for name, regime in large_batches.REGIMES.items():
        rule = {"root": 4, "linear": 16}
        factor = next((rule[key] for key in rule if key in name), 1)
        assert regime.lr == pytest.approx(factor * small.lr), name
        assert regime.ghost == (32 if "ghosts" in name else None)
    assert large_batches.sweep_regime(512, 8).lr == pytest.approx(4 * large_batches.LEARNING_RATE)
    assert large_batches.sweep_regime(128, 128).ghost is None
    assert large_batches.sweep_regime(128, 16, many=True).updates == 480


def test_every_regime_starts_from_the_same_weights(seed: int) -> None:
    regimes = [Regime(batch=32, lr=0.1), Regime(batch=512, lr=1.0, ghost=8)]
    regimes.append(Regime(batch=64, lr=0.1, normalized=False))
    models = [large_batches.network(r, torch.Generator().manual_seed(seed)) for r in regimes]
    weights = [[p for p in model.parameters() if p.dim() == 2] for model in models]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
    kinds = [[type(layer) for layer in model] for model in models]
    assert nn.BatchNorm1d in kinds[0] and GhostBatchNorm1d in kinds[1]
    assert len(kinds[2]) == len(kinds[0]) - 2


def test_a_run_depends_on_its_seed_and_regime_alone(seed: int) -> None:
    regime = Regime(batch=128, lr=0.3, ghost=32, steps=5)
    a, b = (large_batches.train(regime, seed, check_every=2) for _ in range(2))
    assert (a.accuracy, a.checks) == (b.accuracy, b.checks)
    assert [step for step, _ in a.checks] == [0, 2, 4, 5]
    assert a.checks[-1][1] == a.training_loss
    unchecked = large_batches.train(regime, seed)
    assert unchecked.training_loss == a.training_loss  # checking leaves the run as it is
    assert large_batches.train(regime, seed + 1).training_loss != a.training_loss


def test_the_rate_falls_along_a_cosine_and_the_step_is_momentum(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three full-batch steps by hand, in float64: a rounding of float32 can turn a ReLU on."""
    split, network = large_batches.split, large_batches.network

    def wide(*given: Any) -> Digits:
        data = split(*given)
        return dataclasses.replace(data, train_x=data.train_x.double(), test_x=data.test_x.double())

    monkeypatch.setattr(large_batches, "split", wide)
    monkeypatch.setattr(large_batches, "network", lambda *given: network(*given).double())
    regime = Regime(batch=512, lr=0.2, steps=3)
    data, dice = large_batches.split(seed), torch.Generator().manual_seed(seed)
    model = large_batches.network(regime, dice)
    weights = list(model.parameters())
    speed = [torch.zeros_like(w) for w in weights]
    for step in range(3):
        rows = torch.randperm(512, generator=dice)
        loss = F.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
        lr = 0.2 * 0.5 * (1 + math.cos(math.pi * step / 3))
        for w, v, g in zip(weights, speed, torch.autograd.grad(loss, weights), strict=True):
            v.mul_(0.9).add_(g)
            w.data.sub_(lr * v)
    run = large_batches.train(regime, seed)
    for ours, theirs in zip(run.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_training_loss_uses_the_statistics_of_all_images(seed: int) -> None:
    run = large_batches.train(Regime(batch=128, lr=0.3, ghost=16, steps=6), seed)
    data = large_batches.split(seed)
    x = data.train_x.double()
    first, norm, second, norm2, head = (run.model[i] for i in (0, 1, 3, 4, 6))
    for layer, bn in ((first, norm), (second, norm2)):
        x = x @ layer.weight.double().T
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        x = (x * bn.weight.double() + bn.bias.double()).relu()
    logits = x @ head.weight.double().T + head.bias.double()
    assert F.cross_entropy(logits, data.train_y).item() == pytest.approx(
        run.training_loss, rel=1e-4
    )
    loss, weights = large_batches.landscape(run.model, data)
    assert loss().item() == pytest.approx(run.training_loss, rel=1e-5)
    assert sum(w.numel() for w in weights) == sum(p.numel() for p in run.model.parameters())
    with torch.no_grad():
        weights[0].zero_()
    assert not torch.equal(weights[0], run.model[0].weight)  # a copy


def test_a_run_ends_where_it_arrives(seed: int) -> None:
    regime = Regime(batch=128, lr=0.3)
    whole = large_batches.train(regime, seed, check_every=3)
    target = whole.checks[4][1]
    short = large_batches.train(regime, seed, check_every=3, until=target)
    arrived = whole.steps_to(target)
    assert arrived is not None and short.steps_to(target) == arrived
    # The last two entries are one step: the check that ended the run, and the end.
    assert short.checks[:-1] == whole.checks[: arrived // 3 + 1]
    assert short.steps_to(-1.0) is None


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must be at most the 512 images, got 513"):
        Regime(batch=513, lr=0.1)
    with pytest.raises(ValueError, match="ghost must be .* 32, got 64"):
        large_batches.sweep_regime(32, 64)
    with pytest.raises(ValueError, match="part must be one of 'test', 'validation'"):
        large_batches.split(0, "train")
    lr = random.choice([0.0, -0.1, math.nan])
    with pytest.raises(ValueError, match="lr must be a finite number above 0"):
        Regime(batch=32, lr=lr)
