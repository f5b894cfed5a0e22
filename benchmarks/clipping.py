"""Gradient clipping: experiments with exploding gradients, and speed against torch and zclip."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zclip
from torch import Tensor, nn

from benchmarks.lion import parameters, quarter_gpt2
from benchmarks.runner import Measurement, case, seen
from labcore.clipping import (
    AutoClip,
    ZClip,
    clip_adaptive,
    clip_by_global_norm,
    clip_by_local_norm,
    clip_by_value,
)
from labcore.studies.clipping import effects, exploding, networks
from labcore.studies.clipping.exploding import ClippedRun
from labcore.timing import paired

DEEP = 16  # convolutions in the experiments on depth
DEFAULT = 6**-0.5  # the gain with the variance of torch's default uniform weights
FRESH: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "RNN, He": ("RNN", {"gain": 1.0}),
    "RNN, torch's default": ("RNN", {"gain": DEFAULT}),
    "RNN, tanh, torch's default": ("RNN", {"gain": DEFAULT, "activation": "tanh"}),
    "conv, He": ("conv", {"gain": 1.0, "depth": DEEP}),
    "conv, half more than He": ("conv", {"gain": 1.5, "depth": DEEP}),
    "conv, torch's default": ("conv", {"gain": DEFAULT, "depth": DEEP}),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    seeds: tuple[int, ...] = exploding.SEEDS
    steps: int = exploding.STEPS
    bad_step: int = exploding.BAD_STEP
    batch: Mapping[str, int] = field(default_factory=lambda: exploding.BATCH)
    # Network -> arguments of its class that replace those of every experiment.
    networks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"RNN": {}, "conv": {}}
    )
    loud: Mapping[str, str] = field(default_factory=lambda: exploding.LOUD)
    depths: tuple[int, ...] = (2, 4, 8, 16)
    shapes: Sequence[tuple[int, ...]] = field(default_factory=quarter_gpt2)  # of peers' gradients

    def training(self, network: str) -> dict[str, Any]:
        """Return the arguments of a run that the sizes set."""
        return {"steps": self.steps, "batch": self.batch[network], **self.networks[network]}


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1),
    steps=24,
    bad_step=21,
    batch={"RNN": 2, "conv": 4},
    networks={
        "RNN": {"width": 10, "gain": 0.5},
        "conv": {"depth": 3, "channels": 3, "gain": 1.0},
    },
    loud={"RNN": "recurrent.", "conv": "layers.1."},
    depths=(2, 3),
    shapes=[(7, 3), (5,)],
)


# Experiments -------------------------------------------------------------------------------------
def growth_of(model: networks.Network, network: str, seed: int) -> networks.Growth:
    """Return the growth of a gradient in `model`, on a batch that isn't used for training."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    return networks.growth(model, *networks.draw(network, 64, generator=generator))


@case("growth/factor", minutes=0.5)
def growth_factor(sizes: Sizes = FULL) -> list[Measurement]:
    """Growth factor of a gradient per step back through time or depth, fresh and trained."""
    found: dict[str, list[networks.Growth]] = {}
    for name, (network, settings) in FRESH.items():
        arguments = {**settings, **sizes.networks[network]}
        found[name] = [
            growth_of(networks.make(network, seed=seed, **arguments), network, seed)
            for seed in sizes.seeds
        ]
    for network in networks.NETWORKS:
        found[f"{network}, trained"] = [
            growth_of(_clean(network, "AdamW", seed, sizes).model, network, seed)
            for seed in sizes.seeds
        ]
    return [
        Measurement(
            quantity=f"factor/{name}",
            unit="a step back",
            samples=[each.factor for each in growths],
            peers={"predicted": [each.predicted_factor for each in growths]},
            details={
                "seeds": sizes.seeds,
                "whole way": [each.rms[0] / each.rms[-1] for each in growths],
            },
        )
        for name, growths in found.items()
    ]


def _clean(network: str, optimizer: str, seed: int, sizes: Sizes) -> ClippedRun:
    return exploding.bad_batch(
        network, "none", optimizer, seed, factor=1.0, **sizes.training(network)
    )


@case("direction/depth", minutes=0.2)
def direction_by_depth(sizes: Sizes = FULL) -> list[Measurement]:
    """Cosine between a fresh network's raw gradient and the one clipped to a tenth of its norm."""
    conv = {**exploding.HEALTHY["conv"], **sizes.networks["conv"]}
    found: list[Measurement] = []
    for depth in sizes.depths:
        found += _cosines(f"conv of {depth}", "conv", {**conv, "depth": depth}, sizes)
    local = {
        item.quantity: item.samples for item in found if item.quantity.endswith("local, per layer")
    }
    shallow, *_, deepest = local.values()
    found.append(
        seen(
            f"local cosine, {sizes.depths[-1]} convolutions minus {sizes.depths[0]}",
            "",
            [one - other for one, other in zip(deepest, shallow, strict=True)],
            seeds=sizes.seeds,
        )
    )
    recurrent = {**exploding.EXPLODING, **sizes.networks["RNN"]}
    found += _cosines("RNN", "RNN", recurrent, sizes)
    loud = exploding.loud_layer(sizes.loud["conv"], exploding.FACTOR)
    return found + _cosines("conv, a loud layer", "conv", {**conv, "spoil": loud}, sizes)


def _cosines(
    name: str, network: str, settings: Mapping[str, Any], sizes: Sizes
) -> list[Measurement]:
    taken = [effects.snapshot(network, seed=seed, **settings) for seed in sizes.seeds]
    found = []
    for choice in exploding.COMPARABLE:
        effect = [
            effects.effect(each, exploding.comparable(choice, each, _tenth(each))) for each in taken
        ]
        found.append(
            seen(
                f"cosine/{name}, {choice}",
                "",
                [each.cosine for each in effect],
                seeds=sizes.seeds,
                kept=[each.kept for each in effect],
            )
        )
    return found


def _tenth(taken: effects.Snapshot) -> float:
    return float(effects.flat(taken.gradients).norm()) / 10


BAD_METHODS = {
    "RNN": ("none", *(name for name in exploding.METHODS if name != "local, per parameter")),
    "conv": ("none", "global", "local, per layer"),
}


def bad_batch(network: str, sizes: Sizes) -> list[Measurement]:
    """Measure the effect of one bad batch under each method: its step, and the accuracy lost."""
    found = []
    for optimizer in exploding.OPTIMIZERS:
        clean = [_clean(network, optimizer, seed, sizes).accuracy for seed in sizes.seeds]
        for method in BAD_METHODS[network]:
            runs = [
                exploding.bad_batch(
                    network, method, optimizer, s, at=sizes.bad_step, **sizes.training(network)
                )
                for s in sizes.seeds
            ]
            found += _of_runs(f"{optimizer}, {method}", runs, clean, sizes)
            found.append(
                Measurement(
                    quantity=f"bad step over its median/{optimizer}, {method}",
                    unit="ratio",
                    samples=[bad_step(run.moves, sizes.bad_step) for run in runs],
                    details={
                        "seeds": sizes.seeds,
                        "last steps": [last_steps(run, sizes.bad_step) for run in runs],
                    },
                )
            )
    return found


def usual_step(moves: Sequence[float], at: int) -> float:
    """Return the median of the 20 steps before the bad batch, which is step `at`."""
    return statistics.median(moves[at - 20 : at])


def bad_step(moves: Sequence[float], at: int) -> float:
    """Return the ratio of the step at the bad batch to the usual step."""
    return moves[at] / usual_step(moves, at)


def last_steps(run: ClippedRun, at: int) -> float | None:
    """Return the ratio of the last 20 steps' median to the usual step; None if the run diverged."""
    if not run.finite:
        return None
    return statistics.median(run.moves[-20:]) / usual_step(run.moves, at)


def _of_runs(
    name: str, runs: Sequence[ClippedRun], clean: Sequence[float], sizes: Sizes
) -> list[Measurement]:
    details: dict[str, Any] = {
        "seeds": sizes.seeds,
        "accuracy": [run.accuracy for run in runs],
        "clean": clean,
        "mean cosine of the clipped steps": [clipped_cosine(run) for run in runs],
        "losses of the first seed": finite(runs[0].losses),
    }
    lost = [100 * (before - run.accuracy) for before, run in zip(clean, runs, strict=True)]
    return [
        seen(f"accuracy lost/{name}", "percentage points", lost, **details),
        seen(
            f"not finite/{name}",
            "share of runs",
            [float(not run.finite) for run in runs],
            seeds=sizes.seeds,
            steps=[len(run.losses) for run in runs],
        ),
    ]


def clipped_cosine(run: ClippedRun) -> float | None:
    """Return the mean cosine to the raw gradient over the clipped steps; None if there are none."""
    pairs = zip(run.cosines, run.kept, strict=True)
    clipped = [cosine for cosine, kept in pairs if kept < 0.999]
    return statistics.fmean(clipped) if clipped else None


def finite(values: Sequence[float]) -> list[float | None]:
    """Replace NaN and infinity, which JSON doesn't have, by None."""
    return [round(value, 3) if math.isfinite(value) else None for value in values]


@case("bad-batch/RNN", minutes=1)
def bad_batch_recurrent(sizes: Sizes = FULL) -> list[Measurement]:
    """One bad batch in the recurrent network."""
    return bad_batch("RNN", sizes)


@case("bad-batch/conv", minutes=1)
def bad_batch_convolutional(sizes: Sizes = FULL) -> list[Measurement]:
    """One bad batch in the convolutional network."""
    return bad_batch("conv", sizes)


@case("natural/RNN", minutes=0.6)
def natural(sizes: Sizes = FULL) -> list[Measurement]:
    """The recurrent network with He initialization, whose gradients explode by themselves."""

    def trained(method: str, optimizer: str) -> list[ClippedRun]:
        training = sizes.training("RNN")
        return [exploding.natural(method, optimizer, seed, **training) for seed in sizes.seeds]

    found = []
    for optimizer in exploding.OPTIMIZERS:
        clean = [run.accuracy for run in trained("global", optimizer)]
        for method in ("none", "local, per layer", "ZClip"):
            runs = trained(method, optimizer)
            found += _of_runs(f"{optimizer}, {method}", runs, clean, sizes)
            found.append(
                seen(
                    f"largest step over the weights/{optimizer}, {method}",
                    "ratio",
                    [max(filter(math.isfinite, run.moves)) for run in runs],
                    seeds=sizes.seeds,
                )
            )
    return found


@case("loud-layer/training", minutes=1)
def loud_layer(sizes: Sizes = FULL) -> list[Measurement]:
    """Accuracy, local minus global, when one layer's gradient is always 1000 times too large."""
    found = []
    for network in networks.NETWORKS:
        loud = {"layer": sizes.loud[network], **sizes.training(network)}
        for optimizer in exploding.OPTIMIZERS:
            accuracy = {
                method: [
                    exploding.loud_run(network, method, optimizer, seed, **loud).accuracy
                    for seed in sizes.seeds
                ]
                for method in ("none", "global", "local, per layer")
            }
            pairs = zip(accuracy["local, per layer"], accuracy["global"], strict=True)
            found.append(
                seen(
                    f"local minus global/{network}, {optimizer}",
                    "percentage points",
                    [100 * (local - whole) for local, whole in pairs],
                    seeds=sizes.seeds,
                    accuracy=accuracy,
                )
            )
    return found


@case("loud-layer/first-step", minutes=0.2)
def loud_first_step(sizes: Sizes = FULL) -> list[Measurement]:
    """Size of the healthy layers' first step, relative to training without the loud layer."""
    return [
        seen(
            f"healthy layers keep/{network}, {optimizer}, {method}",
            "share of the step",
            [healthy_step(network, make, method, seed, sizes) for seed in sizes.seeds],
            seeds=sizes.seeds,
        )
        for network in networks.NETWORKS
        for optimizer, make in exploding.OPTIMIZERS.items()
        for method in ("global", "local, per layer")
    ]


def healthy_step(
    network: str,
    make: Callable[..., torch.optim.Optimizer],
    method: str,
    seed: int,
    sizes: Sizes,
) -> float:
    """Return the mean share of the healthy layers' first step that a loud layer leaves."""
    layer = sizes.loud[network]
    settings = {**exploding.HEALTHY[network], **sizes.networks[network]}
    steps = []
    for spoil in (None, exploding.loud_layer(layer, exploding.FACTOR)):
        taken = effects.snapshot(network, seed=seed, spoil=spoil, **settings)
        steps.append(effects.step_sizes(taken, exploding.method(method, network), make))
    return statistics.fmean(
        loud / quiet
        for name, quiet, loud in zip(taken.names, *steps, strict=True)
        if not name.startswith(layer)
    )


# Peers -------------------------------------------------------------------------------------------
REPETITIONS, ROUNDS = 8, 15
BARS = {"clipping": 1.05, "not clipping": 0.7}
SHRINK = 0.999


class Limit:
    """A limit that falls by 0.1% per call, which makes every call clip the shared gradients."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.value = exact_norm(params)

    def __call__(self) -> float:
        """Return the next limit."""
        self.value *= SHRINK
        return self.value


def exact_norm(params: Sequence[Tensor]) -> float:
    """Return the norm of all gradients, in float64."""
    grads = [p.grad for p in params if p.grad is not None]
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def _same_or_refuse(shapes: Sequence[tuple[int, ...]], limit: float) -> float:
    """Return the largest gap between our gradients and torch's after one call.

    Raises RuntimeError if it is too large to time the two.
    """
    ours, theirs = parameters(shapes), parameters(shapes)
    clip_by_global_norm(ours, limit)
    nn.utils.clip_grad_norm_(theirs, limit, foreach=True)
    gap = max(float((a.grad - b.grad).abs().max()) for a, b in zip(ours, theirs, strict=True))  # type: ignore[operator]
    if not gap <= 1e-5:
        raise RuntimeError(
            f"labcore's gradients and torch's must agree to 1e-5 before they are timed, got {gap}"
        )
    return gap


def clip_times(name: str, sizes: Sizes) -> list[Measurement]:
    """Time our clipping and torch's foreach clipping on the same gradients, in the same rounds."""
    gap = _same_or_refuse(sizes.shapes, 1.0 if name == "clipping" else math.inf)
    comparisons, coefficients = [], []
    for seed in range(REPETITIONS):
        params = parameters(sizes.shapes)
        limit: Callable[[], float] = Limit(params) if name == "clipping" else lambda: 1e9

        def ours(params: Sequence[Tensor] = params, limit: Callable[[], float] = limit) -> None:
            coefficients.append(float(clip_by_global_norm(params, limit()).coefficients))

        def torchs(params: Sequence[Tensor] = params, limit: Callable[[], float] = limit) -> None:
            nn.utils.clip_grad_norm_(params, limit(), foreach=True)

        both = {"labcore": ours, "torch foreach": torchs}
        comparisons.append(paired(both, rounds=ROUNDS, warmup=2, seed=seed))
    if any((factor < 1) != (name == "clipping") for factor in coefficients):
        raise RuntimeError(f"every call must be {name}, got coefficients {coefficients}")
    milliseconds = {
        side: [1e3 * t for each in comparisons for t in each.timings[side].samples]
        for side in ("labcore", "torch foreach")
    }
    details: dict[str, Any] = {
        "tensors": len(params),
        "largest gap": gap,
        "bar": BARS[name],
    }
    return [
        seen(
            "labcore over torch foreach",
            "ratio",
            [each.ratio("labcore", "torch foreach") for each in comparisons],
            **details,
        ),
        seen(
            "clip_by_global_norm",
            "ms",
            milliseconds["labcore"],
            peers={"torch foreach": milliseconds["torch foreach"]},
            **details,
        ),
    ]


@case("clip-time/clipping", minutes=0.15, needs="cpu")
def clip_time_clipping(sizes: Sizes = FULL) -> list[Measurement]:
    """A model's gradients, above the limit in every call: they are read once and scaled."""
    return clip_times("clipping", sizes)


@case("clip-time/not-clipping", minutes=0.15, needs="cpu")
def clip_time_not_clipping(sizes: Sizes = FULL) -> list[Measurement]:
    """The same below the limit, like most steps: torch still multiplies by 1."""
    return clip_times("not clipping", sizes)


@case("clip-time/methods", minutes=0.2, needs="cpu")
def clip_time_methods(sizes: Sizes = FULL) -> list[Measurement]:
    """The other methods when no gradient has to change, against the zclip package and torch."""
    params = [nn.Parameter(p.detach()) for p in parameters(sizes.shapes)]
    named = [(f"{i // 2}.{i % 2}", p) for i, p in enumerate(params)]
    for param in params:
        param.grad = 1e-6 * param.detach()
    zclip_ours, zclip_theirs = ZClip(), zclip.ZClip(max_grad_norm=None)
    model, autoclip = nn.ParameterList(params), AutoClip(100.0)
    functions: dict[str, Callable[[], object]] = {
        "global": lambda: clip_by_global_norm(params, 1e9),
        "per parameter": lambda: clip_by_local_norm(params, 1e9),
        "per layer": lambda: clip_by_local_norm(named, 1e9, by="layer"),
        "value": lambda: clip_by_value(params, 1e9),
        "AGC": lambda: clip_adaptive(params),
        "AutoClip": lambda: autoclip.clip(params),
        "ZClip": lambda: zclip_ours.clip(params),
        "zclip's package": lambda: zclip_theirs.step(model),
        "torch foreach": lambda: nn.utils.clip_grad_norm_(params, 1e9, foreach=True),
        "torch value": lambda: nn.utils.clip_grad_value_(params, 1e9, foreach=True),
    }
    measured = paired(functions, rounds=30, warmup=2)
    times = {name: [1e3 * t for t in timing.samples] for name, timing in measured.timings.items()}
    return [
        seen(
            name,
            "ms",
            times[name],
            peers={other: each for other, each in times.items() if other != name},
        )
        for name in functions
        if not name.startswith(("torch", "zclip"))
    ]


SCALES = {"normal": 1e-2, "1e21": 1e21, "1e-30": 1e-30}


@case("clip-accuracy", minutes=0.1)
def clip_accuracy(sizes: Sizes = FULL) -> list[Measurement]:
    """Relative error of the total norm against float64, and the norm of the clipped gradients.

    The error is relative to the larger of the two norms, which makes it 1 if a norm overflows.
    """
    found = []
    for name, scale in SCALES.items():
        params = parameters(sizes.shapes)
        for param in params:
            param.grad = param.grad * (scale / 1e-2)  # type: ignore[operator, assignment]
        exact = exact_norm(params)
        norms = {
            "labcore": float(clip_by_global_norm(params, math.inf).norm),
            "torch": float(nn.utils.get_total_norm([p.grad for p in params])),  # type: ignore[misc]
        }
        errors = {side: [1 - min(norm, exact) / max(norm, exact)] for side, norm in norms.items()}
        limit = min(1.0, exact / 2)
        ends = {}
        for side, clip in (("labcore", clip_by_global_norm), ("torch", nn.utils.clip_grad_norm_)):
            copies = [nn.Parameter(p.detach()) for p in params]
            for copy, param in zip(copies, params, strict=True):
                copy.grad = param.grad.clone()  # type: ignore[union-attr]
            clip(copies, limit)
            ends[side] = [exact_norm(copies) / limit]
        details: dict[str, Any] = {"exact": exact, "limit": limit, "bar": 1e-6}
        for quantity, unit, each in (
            (f"relative error/{name}", "", errors),
            (f"norm over limit/{name}", "ratio", ends),
        ):
            peers = {"torch": each["torch"]}
            found.append(seen(quantity, unit, each["labcore"], peers=peers, **details))
    return found
