"""Ghost batch normalization: experiments on digits, and speed against TabNet and torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from pytorch_tabnet.tab_network import GBN as TabNetGBN
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runner import Measurement, case, ratios, seen
from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d
from labcore.studies.ghost_norm import gradients, large_batches, sharpness
from labcore.studies.ghost_norm.large_batches import GhostRun, Regime
from labcore.timing import Comparison, paired

CHECKS = 32  # measurements of the training loss during a run of the sweep
GRADIENT_BATCHES = (8, 16, 32, 64, 128, 256, 512)
GRADIENT_STEPS = 32  # training steps before the gradients are measured
RADIUS = 0.4  # length of the random steps, relative to the norm of each unit's weights


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    seeds: tuple[int, ...] = large_batches.SEEDS
    tuning_seeds: tuple[int, ...] = large_batches.TUNING_SEEDS
    convergence_seeds: tuple[int, ...] = tuple(range(8))
    sweep_seeds: tuple[int, ...] = tuple(range(5))
    gradient_seeds: tuple[int, ...] = tuple(range(5))
    epochs: int = large_batches.EPOCHS  # of tuning and the sweep
    regimes: Mapping[str, Regime] = field(default_factory=lambda: large_batches.REGIMES)
    plain_regimes: Mapping[str, Regime] = field(default_factory=lambda: large_batches.PLAIN_REGIMES)
    learning_rates: tuple[float, ...] = large_batches.LEARNING_RATES
    batches: tuple[int, ...] = large_batches.SWEEP_BATCHES
    ghosts: tuple[int, ...] = large_batches.SWEEP_GHOSTS
    target: float = large_batches.TARGET
    draws: int = 200
    repetitions: int = 8
    rounds: int = 80


def _short(regimes: Mapping[str, Regime]) -> dict[str, Regime]:
    """Return the same regimes, two or three steps long, at a rate that such a run can bear."""
    return {
        name: replace(regime, lr=0.01, steps=3 if "more" in name else 2)
        for name, regime in regimes.items()
    }


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1),
    tuning_seeds=(900, 901),
    convergence_seeds=(0, 1),
    sweep_seeds=(0, 1),
    gradient_seeds=(0, 1),
    epochs=1,
    regimes=_short(large_batches.REGIMES),
    plain_regimes=_short(large_batches.PLAIN_REGIMES),
    learning_rates=(0.1, 1e-6),
    batches=(32, 512),
    ghosts=(8, 32, 512),
    target=2.0,
    draws=20,
    repetitions=2,
    rounds=1,
)

# Experiments -------------------------------------------------------------------------------------
OWN_EFFECT = {
    "equal epochs": ("large, root rate, ghosts", "large, root rate"),
    "equal updates": (
        "large, root rate, ghosts, more updates",
        "large, root rate, more updates",
    ),
    "equal updates, the small batch's rate": (
        "large, ghosts, more updates",
        "large, more updates",
    ),
}
"""Pairs of the same training with ghosts and without."""


@case("digits/tuning", minutes=0.4)
def tuning(sizes: Sizes = FULL) -> list[Measurement]:
    """Validation accuracy by learning rate; the study uses the small batch's best rate."""
    small, large = large_batches.SMALL, large_batches.LARGE
    kinds: dict[str, Callable[[float], Regime]] = {
        "small batch": lambda lr: Regime(batch=small, lr=lr),
        "large batch": lambda lr: Regime(batch=large, lr=lr),
        "large batch, ghosts": lambda lr: Regime(batch=large, lr=lr, ghost=large_batches.GHOST),
        "small batch, without normalization": lambda lr: Regime(
            batch=small, lr=lr, normalized=False
        ),
    }

    def accuracy(regime: Regime, seed: int) -> float:
        steps = sizes.epochs * (large_batches.IMAGES // regime.batch)
        return large_batches.train(replace(regime, steps=steps), seed, part="validation").accuracy

    found = []
    for name, regime in kinds.items():
        grid = {
            f"{lr:g}": [accuracy(regime(lr), seed) for seed in sizes.tuning_seeds]
            for lr in sizes.learning_rates
        }
        best = max(grid, key=lambda rate, of=grid: fmean(of[rate]))  # type: ignore[misc]
        found.append(
            seen(
                f"validation accuracy/{name}",
                "",
                grid[best],
                best=float(best),
                accuracy=grid,
                seeds=sizes.tuning_seeds,
            )
        )
    return found


def _points(runs: Sequence[GhostRun], reference: Sequence[GhostRun]) -> list[float]:
    """Return the differences in test accuracy in percentage points, seed by seed."""
    return [100 * (a.accuracy - b.accuracy) for a, b in zip(runs, reference, strict=True)]


def _trained(regimes: Mapping[str, Regime], seeds: Sequence[int]) -> dict[str, list[GhostRun]]:
    """Return the runs of each regime on the reported seeds."""
    return {
        name: [large_batches.train(regime, seed) for seed in seeds]
        for name, regime in regimes.items()
    }


def _accuracies(
    regimes: Mapping[str, Regime], runs: Mapping[str, Sequence[GhostRun]], seeds: Sequence[int]
) -> list[Measurement]:
    """Return the accuracy of each regime, then its difference from the small batch."""
    found = []
    for name, mine in runs.items():
        details: dict[str, Any] = {
            "batch": regimes[name].batch,
            "lr": regimes[name].lr,
            "ghost": regimes[name].ghost,
            "updates": regimes[name].updates,
            "seeds": seeds,
            "refreshed": [run.refreshed for run in mine],
            "test loss": [run.test_loss for run in mine],
            "training accuracy": [run.training_accuracy for run in mine],
            "training loss": [run.training_loss for run in mine],
        }
        found.append(seen(f"accuracy/{name}", "", [run.accuracy for run in mine], **details))
    small = runs["small batch"]
    return found + [
        seen(f"minus small batch/{name}", "percentage points", _points(mine, small), seeds=seeds)
        for name, mine in runs.items()
        if name != "small batch"
    ]


def _flatness(name: str, runs: Sequence[GhostRun], seeds: Sequence[int]) -> list[Measurement]:
    """Return the trace of the Hessian at the end of each run, and the rise after a random step."""
    traces, errors, rises = [], [], []
    for seed, run in zip(seeds, runs, strict=True):
        dice = torch.Generator().manual_seed(seed)
        loss, weights = large_batches.landscape(run.model, large_batches.split(seed))
        trace = sharpness.hessian_trace(loss, weights, generator=dice)
        moved = sharpness.perturbed_losses(loss, weights, radius=RADIUS, generator=dice)
        traces.append(trace.mean)
        errors.append(trace.standard_error)
        rises.append(fmean(moved) - run.training_loss)
    details: dict[str, Any] = {"standard error": errors, "seeds": seeds}
    return [
        seen(f"trace/{name}", "nats", traces, **details),
        seen(f"rise/{name}", "nats", rises, radius=RADIUS, seeds=seeds),
    ]


@case("digits/regimes", minutes=2.5)
def regimes(sizes: Sizes = FULL) -> list[Measurement]:
    """Every regime of the study on the reported seeds: accuracy, differences, sharpness."""
    runs = _trained(sizes.regimes, sizes.seeds)
    effects = [
        Measurement(
            quantity=f"ghosts' own effect/{name}",
            unit="percentage points",
            samples=_points(runs[ghosts], runs[whole]),
            details={"with": ghosts, "without": whole, "seeds": sizes.seeds},
        )
        for name, (ghosts, whole) in OWN_EFFECT.items()
    ]
    flatness = [item for name, mine in runs.items() for item in _flatness(name, mine, sizes.seeds)]
    return _accuracies(sizes.regimes, runs, sizes.seeds) + effects + flatness


@case("digits/plain", minutes=0.4)
def without_normalization(sizes: Sizes = FULL) -> list[Measurement]:
    """A network without batch normalization: the small batch compared with the large one."""
    plain, seeds = sizes.plain_regimes, sizes.seeds
    return _accuracies(plain, _trained(plain, seeds), seeds)


def _arrivals(batch: int, sizes: Sizes) -> list[int]:
    """Return, for each seed, the steps to the target; the budget plus 1 if it isn't reached."""
    regime = large_batches.sweep_regime(batch, batch, epochs=sizes.epochs)
    until = functools.partial(large_batches.train, regime, check_every=1, until=sizes.target)
    steps = (until(seed).steps_to(sizes.target) for seed in sizes.convergence_seeds)
    return [regime.updates + 1 if step is None else step for step in steps]


@case("digits/convergence", minutes=0.1)
def convergence(sizes: Sizes = FULL) -> list[Measurement]:
    """Steps and images until the training loss is at most the target, by batch size."""
    small, large, seeds = large_batches.SMALL, large_batches.LARGE, sizes.convergence_seeds
    steps, found = {}, []
    for batch in sizes.batches:
        steps[batch] = _arrivals(batch, sizes)
        found.append(
            seen(
                f"steps/batch {batch}",
                "steps",
                steps[batch],
                images=[batch * step for step in steps[batch]],
                lr=large_batches.sweep_regime(batch, batch).lr,
                target=sizes.target,
                seeds=seeds,
            )
        )
    between = ratios(steps[large], steps[small])
    return found + [
        seen(
            f"{unit} ratio/batch {large} over {small}",
            "ratio",
            [factor * ratio for ratio in between],
            seeds=seeds,
        )
        for unit, factor in {"steps": 1.0, "images": large / small}.items()
    ]


def _sweep_point(batch: int, ghost: int, budget: str, sizes: Sizes) -> dict[str, Any]:
    regime = large_batches.sweep_regime(batch, ghost, many=budget == "updates", epochs=sizes.epochs)
    every = max(1, regime.updates // CHECKS)
    runs = [large_batches.train(regime, seed, check_every=every) for seed in sizes.sweep_seeds]
    steps = [step for step, _ in runs[0].checks]
    losses = [fmean(at) for at in zip(*([x for _, x in r.checks] for r in runs), strict=True)]
    return {
        "accuracy": [run.accuracy for run in runs],
        "steps": steps,
        "loss": [float(f"{x:.4g}") for x in losses],
    }


@case("digits/sweep", minutes=2)
def sweep(sizes: Sizes = FULL) -> list[Measurement]:
    """Accuracy by batch and ghost size at equal epochs and at equal updates, for the explorer."""
    found = []
    for batch, budget in itertools.product(sizes.batches, ("epochs", "updates")):
        points = {
            str(ghost): _sweep_point(batch, ghost, budget, sizes)
            for ghost in sizes.ghosts
            if ghost <= batch
        }
        found.append(
            seen(
                f"accuracy/batch {batch}, equal {budget}",
                "",
                points[str(batch)]["accuracy"],
                ghosts=points,
                seeds=sizes.sweep_seeds,
            )
        )
    return found


GRADIENT_KINDS = {
    "without normalization": Regime(
        batch=large_batches.SMALL,
        lr=large_batches.PLAIN_LEARNING_RATE,
        steps=GRADIENT_STEPS,
        normalized=False,
    ),
    "batch normalization": Regime(
        batch=large_batches.SMALL, lr=large_batches.LEARNING_RATE, steps=GRADIENT_STEPS
    ),
    "ghosts of 32": Regime(
        batch=large_batches.SMALL,
        lr=large_batches.LEARNING_RATE,
        steps=GRADIENT_STEPS,
        ghost=large_batches.GHOST,
    ),
}


def _gradient_row(name: str, seed: int, draws: int) -> dict[str, list[float]]:
    """Return variance and bias by batch size for one network after a few training steps."""
    run, data = large_batches.train(GRADIENT_KINDS[name], seed), large_batches.split(seed)
    dice = torch.Generator().manual_seed(seed)
    draw = functools.partial(gradients.batch_gradients, data=data, generator=dice)
    # With one ghost per batch, the layer is plain batch normalization.
    whole = (
        run
        if name != "ghosts of 32"
        else large_batches.train(GRADIENT_KINDS["batch normalization"], seed)
    )
    full = draw(whole.model, batch=large_batches.IMAGES, draws=1)[0]
    row: dict[str, list[float]] = {"variance": [], "bias": []}
    for batch in GRADIENT_BATCHES:
        drawn = draw(run.model, batch=batch, draws=draws)
        row["variance"].append(gradients.gradient_variance(drawn) / full.square().sum().item())
        row["bias"].append(gradients.gradient_bias(drawn, full))
    return row


@case("gradients/variance", minutes=0.6)
def gradient_variance(sizes: Sizes = FULL) -> list[Measurement]:
    """Variance of a batch's gradient by batch size, compared with 1/B; and the bias of its mean."""
    predicted = gradients.predict_gradient_variance(1.0, 32, [256], large_batches.IMAGES)
    small, large = (GRADIENT_BATCHES.index(batch) for batch in (32, 256))
    found = []
    for name in GRADIENT_KINDS:
        rows = [_gradient_row(name, seed, sizes.draws) for seed in sizes.gradient_seeds]
        found.append(
            seen(
                f"variance ratio, batch 256 over 32/{name}",
                "ratio",
                [row["variance"][large] / row["variance"][small] for row in rows],
                predicted=predicted,
                batches=GRADIENT_BATCHES,
                variance=[row["variance"] for row in rows],
                bias=[row["bias"] for row in rows],
                seeds=sizes.gradient_seeds,
                draws=sizes.draws,
            )
        )
    return found


def _step(regime: Regime) -> Callable[[], None]:
    """Return a training step: forward, backward, SGD with momentum."""
    data = large_batches.split(0)
    model = large_batches.network(regime, torch.Generator().manual_seed(0)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = data.train_x[: regime.batch].clone(), data.train_y[: regime.batch].clone()

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return run


@case("throughput", minutes=0.2, needs="cpu")
def throughput(sizes: Sizes = FULL) -> list[Measurement]:
    """Images per second by batch size, and the training time with a large batch."""
    regimes = {f"batch {b}": Regime(batch=b, lr=1.0) for b in (8, 16, *sizes.batches)}
    small, large, both = (
        f"batch {large_batches.SMALL}",
        f"batch {large_batches.LARGE}",
        "batch 512, ghosts",
    )
    regimes[both] = Regime(batch=large_batches.LARGE, lr=1.0, ghost=large_batches.GHOST)
    steps = {name: _step(regime) for name, regime in regimes.items()}
    comparisons: list[Comparison] = [
        paired(steps, rounds=sizes.rounds, warmup=5, seed=seed) for seed in range(sizes.repetitions)
    ]
    found = [
        seen(
            f"images a second/{name}",
            "images/s",
            [regime.batch / each.timings[name].p50 for each in comparisons],
        )
        for name, regime in regimes.items()
    ]
    a_step = [each.ratio(large, small) for each in comparisons]
    arrivals = [_arrivals(batch, sizes) for batch in (large_batches.SMALL, large_batches.LARGE)]
    between = {
        "of an epoch": [ratio * large_batches.SMALL / large_batches.LARGE for ratio in a_step],
        # Pairs repetition i of the timing with seed i of the training.
        "to the training loss": [
            ratio * many / few for ratio, few, many in zip(a_step, *arrivals, strict=True)
        ],
        "of as many updates, with ghosts": [each.ratio(both, small) for each in comparisons],
    }
    return found + [
        seen(f"time ratio, batch 512 over 32/{name}", "ratio", samples)
        for name, samples in between.items()
    ]


# Peers -------------------------------------------------------------------------------------------
PEER_ROUNDS = {"1d": 40, "2d": 5}
GHOSTS = (16, 32, 128)
# The targets of the fast implementation, for ghosts of 32.
BARS = {
    "BatchNorm1d": 1.9,
    "TabNet's GBN": 0.75,
    "BatchNorm2d": 1.2,
    "loop of BatchNorm2d": 1.0,
}


class ChunkLoop(nn.Module):
    """Ghost normalization without a special layer: a BatchNorm2d applied chunk by chunk."""

    def __init__(self, features: int, ghost: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(features)
        self.ghost = ghost

    def forward(self, images: Tensor) -> Tensor:
        """Normalize `images` chunk by chunk."""
        return torch.cat([self.bn(part) for part in images.split(self.ghost)])


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


def layer_times(
    kind: str,
    shape: tuple[int, ...],
    layers: Callable[[int], dict[str, nn.Module]],
    repetitions: int,
) -> list[Measurement]:
    """Time layers on the same tensors in the same rounds: ours, the plain one, the ghost peer."""
    found = []
    for ghost in GHOSTS:
        generator = torch.Generator().manual_seed(ghost)
        gaps, comparisons = [], []
        for seed in range(repetitions):
            made = layers(ghost)
            ours, plain, peer = made
            x = torch.randn(shape, generator=generator).requires_grad_()
            above = torch.randn(shape, generator=generator)
            gaps.append(_layer_gap(made[ours], made[peer], x, above))
            if not gaps[-1] <= 1e-4:
                raise RuntimeError(f"{ours} and {peer} must agree to 1e-4, got {gaps[-1]}")
            passes = {name: _pass(layer, x, above) for name, layer in made.items()}
            comparisons.append(paired(passes, rounds=PEER_ROUNDS[kind], warmup=3, seed=seed))
        times = {
            name: [1e3 * s for each in comparisons for s in each.timings[name].samples]
            for name in made
        }
        details: dict[str, Any] = {
            "shape": list(shape),
            "ghost": ghost,
            "largest gap": max(gaps),
        }
        peers = {name: times[name] for name in (plain, peer)}
        found.append(seen(f"{ours}/ghosts of {ghost}", "ms", times[ours], peers=peers, **details))
        for other in (plain, peer):
            bar = {"bar": BARS[other]} if ghost == 32 else {}
            found.append(
                seen(
                    f"{ours} over {other}/ghosts of {ghost}",
                    "ratio",
                    [each.ratio(ours, other) for each in comparisons],
                    **{**details, **bar},
                )
            )
    return found


@case("layer-time/1d", minutes=0.2, needs="cpu")
def layer_time_1d(sizes: Sizes = FULL) -> list[Measurement]:
    """Forward and backward over [1024, 256], against BatchNorm1d and pytorch-tabnet's layer."""
    return layer_times(
        "1d",
        (1024, 256),
        lambda ghost: {
            "GhostBatchNorm1d": GhostBatchNorm1d(256, ghost_size=ghost, momentum=0.01),
            "BatchNorm1d": nn.BatchNorm1d(256),
            "TabNet's GBN": TabNetGBN(256, virtual_batch_size=ghost, momentum=0.01),
        },
        sizes.repetitions,
    )


@case("layer-time/2d", minutes=0.3, needs="cpu")
def layer_time_2d(sizes: Sizes = FULL) -> list[Measurement]:
    """Forward and backward over [256, 32, 16, 16], against BatchNorm2d and a loop over it."""
    return layer_times(
        "2d",
        (256, 32, 16, 16),
        lambda ghost: {
            "GhostBatchNorm2d": GhostBatchNorm2d(32, ghost_size=ghost),
            "BatchNorm2d": nn.BatchNorm2d(32),
            "loop of BatchNorm2d": ChunkLoop(32, ghost),
        },
        sizes.repetitions,
    )
