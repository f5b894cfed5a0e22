"""Large and small batches: experiments on images and a language model, and the layer's speed."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from pytorch_tabnet.tab_network import GBN as TabNetGBN
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runner import Measurement, case, seen
from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d
from labcore.studies.ghost_norm import (
    comparisons,
    gradients,
    language,
    language_comparisons,
    large_batches,
    sweeps,
)
from labcore.studies.ghost_norm.large_batches import LARGE, Regime, TrainedNetwork
from labcore.studies.language import bench
from labcore.studies.language.results import best
from labcore.studies.language.tuning import REPORT_SEEDS, train_setting
from labcore.timing import paired


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure. epochs: of the sweep and of other runs, if not their own."""

    seeds: tuple[int, ...] = large_batches.SEEDS
    tuning_seeds: tuple[int, ...] = large_batches.TUNING_SEEDS
    digits_seeds: tuple[int, ...] = sweeps.DIGITS_SEEDS
    rates: tuple[float, ...] = large_batches.RATES
    epochs: int | None = None
    digits: Mapping[str, Regime] = field(default_factory=lambda: sweeps.DIGITS)
    draws: int = 100
    repetitions: int = 8
    rounds: int = 80
    tokens: int = bench.TOKENS
    micro_batches: int = language.MICRO_BATCHES
    max_files: int | None = None


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1),
    tuning_seeds=(900, 901),
    digits_seeds=(0, 1),
    rates=(0.1, 1e-6),
    epochs=1,
    digits={name: replace(regime, epochs=1) for name, regime in sweeps.DIGITS.items()},
    draws=20,
    repetitions=2,
    rounds=1,
    tokens=2 * 32_768,
    micro_batches=2,
    max_files=8,
)

# Images ------------------------------------------------------------------------------------------


def _finite(values: Sequence[float]) -> list[float | None]:
    """Round for a record; a run that diverged has None."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def _means(runs: Sequence[TrainedNetwork], name: str) -> list[float | None]:
    """Return the mean over seeds of a number of the checks, by check."""
    columns = zip(*(run.checks for run in runs), strict=True)
    return _finite([fmean(getattr(check, name) for check in column) for column in columns])


def _ends(runs: Sequence[TrainedNetwork]) -> dict[str, Any]:
    """Return what the runs found at the end, by seed, for the details of a record."""
    return {
        "training loss": [run.end.training_loss for run in runs],
        "test loss": [run.end.test_loss for run in runs],
    }


def _declare_sweep(kind: str, batch: int) -> None:
    @case(f"sweep/{kind}, batch {batch}", minutes=1.0)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        """Validation accuracy by learning rate; the study uses the best rate."""
        found: dict[float, dict[str, Any]] = {}
        for lr in sizes.rates:
            regime = sweeps.regime(kind, batch, lr, epochs=sizes.epochs or large_batches.EPOCHS)
            runs = large_batches.train(regime, sizes.tuning_seeds, part="validation", checks=10)
            found[lr] = {
                "accuracy": [run.accuracy for run in runs],
                "updates": [check.updates for check in runs[0].checks],
                "curve": _means(runs, "accuracy"),
                "training loss": _means(runs, "training_loss"),
            }
        best_rate = max(found, key=lambda lr: fmean(found[lr]["accuracy"]))
        return [
            seen(
                "validation accuracy",
                "",
                found[best_rate]["accuracy"],
                best=best_rate,
                rates={f"{lr:g}": each for lr, each in found.items()},
                seeds=sizes.tuning_seeds,
            )
        ]


def _declare_length(name: str, kind: str, batch: int, epochs: int) -> None:
    fresh = name == "fresh"

    @case(f"{name}/{kind}, batch {batch}/{epochs} epochs", minutes=1.1)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        """One complete run per seed, at the rate that the sweep chose."""
        lr = sweeps.best_rate(kind, batch)
        regime = sweeps.regime(kind, batch, lr, epochs=sizes.epochs or epochs, fresh=fresh)
        runs = large_batches.train(regime, sizes.seeds)
        accuracy = [run.accuracy for run in runs]
        return [seen("accuracy", "", accuracy, lr=lr, seeds=sizes.seeds, **_ends(runs))]


for _batch in sweeps.BATCHES:
    for _kind in sweeps.sized(_batch):
        _declare_sweep(_kind, _batch)
for (_kind, _batch), _lengths in sweeps.CURVES.items():
    for _epochs in _lengths:
        _declare_length("lengths", _kind, _batch, _epochs)
for (_kind, _batch), _lengths in sweeps.FRESH.items():
    for _epochs in _lengths:
        _declare_length("fresh", _kind, _batch, _epochs)


@case("equal", minutes=1.2)
def equal(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """Compare the recorded runs seed by seed, and count what the large batch costs."""
    unit = "percentage points"
    found = [seen(name, unit, each) for name, each in comparisons.differences("accuracy").items()]
    for name, samples in comparisons.differences("test_loss").items():
        found.append(seen(f"test loss/{name}", "nats", samples))
    for kind in comparisons.NORMS:
        for loss in sweeps.LOSSES:
            updates = comparisons.costs(kind, loss)[LARGE]
            over = (
                f"ratio, batch {LARGE} over {large_batches.SMALL}/{kind}, to training loss {loss:g}"
            )
            rows = [LARGE / large_batches.SMALL * each for each in updates]
            found += [seen(f"updates {over}", "ratio", updates)]
            found += [seen(f"rows {over}", "ratio", rows)]
    return found


@case("digits/all images", minutes=2.5)
def digits(sizes: Sizes = FULL) -> list[Measurement]:
    """Handwritten digits: tune each regime on validation images, then compare on test images."""
    found, accuracy = [], {}
    for name, regime in sizes.digits.items():
        tried = {
            lr: large_batches.train(replace(regime, lr=lr), sizes.tuning_seeds, part="validation")
            for lr in sweeps.DIGITS_RATES
        }
        grid = {lr: [run.accuracy for run in runs] for lr, runs in tried.items()}
        lr = max(grid, key=lambda lr, grid=grid: fmean(grid[lr]))  # type: ignore[misc]
        runs = large_batches.train(replace(regime, lr=lr), sizes.digits_seeds)
        accuracy[name] = [run.accuracy for run in runs]
        tuning = {f"{lr:g}": each for lr, each in grid.items()}
        found.append(
            seen(f"accuracy/{name}", "", accuracy[name], lr=lr, validation=tuning, **_ends(runs))
        )
    return found + [
        seen(name, "percentage points", comparisons.difference(accuracy[mine], accuracy[other]))
        for name, (mine, other) in sweeps.DIGITS_PAIRS.items()
    ]


@case("gradients/variance", minutes=0.6)
def gradient_variance(sizes: Sizes = FULL) -> list[Measurement]:
    """Variance of a batch's gradient by batch size, compared with 1/B."""
    rows_in_all = large_batches.SOURCES["MNIST-1D"].rows
    predicted = gradients.predict_gradient_variance(1.0, large_batches.SMALL, [LARGE], rows_in_all)
    small, large = (gradients.BATCHES.index(batch) for batch in (large_batches.SMALL, LARGE))
    found = []
    for name in gradients.KINDS:
        rows = [gradients.relative_variance(name, seed, draws=sizes.draws) for seed in sizes.seeds]
        found.append(
            seen(
                f"variance ratio, batch {LARGE} over {large_batches.SMALL}/{name}",
                "ratio",
                [row[large] / row[small] for row in rows],
                predicted=predicted,
                batches=gradients.BATCHES,
                variance=rows,
                seeds=sizes.seeds,
                draws=sizes.draws,
            )
        )
    return found


def _step(regime: Regime) -> Callable[[], None]:
    """Return a training step of one network: forward, backward, SGD with momentum."""
    data, model = large_batches.split(0), large_batches.network(regime, [0])[0].member(0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, labels = data.train_x[: regime.batch].clone(), data.train_y[: regime.batch].clone()

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return run


@case("throughput", minutes=1.3, needs="cpu")
def throughput(sizes: Sizes = FULL) -> list[Measurement]:
    """Rows per second by batch size, and what the large batch costs in time."""
    regimes = {f"batch {b}": Regime(batch=b, lr=1.0) for b in sweeps.BATCHES}
    regimes["ghosts"] = Regime(batch=LARGE, lr=1.0, ghost=large_batches.GHOST)
    steps = {name: _step(regime) for name, regime in regimes.items()}
    timed = [
        paired(steps, rounds=sizes.rounds, warmup=5, seed=seed) for seed in range(sizes.repetitions)
    ]
    found = [
        seen(
            f"rows a second/{name}",
            "rows/s",
            [regime.batch / each.timings[name].p50 for each in timed],
        )
        for name, regime in regimes.items()
    ]
    whole, ghosts = (
        [each.ratio(name, f"batch {large_batches.SMALL}") for each in timed]
        for name in (f"batch {LARGE}", "ghosts")
    )
    times = {"of an epoch": [ratio * large_batches.SMALL / LARGE for ratio in whole]}
    for name, updates in comparisons.updates().items():
        step = ghosts if name == comparisons.GHOSTS_GOAL else whole
        # A repetition of the timing for each seed of the training.
        times[name] = [a * b for a, b in zip(step, updates, strict=False)]
    return found + [
        seen(f"time ratio, batch {LARGE} over {large_batches.SMALL}/{name}", "ratio", samples)
        for name, samples in times.items()
    ]


# The language model ------------------------------------------------------------------------------


def _declare_carried(batch: int, rule: str, seed: int) -> None:
    @case(f"language/{batch}/{rule}/seed {seed}", minutes=3.6)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        """AdamW at a rate that was tuned at another batch."""
        setting = language.carried(best(language.TUNED_AT, "AdamW"), batch, rule)
        run = train_setting(
            "AdamW",
            setting,
            batch=batch,
            seed=seed,
            tokens=sizes.tokens,
            max_files=sizes.max_files,
        )
        losses = [round(loss, 4) for loss in run.curve.losses]
        details: dict[str, Any] = {"setting": asdict(setting), "seed": seed, "losses": losses}
        return [seen("held-out loss", "nats/token", [run.loss], **details)]


def _declare_warm_up(seed: int) -> None:
    @case(f"language/warm-up/seed {seed}", minutes=4.0)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        """Batch warm-up, from a rate that was tuned at the larger batch, and the noise scale."""
        setting = best(language.TUNED_AT, "AdamW")
        run = language.train_warming_up(
            functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay),
            seed=seed,
            tokens=sizes.tokens,
            micro_batches=sizes.micro_batches,
            max_files=sizes.max_files,
        )
        losses = [round(loss, 4) for loss in run.losses]
        noise = {f"{share:g}": asdict(each) for share, each in run.noise.items()}
        details: dict[str, Any] = {"setting": asdict(setting), "losses": losses, "noise": noise}
        return [seen("held-out loss", "nats/token", [run.loss], seed=seed, **details)]


for _seed in REPORT_SEEDS:
    _declare_warm_up(_seed)
    for _batch, _rule in language.CARRIED:
        _declare_carried(_batch, _rule, _seed)


@case("language/batches", minutes=0.1)
def batches(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """Compare the recorded runs that were tuned at their batch; nothing is trained."""
    losses, tokens = language_comparisons.tuned_differences(), language_comparisons.token_ratios()
    return [seen(name, "nats/token", each) for name, each in losses.items()] + [
        seen(name, "ratio", each) for name, each in tokens.items()
    ]


@case("language/compared", minutes=4.1)  # the order of cases: after the runs that it reads
def compared(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """Compare this file's runs with those seed by seed; nothing is trained."""
    losses, scales = language_comparisons.differences(), language_comparisons.noise_scales()
    return [seen(name, "nats/token", each) for name, each in losses.items()] + [
        seen(f"noise scale/{share:g}", "tokens", [scale], by_seed=by_seed)
        for share, (scale, by_seed) in scales.items()
    ]


# Peers -------------------------------------------------------------------------------------------
GHOSTS = (16, 32, 128)


def _pass(layer: nn.Module, x: Tensor, above: Tensor) -> Callable[[], None]:
    """Return a forward and backward of `layer` with fresh gradients, as after `zero_grad`."""
    leaves = [x, *layer.parameters()]

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(x).backward(above)

    return both


def _layer_gap(ours: nn.Module, peer: nn.Module, x: Tensor, above: Tensor) -> float:
    """Return the largest gap between two layers' outputs, gradients and running statistics."""
    found = []
    for layer in (ours, peer):
        x.grad = None
        out = layer(x)
        out.backward(above)
        statistics = [b for b in layer.buffers() if b.is_floating_point()]
        found.append([out.detach(), x.grad, *statistics])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@case("layer-time/1d", minutes=0.4, needs="cpu")
def layer_times(sizes: Sizes = FULL) -> list[Measurement]:
    """Forward and backward over [1024, 256], with all layers on the same tensors."""
    found = []
    for ghost in GHOSTS:
        settings: dict[str, Any] = {"momentum": 0.01}
        made = {
            "GhostBatchNorm1d": GhostBatchNorm1d(256, ghost_size=ghost, **settings),
            "GhostBatchNorm1d fused": GhostBatchNorm1d(
                256, ghost_size=ghost, fused=True, **settings
            ),
            "TabNet's GBN": TabNetGBN(256, virtual_batch_size=ghost, **settings),
            "BatchNorm1d": nn.BatchNorm1d(256),
        }
        found += _layer_times((1024, 256), ghost, made, sizes)
    return found


@case("layer-time/2d", minutes=0.4, needs="cpu")
def layer_times_2d(sizes: Sizes = FULL) -> list[Measurement]:
    """Forward and backward over [128, 64, 16, 16], with all layers on the same tensors."""
    made = {
        "GhostBatchNorm2d": GhostBatchNorm2d(64, ghost_size=32),
        "GhostBatchNorm2d fused": GhostBatchNorm2d(64, ghost_size=32, fused=True),
        "BatchNorm2d": nn.BatchNorm2d(64),
    }
    return _layer_times((128, 64, 16, 16), 32, made, sizes)


def _layer_times(
    shape: tuple[int, ...], ghost: int, made: Mapping[str, nn.Module], sizes: Sizes
) -> list[Measurement]:
    """Time both passes of each layer: ours first, torch's last; all but torch's must agree."""
    generator = torch.Generator().manual_seed(ghost)
    ours, fused, *others = made
    gaps, timed = [], []
    for seed in range(sizes.repetitions):
        x = torch.randn(shape, generator=generator).requires_grad_()
        above = torch.randn(shape, generator=generator)
        for other in (fused, *others[:-1]):
            one, two = (copy.deepcopy(made[name]) for name in (ours, other))
            gaps.append(_layer_gap(one, two, x, above))
            if not gaps[-1] <= 1e-4:
                raise RuntimeError(f"{ours} and {other} must agree to 1e-4, got {gaps[-1]}")
        passes = {name: _pass(layer, x, above) for name, layer in made.items()}
        timed.append(paired(passes, rounds=40, warmup=3, seed=seed))
    times = {name: [1e3 * s for each in timed for s in each.timings[name].samples] for name in made}
    details: dict[str, Any] = {"shape": shape, "ghost": ghost, "largest gap": max(gaps)}
    found = []
    for mine in (ours, fused):
        peers = {name: times[name] for name in others}
        found.append(seen(f"{mine}/ghosts of {ghost}", "ms", times[mine], peers=peers, **details))
        for other in others:
            ratio = [each.ratio(mine, other) for each in timed]
            found.append(seen(f"{mine} over {other}/ghosts of {ghost}", "ratio", ratio, **details))
    return found
