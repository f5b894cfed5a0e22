"""Epsilon and low precision on digits: three ways in which training fails, and remedies.

All settings are in this module and were chosen on TUNING_SEEDS. After that, SEEDS were run once.
The plain optimizer is `epsilon.NaiveAdamW`, which is AdamW in the dtype of the parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labcore.checks import one_of, positive
from labcore.data import digits
from labcore.optim.adamw_optimizer import AdamW
from labcore.studies.adamw_epsilon.epsilon import NaiveAdamW
from labcore.studies.digits_runs import TrainConfig, train_digits

__all__ = [
    "EPSILONS",
    "FAILURES",
    "LEARNING_RATE",
    "PLAIN",
    "REMEDIES",
    "SCALES",
    "SEEDS",
    "TUNING_SEEDS",
    "Failure",
    "accuracy",
    "accuracy_at",
    "accuracy_with",
    "failure_of",
    "gradient_rms",
    "healthy_accuracy",
    "remedies_for",
    "scaled",
]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Remedy = Callable[[Iterable[nn.Parameter], float, int], torch.optim.Optimizer]

LEARNING_RATE = 3e-3
SCALES = (1.0, 1e-6, 1e-7, 1e-8)
EPSILONS = (1e-15, 1e-8, 1e-6)
TUNING_SEEDS = (900, 901, 902)
SEEDS = tuple(range(10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A setting in which plain AdamW doesn't learn.

    scale: factor for every gradient. dtype: dtype of weights, gradients and images. lr: learning
    rate for Adam's formula. steps, schedule: as in `digits_runs.TrainConfig`.
    """

    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    lr: float = LEARNING_RATE
    steps: int = 300
    schedule: str = "cosine"


# A step of 1e-4 can't change a bfloat16 weight above 1/32; a constant rate keeps steps that small.
FAILURES: Mapping[str, Failure] = {
    "loss scaled by 1e-8 (fp32)": Failure(scale=1e-8),
    "pure fp16": Failure(dtype=torch.float16),
    "pure bf16 at lr 1e-4": Failure(dtype=torch.bfloat16, lr=1e-4, steps=600, schedule="constant"),
}


def scaled(make_optimizer: OptimizerFactory, scale: float) -> OptimizerFactory:
    """Return a factory whose optimizers multiply every gradient by `scale` in place before a step.

    In float32, this is equivalent to scaling the loss: gradients are linear in the loss, and the
    extra product costs one rounding, or none for a power of two. In float16, it isn't equivalent. A
    scaled loss scales every product of the backward pass, which can save or lose gradients below
    6e-8. Here, the backward pass runs at the original scale, and only the product is rounded.
    """
    positive("scale", scale)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters)
        optimizer.register_step_pre_hook(multiply)
        return optimizer

    def multiply(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    return make


def _naive(**settings: Any) -> Remedy:
    return lambda parameters, lr, _: NaiveAdamW(parameters, lr=lr, **settings)


def _in_fp32(**settings: Any) -> Remedy:
    return lambda parameters, lr, _: AdamW(parameters, lr=lr, **settings)


def _fp32_arithmetic(
    parameters: Iterable[nn.Parameter], lr: float, _: int
) -> torch.optim.Optimizer:
    weights = list(parameters)
    # Like PyTorch's fused AdamW, keep the state in the weights' dtype.
    return AdamW(weights, lr=lr, state_dtype=weights[0].dtype)


def _loss_scaling(**settings: Any) -> Remedy:
    # Adam needs no unscaling, because a gradient 1024 times larger gives the same step.
    return lambda parameters, lr, _: scaled(
        functools.partial(NaiveAdamW, lr=lr, **settings), 1024.0
    )(parameters)


def _atan2(parameters: Iterable[nn.Parameter], lr: float, _: int) -> torch.optim.Optimizer:
    # Under a constant gradient, atan2's steps are π/4 of Adam's.
    return NaiveAdamW(parameters, lr=4 / math.pi * lr, eps_mode="atan2")


def _stochastic(parameters: Iterable[nn.Parameter], lr: float, seed: int) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(seed)
    return AdamW(
        parameters,
        lr=lr,
        state_dtype=torch.float32,
        stochastic_rounding=True,
        generator=generator,
    )


PLAIN = "none (eps 1e-8)"

# (parameters, lr, seed) -> optimizer.
REMEDIES: Mapping[str, Remedy] = {
    PLAIN: _naive(eps=1e-8),
    "smaller eps (1e-15)": _naive(eps=1e-15),
    "larger eps (1e-6)": _naive(eps=1e-6),
    "larger eps (1e-4)": _naive(eps=1e-4),
    "eps_root (1e-30)": _naive(eps=0.0, eps_root=1e-30),
    "larger eps_root (1e-7)": _naive(eps=0.0, eps_root=1e-7),
    "atan2": _atan2,
    "loss scaling (x1024)": _loss_scaling(),
    "loss scaling and eps 1e-6": _loss_scaling(eps=1e-6),
    "fp32 arithmetic": _fp32_arithmetic,
    "fp32 arithmetic and state": _in_fp32(state_dtype=torch.float32),
    "fp32 state and master weights": _in_fp32(state_dtype=torch.float32, master_weights=True),
    "stochastic rounding": _stochastic,
}


def failure_of(name: str, steps: int | None = None) -> Failure:
    """Return one of FAILURES, by default with its own number of steps."""
    failure = FAILURES[one_of("failure", name, FAILURES)]
    return failure if steps is None else replace(failure, steps=steps)


def remedies_for(failure: str) -> tuple[str, ...]:
    """Return the keys of REMEDIES for `failure`; stochastic rounding supports only bfloat16."""
    dtype = failure_of(failure).dtype
    return tuple(
        name for name in REMEDIES if name != "stochastic rounding" or dtype == torch.bfloat16
    )


def accuracy(remedy: str, failure: str, seed: int, *, steps: int | None = None) -> float:
    """Return the test accuracy of one run with `remedy` under `failure`.

    Chance is about 0.1. NaN weights give 0.08, because they predict the first class for all images.
    remedy, failure: keys of REMEDIES and FAILURES. steps: by default the failure's.
    Raises ValueError for other names, and for stochastic rounding in float16 (see `remedies_for`).
    """
    make = REMEDIES[one_of("remedy", remedy, REMEDIES)]
    return accuracy_with(make, failure_of(failure, steps), seed)


def healthy_accuracy(failure: str, seed: int, *, steps: int | None = None) -> float:
    """Return plain AdamW's accuracy with the failure's rate and steps, in fp32 and unscaled."""
    case = replace(failure_of(failure, steps), scale=1.0, dtype=torch.float32)
    return accuracy_with(REMEDIES[PLAIN], case, seed)


def accuracy_at(scale: float, eps: float, seed: int) -> float:
    """Return plain AdamW's test accuracy with `eps` in fp32, with gradients scaled by `scale`."""
    return accuracy_with(_naive(eps=eps), Failure(scale=scale), seed)


def accuracy_with(make: Remedy, case: Failure, seed: int) -> float:
    """Return the test accuracy of one run; make: (parameters, lr, seed) -> optimizer."""
    config = TrainConfig(
        steps=case.steps,
        dtype=case.dtype,
        schedule=case.schedule,
        seed=seed,
        check_every=case.steps,
    )
    factory = scaled(lambda parameters: make(parameters, case.lr, seed), case.scale)
    return train_digits(factory, config, digits()).accuracy


@functools.cache
def _gradients(seed: int) -> Tensor:
    """Return the gradients [steps, weights], fp32, of a healthy run: plain AdamW, unscaled."""
    seen: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        seen.append(torch.cat([p.grad.flatten() for group in groups for p in group["params"]]))

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = NaiveAdamW(parameters, lr=LEARNING_RATE)
        optimizer.register_step_pre_hook(record)
        return optimizer

    train_digits(make, TrainConfig(steps=Failure().steps, seed=seed), digits())
    return torch.stack(seen)


def gradient_rms(scale: float = 1.0, *, seed: int = 0) -> float:
    """Return `scale` times the RMS of a healthy run's gradients, over all weights and steps."""
    return positive("scale", scale) * _gradients(seed).double().square().mean().sqrt().item()
