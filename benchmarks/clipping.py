"""Gradient clipping: experiments with exploding gradients, and speed against torch and zclip."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import zclip
from torch import Tensor, nn

from benchmarks.lion import parameters, quarter_gpt2
from benchmarks.runner import Measurement, case
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

# Experiments -------------------------------------------------------------------------------------
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


def growth_of(model: networks.Network, network: str, seed: int) -> networks.Growth:
    """Return the growth of a gradient in `model`, on a batch that isn't used for training."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    return networks.growth(model, *networks.draw(network, 64, generator=generator))


@case("growth/factor", minutes=0.5)
def growth_factor() -> list[Measurement]:
    """Growth factor of a gradient per step back through time or depth, fresh and trained."""
    found = {
        name: [
            growth_of(networks.make(network, seed=seed, **settings), network, seed)
            for seed in exploding.SEEDS
        ]
        for name, (network, settings) in FRESH.items()
    }
    for network in networks.NETWORKS:
        runs = [
            exploding.bad_batch(network, "none", "AdamW", s, factor=1.0) for s in exploding.SEEDS
        ]
        found[f"{network}, trained"] = [
            growth_of(run.model, network, seed)
            for run, seed in zip(runs, exploding.SEEDS, strict=True)
        ]
    return [
        Measurement(
            quantity=f"factor/{name}",
            unit="a step back",
            samples=[each.factor for each in growths],
            peers={"predicted": [each.predicted_factor for each in growths]},
            details={
                "seeds": exploding.SEEDS,
                "whole way": [each.rms[0] / each.rms[-1] for each in growths],
            },
        )
        for name, growths in found.items()
    ]


DEPTHS = (2, 4, 8, 16)


@case("direction/depth", minutes=0.2)
def direction_by_depth() -> list[Measurement]:
    """Cosine between a fresh network's raw gradient and the one clipped to a tenth of its norm."""
    found: list[Measurement] = []
    for depth in DEPTHS:
        deep = {**exploding.HEALTHY["conv"], "depth": depth}
        taken = [effects.snapshot("conv", seed=seed, **deep) for seed in exploding.SEEDS]
        found += _cosines(f"conv of {depth}", taken)
    local = {
        item.quantity: item.samples for item in found if item.quantity.endswith("local, per layer")
    }
    shallow, *_, deepest = local.values()
    found.append(
        Measurement(
            quantity=f"local cosine, {DEPTHS[-1]} convolutions minus {DEPTHS[0]}",
            unit="",
            samples=[one - other for one, other in zip(deepest, shallow, strict=True)],
            details={"seeds": exploding.SEEDS},
        )
    )
    loud = exploding.loud_layer(exploding.LOUD["conv"], exploding.FACTOR)
    cases: dict[str, tuple[str, Mapping[str, Any], effects.Spoil | None]] = {
        "RNN": ("RNN", exploding.EXPLODING, None),
        "conv, a loud layer": ("conv", exploding.HEALTHY["conv"], loud),
    }
    for name, (network, settings, spoil) in cases.items():
        taken = [
            effects.snapshot(network, seed=seed, spoil=spoil, **settings)
            for seed in exploding.SEEDS
        ]
        found += _cosines(name, taken)
    return found


def _cosines(name: str, taken: Sequence[effects.Snapshot]) -> list[Measurement]:
    found = []
    for choice in exploding.COMPARABLE:
        effect = [
            effects.effect(each, exploding.comparable(choice, each, _tenth(each))) for each in taken
        ]
        found.append(
            Measurement(
                quantity=f"cosine/{name}, {choice}",
                unit="",
                samples=[each.cosine for each in effect],
                details={"seeds": exploding.SEEDS, "kept": [each.kept for each in effect]},
            )
        )
    return found


def _tenth(taken: effects.Snapshot) -> float:
    return float(effects.flat(taken.gradients).norm()) / 10


BAD_METHODS = {
    "RNN": ("none", *(name for name in exploding.METHODS if name != "local, per parameter")),
    "conv": ("none", "global", "local, per layer"),
}


def bad_batch(network: str) -> list[Measurement]:
    """Measure the effect of one bad batch under each method: its step, and the accuracy lost."""
    found = []
    for optimizer in exploding.OPTIMIZERS:
        clean = [
            exploding.bad_batch(network, "none", optimizer, seed, factor=1.0).accuracy
            for seed in exploding.SEEDS
        ]
        for method in BAD_METHODS[network]:
            runs = [
                exploding.bad_batch(network, method, optimizer, seed) for seed in exploding.SEEDS
            ]
            found += _of_runs(f"{optimizer}, {method}", runs, clean)
            found.append(
                Measurement(
                    quantity=f"bad step over its median/{optimizer}, {method}",
                    unit="ratio",
                    samples=[bad_step(run.moves) for run in runs],
                    details={"seeds": exploding.SEEDS, "last steps": [last_steps(r) for r in runs]},
                )
            )
    return found


def usual_step(moves: Sequence[float]) -> float:
    """Return the median of the 20 steps before the bad batch."""
    return statistics.median(moves[exploding.BAD_STEP - 20 : exploding.BAD_STEP])


def bad_step(moves: Sequence[float]) -> float:
    """Return the ratio of the step at the bad batch to the usual step."""
    return moves[exploding.BAD_STEP] / usual_step(moves)


def last_steps(run: ClippedRun) -> float | None:
    """Return the ratio of the last 20 steps' median to the usual step; None if the run diverged."""
    if not run.finite:
        return None
    return statistics.median(run.moves[-20:]) / usual_step(run.moves)


def _of_runs(name: str, runs: Sequence[ClippedRun], clean: Sequence[float]) -> list[Measurement]:
    details = {
        "seeds": exploding.SEEDS,
        "accuracy": [run.accuracy for run in runs],
        "clean": clean,
        "mean cosine of the clipped steps": [clipped_cosine(run) for run in runs],
        "losses of the first seed": finite(runs[0].losses),
    }
    return [
        Measurement(
            quantity=f"accuracy lost/{name}",
            unit="percentage points",
            samples=[
                100 * (before - run.accuracy) for before, run in zip(clean, runs, strict=True)
            ],
            details=details,
        ),
        Measurement(
            quantity=f"not finite/{name}",
            unit="share of runs",
            samples=[float(not run.finite) for run in runs],
            details={"seeds": exploding.SEEDS, "steps": [len(run.losses) for run in runs]},
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
def bad_batch_recurrent() -> list[Measurement]:
    """One bad batch in the recurrent network."""
    return bad_batch("RNN")


@case("bad-batch/conv", minutes=1)
def bad_batch_convolutional() -> list[Measurement]:
    """One bad batch in the convolutional network."""
    return bad_batch("conv")


@case("natural/RNN", minutes=0.6)
def natural() -> list[Measurement]:
    """The recurrent network with He initialization, whose gradients explode by themselves."""
    found = []
    for optimizer in exploding.OPTIMIZERS:
        clean = [exploding.natural("global", optimizer, seed).accuracy for seed in exploding.SEEDS]
        for method in ("none", "local, per layer", "ZClip"):
            runs = [exploding.natural(method, optimizer, seed) for seed in exploding.SEEDS]
            found += _of_runs(f"{optimizer}, {method}", runs, clean)
            found.append(
                Measurement(
                    quantity=f"largest step over the weights/{optimizer}, {method}",
                    unit="ratio",
                    samples=[max(filter(math.isfinite, run.moves)) for run in runs],
                    details={"seeds": exploding.SEEDS},
                )
            )
    return found


@case("loud-layer/training", minutes=1)
def loud_layer() -> list[Measurement]:
    """Accuracy, local minus global, when one layer's gradient is always 1000 times too large."""
    found = []
    for network in networks.NETWORKS:
        for optimizer in exploding.OPTIMIZERS:
            accuracy = {
                method: [
                    exploding.loud_run(network, method, optimizer, seed).accuracy
                    for seed in exploding.SEEDS
                ]
                for method in ("none", "global", "local, per layer")
            }
            pairs = zip(accuracy["local, per layer"], accuracy["global"], strict=True)
            found.append(
                Measurement(
                    quantity=f"local minus global/{network}, {optimizer}",
                    unit="percentage points",
                    samples=[100 * (local - whole) for local, whole in pairs],
                    details={"seeds": exploding.SEEDS, "accuracy": accuracy},
                )
            )
    return found


@case("loud-layer/first-step", minutes=0.2)
def loud_first_step() -> list[Measurement]:
    """Size of the healthy layers' first step, relative to training without the loud layer."""
    found = []
    for network in networks.NETWORKS:
        for optimizer, make in exploding.OPTIMIZERS.items():
            for method in ("global", "local, per layer"):
                kept = [healthy_step(network, make, method, seed) for seed in exploding.SEEDS]
                found.append(
                    Measurement(
                        quantity=f"healthy layers keep/{network}, {optimizer}, {method}",
                        unit="share of the step",
                        samples=kept,
                        details={"seeds": exploding.SEEDS},
                    )
                )
    return found


def healthy_step(
    network: str, make: Callable[..., torch.optim.Optimizer], method: str, seed: int
) -> float:
    """Return the mean share of the healthy layers' first step that a loud layer leaves."""
    layer = exploding.LOUD[network]
    sizes = []
    for spoil in (None, exploding.loud_layer(layer, exploding.FACTOR)):
        taken = effects.snapshot(network, seed=seed, spoil=spoil, **exploding.HEALTHY[network])
        sizes.append(effects.step_sizes(taken, exploding.method(method, network), make))
    names = taken.names
    return statistics.fmean(
        loud / quiet
        for name, quiet, loud in zip(names, *sizes, strict=True)
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


def _same_or_refuse(limit: float) -> float:
    """Return the largest gap between our gradients and torch's after one call.

    Raises RuntimeError if it is too large to time the two.
    """
    ours, theirs = parameters(quarter_gpt2()), parameters(quarter_gpt2())
    clip_by_global_norm(ours, limit)
    nn.utils.clip_grad_norm_(theirs, limit, foreach=True)
    gap = max(float((a.grad - b.grad).abs().max()) for a, b in zip(ours, theirs, strict=True))  # type: ignore[operator]
    if not gap <= 1e-5:
        raise RuntimeError(
            f"labcore's gradients and torch's must agree to 1e-5 before they are timed, got {gap}"
        )
    return gap


def clip_times(name: str) -> list[Measurement]:
    """Time our clipping and torch's foreach clipping on the same gradients, in the same rounds."""
    gap = _same_or_refuse(1.0 if name == "clipping" else math.inf)
    comparisons, coefficients = [], []
    for seed in range(REPETITIONS):
        params = parameters(quarter_gpt2())
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
    details = {"tensors": len(params), "largest gap": gap, "bar": BARS[name]}
    return [
        Measurement(
            quantity="labcore over torch foreach",
            unit="ratio",
            samples=[each.ratio("labcore", "torch foreach") for each in comparisons],
            details=details,
        ),
        Measurement(
            quantity="clip_by_global_norm",
            unit="ms",
            samples=milliseconds["labcore"],
            peers={"torch foreach": milliseconds["torch foreach"]},
            details=details,
        ),
    ]


@case("clip-time/clipping", minutes=0.15, needs="cpu")
def clip_time_clipping() -> list[Measurement]:
    """A model's gradients, above the limit in every call: they are read once and scaled."""
    return clip_times("clipping")


@case("clip-time/not-clipping", minutes=0.15, needs="cpu")
def clip_time_not_clipping() -> list[Measurement]:
    """The same below the limit, like most steps: torch still multiplies by 1."""
    return clip_times("not clipping")


@case("clip-time/methods", minutes=0.2, needs="cpu")
def clip_time_methods() -> list[Measurement]:
    """The other methods when no gradient has to change, against the zclip package and torch."""
    params = [nn.Parameter(p.detach()) for p in parameters(quarter_gpt2())]
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
        Measurement(
            quantity=name,
            unit="ms",
            samples=times[name],
            peers={other: each for other, each in times.items() if other != name},
        )
        for name in functions
        if not name.startswith(("torch", "zclip"))
    ]


SIZES = {"normal": 1e-2, "1e21": 1e21, "1e-30": 1e-30}


@case("clip-accuracy", minutes=0.1)
def clip_accuracy() -> list[Measurement]:
    """Relative error of the total norm against float64, and the norm of the clipped gradients.

    The error is relative to the larger of the two norms, which makes it 1 if a norm overflows.
    """
    found = []
    for name, size in SIZES.items():
        params = parameters(quarter_gpt2())
        for param in params:
            param.grad = param.grad * (size / 1e-2)  # type: ignore[operator, assignment]
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
        for quantity, unit, each in (
            (f"relative error/{name}", "", errors),
            (f"norm over limit/{name}", "ratio", ends),
        ):
            found.append(
                Measurement(
                    quantity=quantity,
                    unit=unit,
                    samples=each["labcore"],
                    peers={"torch": each["torch"]},
                    details={"exact": exact, "limit": limit, "bar": 1e-6},
                )
            )
    return found
