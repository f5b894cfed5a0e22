"""The reported runs of the language model as a chapter shows them: mean curves and final losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from labcore.studies.language.results import best, run_record
from labcore.studies.language.tuning import REPORT_SEEDS, Setting

__all__ = ["Reported", "reported", "thinned"]

POINTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """An optimizer's reported runs at one batch size, with the best setting of its tuning.

    tokens, losses: POINTS means of the training loss, in nats per token, over all seeds.
    held_out: the loss on held-out files at the end, by seed.
    """

    setting: Setting
    steps: int
    tokens: tuple[float, ...]
    losses: tuple[float, ...]
    held_out: tuple[float, ...]


def thinned(values: Sequence[float], points: int = POINTS) -> tuple[float, ...]:
    """Return the means of `points` equally long pieces; a remainder is dropped."""
    size = max(1, len(values) // points)
    return tuple(fmean(values[at : at + size]) for at in range(0, len(values) // size * size, size))


def reported(batch: int, optimizer: str) -> Reported:
    """Return the recorded runs of REPORT_SEEDS; batch: tokens per step."""
    runs = [run_record(batch, optimizer, f"seed {seed}") for seed in REPORT_SEEDS]
    curves = [run.details["losses"] for run in runs]
    steps = len(curves[0])
    return Reported(
        setting=best(batch, optimizer),
        steps=steps,
        tokens=thinned([batch * (step + 0.5) for step in range(steps)]),
        losses=thinned([fmean(losses) for losses in zip(*curves, strict=True)]),
        held_out=tuple(run.p50 for run in runs),
    )
