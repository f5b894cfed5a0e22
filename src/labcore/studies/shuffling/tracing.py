"""Analysis of a run's batches: loss spikes, where they begin, and each batch's distance.

All of it needs only the losses and the rows of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from labcore.checks import non_negative
from labcore.shuffling.spikes import LossSpikeDetector, Spike
from labcore.studies.shuffling.characters import CONTEXT, LETTERS, ROW, EpochRun, corpus

__all__ = [
    "BoundaryTest",
    "batch_distances",
    "boundary_test",
    "epoch_distances",
    "later_spikes",
    "letter_shares",
    "spike_rate",
    "spikes_of",
]


def spikes_of(losses: Sequence[float], provenance: Sequence[object] = ()) -> tuple[Spike, ...]:
    """Return the spikes that LossSpikeDetector finds with its defaults, a median of 50 and 6 MADs.

    provenance: the content of each batch (rows, files), one entry per step; if empty, None for all.
    """
    detector = LossSpikeDetector()
    for step, loss in enumerate(losses):
        detector.update(step, loss, provenance[step] if provenance else None)
    return detector.spikes


def spike_rate(losses: Sequence[float]) -> float:
    """Return the number of spikes in 1,000 steps."""
    return 1000 * len(spikes_of(losses)) / len(losses)


_BEGUN = 5  # steps in which a spike that was made on purpose may begin


def later_spikes(losses: Sequence[float], step: int) -> int:
    """Return how many spikes begin after `step` and the few steps that follow it."""
    return sum(spike.step > step + _BEGUN for spike in spikes_of(losses))


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryTest:
    """Whether spikes begin at file boundaries more often than by chance.

    onsets: the number of spikes tested.
    share: the fraction of spikes that begin in a step where a file begins, or at most `within`
    steps later.
    chance: the expected share for spikes that are independent of files.
    p: the fraction of all circular shifts of the onsets, including no shift, with at least as many
    hits.
    recall: the fraction of boundaries followed by an onset in at most `within` steps.
    """

    onsets: int
    share: float
    chance: float
    p: float
    recall: float


def boundary_test(
    onsets: Sequence[int], boundaries: Iterable[int], *, steps: range, within: int = 1
) -> BoundaryTest:
    """Compare where spikes begin with where files begin, both in steps.

    This is a permutation test over all circular shifts of the onsets within `steps`, which keep the
    distances between onsets.
    steps: the steps in which a spike could be detected, such as range(50, 727), since a detector
    must fill its window first.
    Raises ValueError if no onset is in `steps`.
    """
    non_negative("within", within)
    seen = torch.tensor([step - steps.start for step in onsets if step in steps])
    starts = [step - steps.start for step in boundaries]
    starts = [step for step in starts if -within <= step < len(steps)]
    if not len(seen):
        raise ValueError("onsets must have at least one in steps, got none; check for spikes first")
    near = torch.zeros(len(steps), dtype=torch.bool)
    for start in starts:
        near[max(start, 0) : start + within + 1] = True
    shifts = torch.arange(len(steps))
    hits = near[(seen + shifts[:, None]) % len(steps)].sum(1)
    found = {int(step) for step in seen}
    followed = sum(any(start + k in found for k in range(within + 1)) for start in starts)
    return BoundaryTest(
        onsets=len(seen),
        share=hits[0].item() / len(seen),
        chance=near.double().mean().item(),
        p=(hits >= hits[0]).double().mean().item(),
        recall=followed / max(len(starts), 1),
    )


def letter_shares(rows: Tensor) -> Tensor:
    """Return each letter's frequency in each row: [B, CONTEXT + ROW] -> [B, LETTERS], sums to 1.

    The context isn't counted. Since this needs no model, it shows a batch's correlation before any
    training.
    """
    letters = rows[:, CONTEXT:]
    counts = torch.zeros(len(rows), LETTERS, dtype=torch.float64)
    return counts.scatter_add_(1, letters, torch.ones_like(letters, dtype=torch.float64)) / ROW


def batch_distances(batches: Iterable[Tensor], data: Tensor) -> list[float]:
    """Return b |mean - m|² over the rows' variance for each batch [b, P].

    data: [N, P], all rows, which have mean m and that variance. The result is 1 on average for
    random rows. Its mean over all batches of an epoch is the design effect.
    """
    middle = data.mean(0)
    spread = (data - middle).square().sum(1).mean()
    return [
        (len(batch) * (batch.mean(0) - middle).square().sum() / spread).item() for batch in batches
    ]


def epoch_distances(run: EpochRun, kind: str, seed: int, *, pooled: int = 1) -> list[float]:
    """Return `batch_distances` of a run's letters; kind, seed: of its corpus.

    pooled: consecutive batches that count as one; a remainder is dropped.
    """
    shares = _corpus_shares(kind, seed)
    whole = len(run.rows) // pooled * pooled
    groups = (chain(*run.rows[at : at + pooled]) for at in range(0, whole, pooled))
    return batch_distances((shares[list(rows)] for rows in groups), shares)


@functools.cache
def _corpus_shares(kind: str, seed: int) -> Tensor:
    return letter_shares(corpus(kind, seed).rows)
