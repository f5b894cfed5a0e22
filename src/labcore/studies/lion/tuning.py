"""Lion versus AdamW on digits: how settings are chosen and how results are reported.

Both optimizers share one grid. Settings are chosen on TUNING_SEEDS and on images held out of the
training part. After that, REPORT_SEEDS and the test images are used once. The benchmark records
both, and the chapter shows the records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from labcore.checks import one_of
from labcore.data import digits
from labcore.optim.adamw_optimizer import AdamW
from labcore.optim.lion_optimizer import Lion
from labcore.studies.digits_runs import (
    DigitsRun,
    Setting,
    Sweep,
    TrainConfig,
    sweep,
    train_seeds,
    validation_split,
)

__all__ = [
    "DECAYS",
    "LEARNING_RATES",
    "OPTIMIZERS",
    "REPORT_SEEDS",
    "STEPS",
    "TARGET",
    "TUNING_SEEDS",
    "config",
    "report",
    "steps_to_target",
    "tuned",
]

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"AdamW": AdamW, "Lion": Lion}
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
DECAYS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
TUNING_SEEDS = (100, 101, 102, 103)
REPORT_SEEDS = tuple(range(10))
STEPS = {16: 1200, 64: 300, 256: 75}  # batch -> steps, for the same number of images
TARGET = 0.1  # training loss for `steps_to_target`


def config(batch: int, *, steps: int | None = None, checks: int = 60) -> TrainConfig:
    """Return the run for one batch size, which measures the training loss about `checks` times.

    steps: by default STEPS[batch].
    """
    steps = STEPS[one_of("batch", batch, STEPS)] if steps is None else steps
    return TrainConfig(steps=steps, batch=batch, check_every=max(1, steps // checks))


@functools.cache
def tuned(
    optimizer: str,
    batch: int,
    *,
    steps: int | None = None,
    learning_rates: tuple[float, ...] = LEARNING_RATES,
    decays: tuple[float, ...] = DECAYS,
    seeds: tuple[int, ...] = TUNING_SEEDS,
    target: float = TARGET,
) -> Sweep:
    """Run the sweep that chooses the settings: by default 192 runs, cached for this process."""
    return sweep(
        OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)],
        config(batch, steps=steps),
        validation_split(digits()),
        learning_rates=learning_rates,
        decays=decays,
        seeds=seeds,
        target=target,
    )


def report(
    optimizer: str, setting: Setting, batch: int, seeds: Sequence[int], *, steps: int | None = None
) -> list[DigitsRun]:
    """Run one setting on the whole training part and evaluate it on the test part."""
    make = functools.partial(
        OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)], **asdict(setting)
    )
    return train_seeds(make, config(batch, steps=steps, checks=300), digits(), seeds)


def steps_to_target(runs: Sequence[DigitsRun], target: float = TARGET) -> list[int]:
    """Return each run's steps to `target`; one that never gets there counts its steps plus one."""
    found = (run.steps_to(target) for run in runs)
    return [
        len(run.losses) + 1 if step is None else step for run, step in zip(runs, found, strict=True)
    ]
