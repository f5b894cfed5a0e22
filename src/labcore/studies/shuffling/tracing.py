"""What the batches of a run say: its spikes, where they begin, how far each batch is off.

Nothing here needs more than the losses and the rows of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.checks import non_negative
from labcore.shuffling.spikes import LossSpikeDetector, Spike
from labcore.studies.shuffling.characters import CONTEXT, LETTERS, ROW

__all__ = [
    "BoundaryTest",
    "batch_distances",
    "boundary_test",
    "letter_shares",
    "spikes_of",
]


def spikes_of(losses: Sequence[float], provenance: Sequence[object] = ()) -> tuple[Spike, ...]:
    """The events of LossSpikeDetector at its defaults: trailing median of 50, 6 MADs.

    provenance: what was in each batch, one entry a step (rows, files); none is None.
    """
    detector = LossSpikeDetector()
    for step, loss in enumerate(losses):
        detector.update(step, loss, provenance[step] if provenance else None)
    return detector.spikes


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryTest:
    """Whether spikes begin at file boundaries more often than chance has it.

    onsets: spikes looked at. share: of them, begun in a step in which a file begins, or at most
    `within` steps after. chance: the share expected of spikes that do not care. p: share of all
    circular shifts of the onsets that hit as many or more, the true place among them.
    recall: share of the boundaries that have an onset so near.
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

    steps: in which a spike could be seen, such as range(50, 727): a detector needs its window.
    A permutation test: the pattern of the onsets is turned round through `steps`, which keeps their
    distances, and each turn is counted. Raises ValueError for no onset in `steps`.
    """
    non_negative("within", within)
    seen = torch.tensor([step - steps.start for step in onsets if step in steps])
    starts = [step - steps.start for step in boundaries]
    starts = [step for step in starts if -within <= step < len(steps)]
    if not len(seen):
        raise ValueError("boundary_test needs an onset in steps, got none; nothing is to be traced")
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
    """How often each letter stands in each row: [B, CONTEXT + ROW] -> [B, LETTERS], sums to 1.

    The context is left out. No model is needed: this is what makes a batch's correlation visible
    before anything is trained.
    """
    letters = rows[:, CONTEXT:]
    counts = torch.zeros(len(rows), LETTERS, dtype=torch.float64)
    return counts.scatter_add_(1, letters, torch.ones_like(letters, dtype=torch.float64)) / ROW


def batch_distances(batches: Iterable[Tensor], data: Tensor) -> list[float]:
    """For each batch [b, P] its share of the design effect: b |mean - m|² over the rows' variance.

    data [N, P]: all rows, with their mean m and their variance. 1 on average for rows drawn at
    random; the mean over all batches of an epoch is the design effect.
    """
    middle = data.mean(0)
    spread = (data - middle).square().sum(1).mean()
    return [
        (len(batch) * (batch.mean(0) - middle).square().sum() / spread).item() for batch in batches
    ]
