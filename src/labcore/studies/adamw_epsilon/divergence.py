"""Small Llamas trained with weights, gradients and state in one number format."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from labcore.checks import one_of, positive_int
from labcore.models.training import train
from labcore.optim.adamw_optimizer import AdamW
from labcore.studies.adamw_epsilon import gradient_scale

__all__ = ["FORMATS", "RUNS", "SEEDS", "STEPS", "WIDTH", "first_bad_step", "losses"]

Make = Callable[..., torch.optim.Optimizer]

WIDTH, STEPS, SEEDS = 64, 60, (0, 1, 2, 3, 4)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH: dict[str, Make] = {
    "torch AdamW": torch.optim.AdamW,
    "torch AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
}
FP32_STATE: Make = functools.partial(AdamW, state_dtype=torch.float32)
FP16_STATE: Make = functools.partial(AdamW, state_dtype=torch.float16)

RUNS: Mapping[str, Mapping[str, Make]] = {
    "fp32": TORCH,
    "bf16": {
        **TORCH,
        "fp32 state, stochastic rounding": functools.partial(FP32_STATE, stochastic_rounding=True),
    },
    "fp16": {
        **TORCH,
        "eps 1e-6": functools.partial(torch.optim.AdamW, eps=1e-6),
        "eps 1e-4": functools.partial(torch.optim.AdamW, eps=1e-4),
        "fp32 master weights": functools.partial(FP16_STATE, master_weights=True),
        "fp32 state": FP32_STATE,
        "fp32 state and master weights": functools.partial(FP32_STATE, master_weights=True),
        "atan2": functools.partial(FP16_STATE, eps_mode="atan2"),
    },
}
"""Format -> name -> optimizer; everything that a name does not say is torch's default."""


def losses(
    form: str, name: str, seed: int, *, width: int = WIDTH, steps: int = STEPS
) -> list[float]:
    """Train a Llama of two layers on Python's documentation; return the loss before each step.

    form, name: keys of RUNS. The weights start with a standard deviation of 0.02.
    """
    make = RUNS[one_of("form", form, RUNS)][one_of("name", name, RUNS[form])]
    model = gradient_scale.make(width, seed, init="0.02").to(FORMATS[form])
    draw, optimizer = gradient_scale.batches(seed), make(model.parameters())
    return train(model, draw, optimizer, steps=positive_int("steps", steps), progress=False).losses


def first_bad_step(losses: Sequence[float]) -> int | None:
    """Return the step at which a run diverges, or None.

    This is the first step whose loss isn't finite, or after which no loss is below the first one. A
    run that learns has none: its last losses are finite and below the first.
    """
    bad = [not (math.isfinite(loss) and loss < losses[0]) for loss in losses[1:]]
    if any(not math.isfinite(loss) for loss in losses):
        return next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
    if not bad or not bad[-1]:
        return None
    return len(losses) - sum(1 for _ in itertools.takewhile(bool, reversed(bad)))
