"""How settings for the language model are chosen: two stages, one seed, separate files.

Stage 1 tries three learning rates, a factor of 4 apart. Stage 2 tries half and twice the best of
them, and ten times the decay. Every optimizer gets the same number of trials. The settings within
the noise of the best are its plateau.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from labcore.checks import one_of
from labcore.models import Llama
from labcore.studies.language.bench import OPTIMIZERS, TOKENS, LanguageRun, train_language

__all__ = [
    "COARSE",
    "REPORT_SEEDS",
    "STAGE_2",
    "TUNING_SEED",
    "Setting",
    "coarse",
    "finer",
    "plateau",
    "train_setting",
]

TUNING_SEED, REPORT_SEEDS = 100, (0, 1, 2, 3)
# Learning rates and the decay of stage 1. Lion starts with a smaller rate and a larger decay, as
# its authors advise (Chen et al., 2023, arXiv 2302.06675).
COARSE: dict[str, tuple[tuple[float, ...], float]] = {
    "AdamW": ((2e-3, 8e-3, 3.2e-2), 0.1),
    "Muon": ((4e-3, 1.6e-2, 6.4e-2), 0.1),
    **{name: ((5e-4, 2e-3, 8e-3), 1.0) for name in OPTIMIZERS if name.startswith("Lion")},
}
# The factors of stage 2 for the learning rate and the decay.
STAGE_2 = {
    "half the rate": (0.5, 1.0),
    "twice the rate": (2.0, 1.0),
    "ten times the decay": (1.0, 10.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A learning rate and a weight decay."""

    lr: float
    decay: float


def coarse(optimizer: str) -> dict[str, Setting]:
    """Return the settings of stage 1 by name."""
    rates, decay = COARSE[one_of("optimizer", optimizer, COARSE)]
    return {f"rate {lr:g}": Setting(lr=lr, decay=decay) for lr in rates}


def finer(best: Setting) -> dict[str, Setting]:
    """Return the settings of stage 2 by name, from the best one of stage 1."""
    return {
        name: Setting(lr=best.lr * rate, decay=best.decay * decay)
        for name, (rate, decay) in STAGE_2.items()
    }


def plateau(losses: Mapping[Setting, float], noise: float) -> list[Setting]:
    """Return the settings whose loss is at most `noise` above the best one, best first.

    losses: the held-out loss by setting, in nats per token; a run that diverged has infinity.
    """
    best = min(losses.values())
    return sorted((s for s in losses if losses[s] <= best + noise), key=lambda s: losses[s])


def train_setting(
    optimizer: str,
    setting: Setting,
    *,
    batch: int,
    seed: int,
    tokens: int = TOKENS,
    max_files: int | None = None,
) -> LanguageRun:
    """Train with an optimizer of OPTIMIZERS; TUNING_SEED reads the files for tuning."""
    make: Callable[[Llama], torch.optim.Optimizer] = functools.partial(
        OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)],
        lr=setting.lr,
        decay=setting.decay,
    )
    return train_language(
        make, batch=batch, seed=seed, tokens=tokens, tuning=seed == TUNING_SEED, max_files=max_files
    )
