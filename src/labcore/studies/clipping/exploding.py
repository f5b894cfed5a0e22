"""Training runs in which gradients explode, under any clipping: bad batches and loud layers.

Every setting stands here and was chosen on TUNING_SEEDS; SEEDS came after that, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labcore.checks import one_of, positive, positive_int
from labcore.clipping.adaptive import clip_adaptive
from labcore.clipping.clip import clip_by_global_norm, clip_by_local_norm, clip_by_value
from labcore.clipping.history import AutoClip, ZClip
from labcore.studies import runs
from labcore.studies.clipping import networks
from labcore.studies.clipping.effects import Clip, Named, Snapshot, Spoil, cosine, flat

__all__ = [
    "BAD_STEP",
    "BATCH",
    "COMPARABLE",
    "EXPLODING",
    "FACTOR",
    "HEALTHY",
    "LEARNING_RATES",
    "LOUD",
    "METHODS",
    "OPTIMIZERS",
    "SEEDS",
    "STEPS",
    "THRESHOLDS",
    "TUNING_SEEDS",
    "ClippedRun",
    "bad_batch",
    "comparable",
    "loud_layer",
    "loud_run",
    "method",
    "natural",
    "one_bad_batch",
    "train",
]

BATCH = {"RNN": 16, "conv": 32}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
}
TUNING_SEEDS = (900, 901, 902)
SEEDS = (30, 31, 32, 33, 34)
STEPS, BAD_STEP, FACTOR = 150, 75, 1e3
# Network -> settings of its class: gradients that fade a little on their way back, and the deep
# network's own depth; EXPLODING is the recurrent one at He's initialization.
HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "RNN": {"gain": 0.7},
    "conv": {"gain": 1.1, "depth": 12},
}
EXPLODING: Mapping[str, Any] = {"gain": 1.0}
LOUD = {"RNN": "recurrent.", "conv": "layers.5."}  # the layer whose gradient comes too large
# Best of three without clipping and without a bad batch, on TUNING_SEEDS. For the recurrent network
# under SGD that was 1.0 of 0.3, 1 and 2; at 1.0 a run of seeds 0 to 4 diverged with nothing amiss,
# so the next lower stands here, and the reported seeds were changed for ones not yet seen.
LEARNING_RATES: Mapping[str, Mapping[str, float]] = {
    "RNN": {"SGD": 0.3, "AdamW": 1e-2},
    "conv": {"SGD": 0.02, "AdamW": 3e-3},
}
# Name -> clipping at a threshold. A step whose gradient is not finite is left out by all of them.
METHODS: Mapping[str, Callable[[float], Clip]] = {
    "global": lambda limit: functools.partial(
        clip_by_global_norm, max_norm=limit, nonfinite="skip"
    ),
    "local, per parameter": lambda limit: functools.partial(
        clip_by_local_norm, max_norm=limit, nonfinite="skip"
    ),
    "local, per layer": lambda limit: functools.partial(
        clip_by_local_norm, max_norm=limit, by="layer", nonfinite="skip"
    ),
    "value": lambda limit: functools.partial(clip_by_value, limit=limit, nonfinite="skip"),
    "AGC": lambda limit: functools.partial(clip_adaptive, clipping=limit, nonfinite="skip"),
    "AGC, head excluded": lambda limit: functools.partial(
        clip_adaptive, clipping=limit, exclude=("head.",), nonfinite="skip"
    ),
    "AutoClip": lambda percentile: AutoClip(percentile, nonfinite="skip").clip,
    "ZClip": lambda z: ZClip(z, nonfinite="skip").clip,
}
COMPARABLE = ("global", "local, per layer", "local, per parameter", "value", "AGC", "none")
# Network -> method -> threshold: best of four under SGD with one bad batch, on TUNING_SEEDS.
# AGC without the head takes that of AGC.
THRESHOLDS: Mapping[str, Mapping[str, float]] = {
    "RNN": {
        "global": 3.0,
        "local, per parameter": 1.0,
        "local, per layer": 3.0,
        "value": 0.1,
        "AGC": 0.3,
        "AGC, head excluded": 0.3,
        "AutoClip": 90.0,
        "ZClip": 4.0,
    },
    "conv": {
        "global": 10.0,
        "local, per parameter": 10.0,
        "local, per layer": 10.0,
        "value": 0.3,
        "AGC": 0.3,
        "AGC, head excluded": 0.3,
        "AutoClip": 90.0,
        "ZClip": 4.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class ClippedRun(runs.Run):
    """A run with clipped gradients, step by step; it ends early where a loss is not finite.

    norms: of the gradient before clipping; kept: the norm after over the norm before; cosines:
    between the two gradients; moves: norm of the step over that of the weights. model: at the end;
    accuracy: share of what was held out that it gets right; finite: whether every weight of it is.
    """

    norms: tuple[float, ...]
    kept: tuple[float, ...]
    cosines: tuple[float, ...]
    moves: tuple[float, ...]
    model: networks.Network
    accuracy: float
    finite: bool


def one_bad_batch(at: int, factor: float = 1e3) -> Spoil:
    """The gradient of step `at` comes `factor` times too large: a corrupted batch."""
    positive("factor", factor)

    def spoil(step: int, parameters: Named) -> None:
        if step == at:
            _scale(parameters, "", factor)

    return spoil


def loud_layer(layer: str, factor: float = 1e3) -> Spoil:
    """The gradient of one layer (a prefix of its names) comes `factor` times too large, always."""
    positive("factor", factor)
    return lambda _, parameters: _scale(parameters, layer, factor)


def _scale(parameters: Named, prefix: str, factor: float) -> None:
    chosen = [weight for name, weight in parameters if name.startswith(prefix)]
    if not chosen:
        raise ValueError(f"no parameter's name begins with {prefix!r}; see named_parameters()")
    for weight in chosen:
        if weight.grad is not None:
            weight.grad.mul_(factor)


def train(
    network: str,
    clip: Clip | None = None,
    *,
    optimizer: str = "SGD",
    lr: float,
    steps: int,
    seed: int = 0,
    spoil: Spoil | None = None,
    **settings: Any,
) -> ClippedRun:
    """Train a network of `networks` and measure what `clip` does to each gradient.

    clip: called with the named parameters after the backward pass; None leaves the gradients alone.
    optimizer: a key of OPTIMIZERS, without momentum or decay. seed: of the weights and the batches.
    spoil: what happens to a gradient before it is clipped. settings: of the network's class.
    """
    model = networks.make(network, seed=seed, **settings)
    named = list(model.named_parameters())
    weights = [weight for _, weight in named]
    make = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)]
    stepper = make(weights, lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    measured: list[tuple[Tensor, Tensor, float]] = []

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return networks.loss(model, *batch)

    def spoil_and_clip() -> None:
        if spoil is not None:
            spoil(len(measured), named)
        raw = flat([weight.grad for weight in weights])
        if clip is not None:
            clip(named)
        clipped = flat([weight.grad for weight in weights])
        measured.append((raw.norm(), clipped.norm() / raw.norm(), cosine(raw, clipped)))

    losses: list[float] = []
    moves: list[Tensor] = []
    before = flat(weights)
    for _ in range(positive_int("steps", steps)):
        batch = networks.draw(network, BATCH[network], generator=generator)
        losses.append(runs.step(loss_of, stepper, batch, change_gradients=spoil_and_clip))
        after = flat(weights)
        moves.append((after - before).norm() / before.norm())
        before = after
        if not math.isfinite(losses[-1]):
            break
    norms, kept, cosines = zip(*measured, strict=True)
    return ClippedRun(
        losses=tuple(losses),
        norms=tuple(map(float, norms)),
        kept=tuple(map(float, kept)),
        cosines=cosines,
        moves=tuple(map(float, moves)),
        model=model,
        accuracy=networks.accuracy(model),
        finite=bool(flat(weights).isfinite().all()),
    )


def comparable(name: str, taken: Snapshot, max_norm: float) -> Clip:
    """METHODS[name] at a threshold that leaves the whole of a gradient at most about `max_norm`.

    For "value" and "AGC": so many elements of the limit have the norm max_norm, and the same share
    of every unit's weights is that share of all of them. The local norms take max_norm as it is.
    name: a key of METHODS that takes a norm, "value" or "AGC"; "none" changes nothing.
    """
    if one_of("name", name, COMPARABLE) == "none":
        return lambda _: None
    scales = {
        "value": len(flat(taken.gradients)) ** 0.5,
        "AGC": float(flat(taken.weights).norm()),
    }
    return METHODS[name](positive("max_norm", max_norm) / scales.get(name, 1.0))


def method(name: str, network: str) -> Clip | None:
    """A fresh clipping at the study's threshold for `network`; None for "none"."""
    if one_of("method", name, ("none", *METHODS)) == "none":
        return None
    return METHODS[name](THRESHOLDS[one_of("network", network, THRESHOLDS)][name])


def _run(
    network: str, name: str, optimizer: str, seed: int, spoil: Spoil | None, **settings: Any
) -> ClippedRun:
    lr = LEARNING_RATES[one_of("network", network, LEARNING_RATES)]
    return train(
        network,
        method(name, network),
        optimizer=optimizer,
        lr=lr[one_of("optimizer", optimizer, OPTIMIZERS)],
        steps=STEPS,
        seed=seed,
        spoil=spoil,
        **settings,
    )


def bad_batch(
    network: str, method: str, optimizer: str, seed: int, *, factor: float = FACTOR
) -> ClippedRun:
    """A healthy network meets one gradient that is `factor` times too large, at BAD_STEP.

    method: "none" or a key of METHODS. factor: 1 for a run without the accident.
    """
    spoil = one_bad_batch(BAD_STEP, factor)
    settings = HEALTHY[one_of("network", network, HEALTHY)]
    return _run(network, method, optimizer, seed, spoil, **settings)


def natural(method: str, optimizer: str, seed: int) -> ClippedRun:
    """The recurrent network at He's initialization: its gradients explode by themselves."""
    return _run("RNN", method, optimizer, seed, None, **EXPLODING)


def loud_run(network: str, method: str, optimizer: str, seed: int) -> ClippedRun:
    """One layer's gradient (LOUD) comes FACTOR times too large in every step."""
    spoil = loud_layer(LOUD[one_of("network", network, LOUD)], FACTOR)
    settings = HEALTHY[one_of("network", network, HEALTHY)]
    return _run(network, method, optimizer, seed, spoil, **settings)
