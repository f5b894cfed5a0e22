"""Lion against AdamW on digits: how settings are chosen, and on what they are reported.

One grid serves both optimizers. Settings are chosen on TUNING_SEEDS and on images held out of the
training part; REPORT_SEEDS and the test images come after that, once. The benchmark records both,
and the chapter shows the records.
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
STEPS = {16: 1200, 64: 300, 256: 75}  # batch -> steps: the same number of images
TARGET = 0.1  # the training loss whose first step is counted


def config(batch: int, *, checks: int = 60) -> TrainConfig:
    """The run for one batch size, its training loss measured about `checks` times."""
    steps = STEPS[one_of("batch", batch, STEPS)]
    return TrainConfig(steps=steps, batch=batch, check_every=max(1, steps // checks))


@functools.cache
def tuned(optimizer: str, batch: int) -> Sweep:
    """The sweep over the grid that chooses the settings. 192 runs; kept for this process."""
    return sweep(
        OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)],
        config(batch),
        validation_split(digits()),
        learning_rates=LEARNING_RATES,
        decays=DECAYS,
        seeds=TUNING_SEEDS,
        target=TARGET,
    )


def report(optimizer: str, setting: Setting, batch: int, seeds: Sequence[int]) -> list[DigitsRun]:
    """Runs of one setting on the whole training part, judged on the test part."""
    make = functools.partial(
        OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)], **asdict(setting)
    )
    return train_seeds(make, config(batch, checks=300), digits(), seeds)


def steps_to_target(runs: Sequence[DigitsRun]) -> list[int]:
    """Steps to TARGET for each run; one that never arrives counts one step more than it had."""
    found = (run.steps_to(TARGET) for run in runs)
    return [
        len(run.losses) + 1 if step is None else step for run, step in zip(runs, found, strict=True)
    ]
