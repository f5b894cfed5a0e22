"""Ghost batch normalization: experiments on digits, and speed against TabNet and torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from pytorch_tabnet.tab_network import GBN as TabNetGBN
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runner import Measurement, case
from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d
from labcore.studies.ghost_norm import gradients, large_batches, sharpness
from labcore.studies.ghost_norm.large_batches import GhostRun, Regime
from labcore.timing import Comparison, paired

# Experiments -------------------------------------------------------------------------------------
CONVERGENCE_SEEDS = tuple(range(8))
SWEEP_SEEDS = tuple(range(5))
CHECKS = 32  # measurements of the training loss during a run of the sweep
GRADIENT_BATCHES = (8, 16, 32, 64, 128, 256, 512)
GRADIENT_SEEDS = tuple(range(5))
GRADIENT_STEPS = 32  # training steps before the gradients are measured
DRAWS = 200
RADIUS = 0.4  # length of the random steps, relative to the norm of each unit's weights
REPETITIONS = 8
ROUNDS = 80

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
def tuning() -> list[Measurement]:
    """Validation accuracy by learning rate; the study uses the small batch's best rate."""
    kinds: dict[str, Callable[[float], Regime]] = {
        "small batch": lambda lr: Regime(batch=large_batches.SMALL, lr=lr),
        "large batch": lambda lr: Regime(batch=large_batches.LARGE, lr=lr),
        "large batch, ghosts": lambda lr: Regime(
            batch=large_batches.LARGE, lr=lr, ghost=large_batches.GHOST
        ),
        "small batch, without normalization": lambda lr: Regime(
            batch=large_batches.SMALL, lr=lr, normalized=False
        ),
    }
    found = []
    for name, regime in kinds.items():
        grid = {
            f"{lr:g}": [
                large_batches.train(regime(lr), seed, part="validation").accuracy
                for seed in large_batches.TUNING_SEEDS
            ]
            for lr in large_batches.LEARNING_RATES
        }
        best = max(grid, key=lambda rate, of=grid: fmean(of[rate]))  # type: ignore[misc]
        found.append(
            Measurement(
                quantity=f"validation accuracy/{name}",
                unit="",
                samples=grid[best],
                details={
                    "best": float(best),
                    "accuracy": grid,
                    "seeds": large_batches.TUNING_SEEDS,
                },
            )
        )
    return found


def _points(runs: Sequence[GhostRun], reference: Sequence[GhostRun]) -> list[float]:
    """Return the differences in test accuracy in percentage points, seed by seed."""
    return [100 * (a.accuracy - b.accuracy) for a, b in zip(runs, reference, strict=True)]


def _regime_details(regime: Regime, runs: Sequence[GhostRun]) -> dict[str, object]:
    return {
        "batch": regime.batch,
        "lr": regime.lr,
        "ghost": regime.ghost,
        "updates": regime.updates,
        "seeds": large_batches.SEEDS,
        "refreshed": [run.refreshed for run in runs],
        "test loss": [run.test_loss for run in runs],
        "training accuracy": [run.training_accuracy for run in runs],
        "training loss": [run.training_loss for run in runs],
    }


def _against_small(runs: Mapping[str, Sequence[GhostRun]]) -> list[Measurement]:
    return [
        Measurement(
            quantity=f"minus small batch/{name}",
            unit="percentage points",
            samples=_points(mine, runs["small batch"]),
            details={"seeds": large_batches.SEEDS},
        )
        for name, mine in runs.items()
        if name != "small batch"
    ]


def _trained(regimes: Mapping[str, Regime]) -> dict[str, list[GhostRun]]:
    """Return the runs of each regime on the reported seeds."""
    return {
        n: [large_batches.train(regime, seed) for seed in large_batches.SEEDS]
        for n, regime in regimes.items()
    }


def _accuracies(
    regimes: Mapping[str, Regime], runs: Mapping[str, Sequence[GhostRun]]
) -> list[Measurement]:
    """Return the accuracy of each regime, then its difference from the small batch."""
    accuracies = [
        Measurement(
            quantity=f"accuracy/{name}",
            unit="",
            samples=[run.accuracy for run in mine],
            details=_regime_details(regimes[name], mine),
        )
        for name, mine in runs.items()
    ]
    return accuracies + _against_small(runs)


def _flatness(name: str, runs: Sequence[GhostRun]) -> list[Measurement]:
    """Return the trace of the Hessian at the end of each run, and the rise after a random step."""
    traces, errors, rises = [], [], []
    for seed, run in zip(large_batches.SEEDS, runs, strict=True):
        dice = torch.Generator().manual_seed(seed)
        loss, weights = large_batches.landscape(run.model, large_batches.split(seed))
        trace = sharpness.hessian_trace(loss, weights, generator=dice)
        moved = sharpness.perturbed_losses(loss, weights, radius=RADIUS, generator=dice)
        traces.append(trace.mean)
        errors.append(trace.standard_error)
        rises.append(fmean(moved) - run.training_loss)
    return [
        Measurement(
            quantity=f"trace/{name}",
            unit="nats",
            samples=traces,
            details={"standard error": errors, "seeds": large_batches.SEEDS},
        ),
        Measurement(
            quantity=f"rise/{name}",
            unit="nats",
            samples=rises,
            details={"radius": RADIUS, "seeds": large_batches.SEEDS},
        ),
    ]


@case("digits/regimes", minutes=2.5)
def regimes() -> list[Measurement]:
    """Every regime of the study on the reported seeds: accuracy, differences, sharpness."""
    runs = _trained(large_batches.REGIMES)
    effects = [
        Measurement(
            quantity=f"ghosts' own effect/{name}",
            unit="percentage points",
            samples=_points(runs[ghosts], runs[whole]),
            details={"with": ghosts, "without": whole, "seeds": large_batches.SEEDS},
        )
        for name, (ghosts, whole) in OWN_EFFECT.items()
    ]
    flatness = [item for name, mine in runs.items() for item in _flatness(name, mine)]
    return _accuracies(large_batches.REGIMES, runs) + effects + flatness


@case("digits/plain", minutes=0.4)
def without_normalization() -> list[Measurement]:
    """A network without batch normalization: the small batch compared with the large one."""
    return _accuracies(large_batches.PLAIN_REGIMES, _trained(large_batches.PLAIN_REGIMES))


def _arrivals(batch: int) -> list[int]:
    """Return, for each seed, the steps to the target; the budget plus 1 if it isn't reached."""
    regime = large_batches.sweep_regime(batch, batch)
    until = functools.partial(
        large_batches.train, regime, check_every=1, until=large_batches.TARGET
    )
    steps = (until(seed).steps_to(large_batches.TARGET) for seed in CONVERGENCE_SEEDS)
    return [regime.updates + 1 if step is None else step for step in steps]


@case("digits/convergence", minutes=0.1)
def convergence() -> list[Measurement]:
    """Steps and images until the training loss is at most the target, by batch size."""
    steps, found = {}, []
    for batch in large_batches.SWEEP_BATCHES:
        steps[batch] = _arrivals(batch)
        found.append(
            Measurement(
                quantity=f"steps/batch {batch}",
                unit="steps",
                samples=steps[batch],
                details={
                    "images": [batch * step for step in steps[batch]],
                    "lr": large_batches.sweep_regime(batch, batch).lr,
                    "target": large_batches.TARGET,
                    "seeds": CONVERGENCE_SEEDS,
                },
            )
        )
    ratios = [
        a / b for a, b in zip(steps[large_batches.LARGE], steps[large_batches.SMALL], strict=True)
    ]
    name = f"batch {large_batches.LARGE} over {large_batches.SMALL}"
    by_unit = {"steps": 1.0, "images": large_batches.LARGE / large_batches.SMALL}
    return found + [
        Measurement(
            quantity=f"{unit} ratio/{name}",
            unit="ratio",
            samples=[factor * ratio for ratio in ratios],
            details={"seeds": CONVERGENCE_SEEDS},
        )
        for unit, factor in by_unit.items()
    ]


def _sweep_point(batch: int, ghost: int, budget: str) -> dict[str, object]:
    regime = large_batches.sweep_regime(batch, ghost, many=budget == "updates")
    every = max(1, regime.updates // CHECKS)
    runs = [large_batches.train(regime, seed, check_every=every) for seed in SWEEP_SEEDS]
    steps = [step for step, _ in runs[0].checks]
    losses = [fmean(at) for at in zip(*([x for _, x in r.checks] for r in runs), strict=True)]
    return {
        "accuracy": [run.accuracy for run in runs],
        "steps": steps,
        "loss": [float(f"{x:.4g}") for x in losses],
    }


@case("digits/sweep", minutes=2)
def sweep() -> list[Measurement]:
    """Accuracy by batch and ghost size at equal epochs and at equal updates, for the explorer."""
    found = []
    for batch, budget in itertools.product(large_batches.SWEEP_BATCHES, ("epochs", "updates")):
        points = {
            str(ghost): _sweep_point(batch, ghost, budget)
            for ghost in large_batches.SWEEP_GHOSTS
            if ghost <= batch
        }
        found.append(
            Measurement(
                quantity=f"accuracy/batch {batch}, equal {budget}",
                unit="",
                samples=points[str(batch)]["accuracy"],  # type: ignore[arg-type]
                details={"ghosts": points, "seeds": SWEEP_SEEDS},
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


def _gradient_row(name: str, seed: int) -> dict[str, list[float]]:
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
        drawn = draw(run.model, batch=batch, draws=DRAWS)
        row["variance"].append(gradients.gradient_variance(drawn) / full.square().sum().item())
        row["bias"].append(gradients.gradient_bias(drawn, full))
    return row


@case("gradients/variance", minutes=0.6)
def gradient_variance() -> list[Measurement]:
    """Variance of a batch's gradient by batch size, compared with 1/B; and the bias of its mean."""
    found = []
    for name in GRADIENT_KINDS:
        rows = [_gradient_row(name, seed) for seed in GRADIENT_SEEDS]
        small, large = (GRADIENT_BATCHES.index(batch) for batch in (32, 256))
        found.append(
            Measurement(
                quantity=f"variance ratio, batch 256 over 32/{name}",
                unit="ratio",
                samples=[row["variance"][large] / row["variance"][small] for row in rows],
                details={
                    "predicted": gradients.predict_gradient_variance(
                        1.0, 32, [256], large_batches.IMAGES
                    ),
                    "batches": GRADIENT_BATCHES,
                    "variance": [row["variance"] for row in rows],
                    "bias": [row["bias"] for row in rows],
                    "seeds": GRADIENT_SEEDS,
                    "draws": DRAWS,
                },
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
def throughput() -> list[Measurement]:
    """Images per second by batch size, and the training time with a large batch."""
    regimes = {f"batch {b}": Regime(batch=b, lr=1.0) for b in (8, 16, *large_batches.SWEEP_BATCHES)}
    small, large, both = (
        f"batch {large_batches.SMALL}",
        f"batch {large_batches.LARGE}",
        "batch 512, ghosts",
    )
    regimes[both] = Regime(batch=large_batches.LARGE, lr=1.0, ghost=large_batches.GHOST)
    steps = {name: _step(regime) for name, regime in regimes.items()}
    comparisons: list[Comparison] = [
        paired(steps, rounds=ROUNDS, warmup=5, seed=seed) for seed in range(REPETITIONS)
    ]
    found = [
        Measurement(
            quantity=f"images a second/{name}",
            unit="images/s",
            samples=[regime.batch / each.timings[name].p50 for each in comparisons],
        )
        for name, regime in regimes.items()
    ]
    a_step = [each.ratio(large, small) for each in comparisons]
    arrivals = [_arrivals(batch) for batch in (large_batches.SMALL, large_batches.LARGE)]
    ratios = {
        "of an epoch": [ratio * large_batches.SMALL / large_batches.LARGE for ratio in a_step],
        # Pairs repetition i of the timing with seed i of the training.
        "to the training loss": [
            ratio * many / few for ratio, few, many in zip(a_step, *arrivals, strict=True)
        ],
        "of as many updates, with ghosts": [each.ratio(both, small) for each in comparisons],
    }
    return found + [
        Measurement(quantity=f"time ratio, batch 512 over 32/{name}", unit="ratio", samples=samples)
        for name, samples in ratios.items()
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
    kind: str, shape: tuple[int, ...], layers: Callable[[int], dict[str, nn.Module]]
) -> list[Measurement]:
    """Time layers on the same tensors in the same rounds: ours, the plain one, the ghost peer."""
    found = []
    for ghost in GHOSTS:
        generator = torch.Generator().manual_seed(ghost)
        gaps, comparisons = [], []
        for seed in range(REPETITIONS):
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
        details = {"shape": list(shape), "ghost": ghost, "largest gap": max(gaps)}
        found.append(
            Measurement(
                quantity=f"{ours}/ghosts of {ghost}",
                unit="ms",
                samples=times[ours],
                peers={name: times[name] for name in (plain, peer)},
                details=details,
            )
        )
        for other in (plain, peer):
            bar = {"bar": BARS[other]} if ghost == 32 else {}
            found.append(
                Measurement(
                    quantity=f"{ours} over {other}/ghosts of {ghost}",
                    unit="ratio",
                    samples=[each.ratio(ours, other) for each in comparisons],
                    details={**details, **bar},
                )
            )
    return found


@case("layer-time/1d", minutes=0.2, needs="cpu")
def layer_time_1d() -> list[Measurement]:
    """Forward and backward over [1024, 256], against BatchNorm1d and pytorch-tabnet's layer."""
    return layer_times(
        "1d",
        (1024, 256),
        lambda ghost: {
            "GhostBatchNorm1d": GhostBatchNorm1d(256, ghost_size=ghost, momentum=0.01),
            "BatchNorm1d": nn.BatchNorm1d(256),
            "TabNet's GBN": TabNetGBN(256, virtual_batch_size=ghost, momentum=0.01),
        },
    )


@case("layer-time/2d", minutes=0.3, needs="cpu")
def layer_time_2d() -> list[Measurement]:
    """Forward and backward over [256, 32, 16, 16], against BatchNorm2d and a loop over it."""
    return layer_times(
        "2d",
        (256, 32, 16, 16),
        lambda ghost: {
            "GhostBatchNorm2d": GhostBatchNorm2d(32, ghost_size=ghost),
            "BatchNorm2d": nn.BatchNorm2d(32),
            "loop of BatchNorm2d": ChunkLoop(32, ghost),
        },
    )
