"""The reported runs of the language model as chapters show them: losses, and tokens to a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from labcore.studies.language.results import best, run_record
from labcore.studies.language.tuning import REPORT_SEEDS, Setting
from labcore.studies.runs import between

__all__ = ["Reported", "reported", "smoothed", "thinned", "token_ratios", "tokens_to"]

POINTS = 24
WINDOW = 32_768  # tokens over which a training loss is averaged


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


def smoothed(batch: int, optimizer: str, seed: int) -> tuple[list[float], list[float]]:
    """Return tokens read and training loss of a run, in means over WINDOW tokens.

    The loss of a step is measured before it, so it belongs to the tokens of the steps before.
    """
    losses = run_record(batch, optimizer, f"seed {seed}").details["losses"]
    count = WINDOW // batch
    starts = range(0, len(losses) - count + 1, count)
    tokens = [batch * (start + (count - 1) / 2) for start in starts]
    return tokens, [fmean(losses[start : start + count]) for start in starts]


def tokens_to(loss: float, batch: int, optimizer: str) -> tuple[float, ...]:
    """Return the tokens in which each seed's smoothed training loss first reaches `loss`."""
    curves = (smoothed(batch, optimizer, seed) for seed in REPORT_SEEDS)
    return tuple(between(losses, tokens, loss) for tokens, losses in curves)


def token_ratios(batch: int, optimizer: str, other: str) -> tuple[float, ...]:
    """Return an optimizer's tokens over another's to the lowest loss that both reach, by seed.

    The losses are smoothed training losses.
    """
    ratios = []
    for seed in REPORT_SEEDS:
        curves = [smoothed(batch, name, seed) for name in (optimizer, other)]
        goal = max(min(losses) for _, losses in curves)
        mine, theirs = (between(losses, tokens, goal) for tokens, losses in curves)
        ratios.append(mine / theirs)
    return tuple(ratios)
