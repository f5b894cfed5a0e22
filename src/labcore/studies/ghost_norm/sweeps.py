"""The settings of the study on MNIST-1D: learning rates by batch and norm, and run lengths.

Rates were chosen by the cases `sweep/...`; runs of several lengths, in the cases `lengths/...`,
trace what accuracy goes with what training loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from labcore import records
from labcore.checks import one_of
from labcore.studies.ghost_norm.large_batches import GHOST, LARGE, SMALL, SOURCES, Regime
from labcore.studies.runs import between

__all__ = [
    "BATCHES",
    "CURVES",
    "DIGITS",
    "DIGITS_PAIRS",
    "DIGITS_RATES",
    "DIGITS_SEEDS",
    "EQUAL_LOSS",
    "FRESH",
    "FRESH_LOSS",
    "KINDS",
    "LOSSES",
    "Lengths",
    "best_rate",
    "lengths",
    "regime",
    "sized",
    "sweep",
]

BATCHES = (32, 128, 512, 2048)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "batch norm": {},
    "ghosts of 8": {"ghost": 8},
    "ghosts of 32": {"ghost": 32},
    "ghosts of 128": {"ghost": 128},
    "layer norm": {"norm": "layer"},
}
"""What normalizes, and over what."""

# Kind and batch -> the lengths of its runs, in epochs.
CURVES: Mapping[tuple[str, int], tuple[int, ...]] = {
    ("batch norm", 32): (10, 20, 40),
    ("batch norm", 128): (10, 20, 40),
    ("batch norm", 512): (10, 20, 40, 80),
    ("batch norm", 2048): (20, 40, 80),
    ("ghosts of 32", 128): (10, 20, 40),
    ("ghosts of 32", 512): (20, 40, 80),
    ("ghosts of 32", 2048): (40, 80, 160),
    ("layer norm", 32): (5, 10, 20, 40),
    ("layer norm", 128): (5, 10, 20, 40),
    ("layer norm", 512): (10, 20, 40, 80),
    ("layer norm", 2048): (40, 80, 160),
}
# The same for runs on fresh rows.
FRESH: Mapping[tuple[str, int], tuple[int, ...]] = {
    ("batch norm", 32): (10, 20),
    ("batch norm", 512): (10, 20, 40),
    ("ghosts of 32", 512): (20, 40),
}
# Training losses in nats: those whose cost is counted, and those at which runs are compared.
LOSSES = (0.6, 0.55, 0.5, 0.45, 0.4, 0.35)
EQUAL_LOSS, FRESH_LOSS = 0.4, 0.72

DIGITS_RATES, DIGITS_SEEDS = (0.03, 0.1, 0.3, 1.0), tuple(range(10))
_ALL: dict[str, Any] = {
    "source": "digits",
    "lr": 1.0,
    "epochs": 30 * LARGE // SMALL,
    "batch": LARGE,
}
_FEW: dict[str, Any] = {**_ALL, "epochs": 30, "batch": SMALL}
DIGITS: Mapping[str, Regime] = {
    "small batch": Regime(**_FEW),
    "all images": Regime(**_ALL),
    "all images, ghosts": Regime(**_ALL, ghost=GHOST),
    "small batch, no norm": Regime(**_FEW, norm="none"),
    "all images, no norm": Regime(**_ALL, norm="none"),
}
"""Handwritten digits, where the large batch is all 512 images: as many updates for all.

The rate stands for one that is tuned.
"""
DIGITS_PAIRS = {
    "all images minus small batch": ("all images", "small batch"),
    "all images, ghosts, minus small batch": ("all images, ghosts", "small batch"),
    "ghosts' own effect": ("all images, ghosts", "all images"),
    "no norm, all images minus small batch": ("all images, no norm", "small batch, no norm"),
}
"""Comparison -> the two of DIGITS whose accuracies are subtracted."""


def sized(batch: int) -> list[str]:
    """Return the kinds that were swept at a batch size; ghosts are smaller than the batch."""
    if batch == min(BATCHES):  # its many steps take the longest
        return ["batch norm", "layer norm"]
    return [kind for kind, given in KINDS.items() if given.get("ghost", 0) < batch]


def regime(kind: str, batch: int, lr: float, **given: Any) -> Regime:
    """Return the regime of a kind of KINDS. given: epochs, and whether the rows are fresh."""
    return Regime(batch=batch, lr=lr, **KINDS[one_of("kind", kind, KINDS)], **given)


def sweep(kind: str, batch: int) -> Mapping[float, Mapping[str, Any]]:
    """Return what the case `sweep/...` found: rate -> accuracy by seed, and mean curves.

    The curves are "updates", "curve" (the accuracy) and "training loss", with None where a run had
    diverged.
    """
    record = records.find("ghost_norm", f"sweep/{kind}, batch {batch}", "validation accuracy")
    return {float(rate): each for rate, each in record.details["rates"].items()}


def best_rate(kind: str, batch: int) -> float:
    """Return the rate with the best mean validation accuracy in the sweep."""
    found = sweep(kind, batch)
    return max(found, key=lambda rate: fmean(found[rate]["accuracy"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Complete runs of one kind and batch, by length and then by seed.

    epochs, updates: by length. training_loss, test_loss: in nats. accuracy: on the test rows.
    """

    epochs: tuple[int, ...]
    updates: tuple[int, ...]
    training_loss: tuple[tuple[float, ...], ...]
    test_loss: tuple[tuple[float, ...], ...]
    accuracy: tuple[tuple[float, ...], ...]

    def at(self, what: str, loss: float) -> list[float]:
        """Return "accuracy" or "test_loss" by seed at a training loss.

        Interpolated between runs, linearly in the logarithm of the training loss.
        """
        return self._at(getattr(self, what), loss)

    def after(self, what: str, epochs: int) -> list[float]:
        """Return "accuracy" or "test_loss" by seed after runs of this many epochs."""
        return list(getattr(self, what)[self.epochs.index(epochs)])

    def updates_at(self, loss: float) -> list[float]:
        """Return the updates in which each seed reaches a training loss, likewise."""
        steps = [[math.log(each)] * len(self.accuracy[0]) for each in self.updates]
        return [math.exp(each) for each in self._at(steps, loss)]

    def updates_to(self, accuracy: Sequence[float]) -> list[float]:
        """Return the updates in which each seed reaches its accuracy in `accuracy`."""
        steps = [math.log(each) for each in self.updates]
        columns = zip(zip(*self.accuracy, strict=True), accuracy, strict=True)
        return [math.exp(between(mine, steps, target)) for mine, target in columns]

    def _at(self, values: Sequence[Sequence[float]], loss: float) -> list[float]:
        columns = zip(zip(*self.training_loss, strict=True), zip(*values, strict=True), strict=True)
        return [
            between([math.log(each) for each in losses], mine, math.log(loss))
            for losses, mine in columns
        ]


def lengths(kind: str, batch: int, *, fresh: bool = False) -> Lengths:
    """Return the recorded runs of a kind and batch of CURVES or, on fresh rows, of FRESH."""
    epochs = (FRESH if fresh else CURVES)[kind, batch]
    case = "fresh" if fresh else "lengths"
    runs = [
        records.find("ghost_norm", f"{case}/{kind}, batch {batch}/{each} epochs", "accuracy")
        for each in epochs
    ]
    return Lengths(
        epochs=epochs,
        updates=tuple(each * (SOURCES["MNIST-1D"].rows // batch) for each in epochs),
        training_loss=tuple(tuple(run.details["training loss"]) for run in runs),
        test_loss=tuple(tuple(run.details["test loss"]) for run in runs),
        accuracy=tuple(run.samples for run in runs),
    )
