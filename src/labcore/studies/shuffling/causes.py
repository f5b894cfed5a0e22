"""Five causes of bad training curves, each reproduced by training on Python's sources.

Two causes are in the data's order, one in its content and two in the optimizer. Three curves tell
them apart: the loss of each batch, the loss on fixed rows, and the distance of the batch's letters
from the data, which needs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, islice

import torch
from torch import Tensor

from labcore.checks import one_of, positive_int
from labcore.shuffling.orders import FullShuffle, Sequential
from labcore.studies.shuffling.characters import (
    BATCH,
    LETTERS,
    NextCharacter,
    corpus,
    row_losses,
    train,
)
from labcore.studies.shuffling.tracing import batch_distances, letter_shares

__all__ = ["CAUSES", "HEALTHY", "PANELS", "STEPS", "SYMPTOMS", "run"]

HEALTHY = "healthy"
PANELS = ("loss of the batch", "loss on fixed rows", "distance of the batch")
STEPS = 240
_FIXED_ROWS = 64
_AGAIN = 8  # batches that repeat
_RATE, _HIGH = 3e-3, 0.3  # learning rates, constant in these short runs

SYMPTOMS: Mapping[str, str] = {
    "file order": "The batch's loss moves in steps and spikes while the loss on fixed rows goes "
    "on falling, slowly, and the batches lie far from the average of the data: each is from one "
    "file, and a new file is a new distribution.",
    "learning rate too high": "Both losses jump in the first steps and then stop, far above "
    "the healthy ones, while the batches are as near to the average as chance has it: the steps "
    "are too long from the start, whatever the data are.",
    "one corrupt batch": "A single spike, with a single batch far from the average at the same "
    "step, and calm before and after: the batch itself is wrong, and the model hardly learns "
    "from one step.",
    "the same rows again": "The batch's loss falls below the healthy one while the loss on fixed "
    "rows stays above it and falls more slowly, and the distances repeat themselves: the model "
    "learns by heart what comes again and again.",
    "optimizer state lost": "Both losses jump at one step and come back slowly, and the batches "
    "are ordinary: the step went wrong and not the data. Adam's second moment was gone while "
    "its first moment and its count of steps were kept.",
}
CAUSES = tuple(SYMPTOMS)


def run(name: str, *, seed: int = 0, steps: int = STEPS) -> dict[str, list[float]]:
    """Return the curves for one cause: panel title -> one value per step. Takes about a second.

    name: HEALTHY or one of CAUSES.
    seed: seed of the weights, the order and the files (`corpus`).
    "loss of the batch" is measured before the step, in nats per letter. "loss on fixed rows" is
    measured after the step, on 64 held-out rows. "distance of the batch" is
    tracing.batch_distances of the letters, about 1 for a random batch. A one-time event happens
    halfway through `steps`.
    Raises ValueError for another name.
    """
    one_of("name", name, (HEALTHY, *CAUSES))
    positive_int("steps", steps)
    data = corpus("sources", seed)
    batches = list(_spoilt(name, _batches(name, data.rows, seed), steps, seed))
    torch.manual_seed(seed)
    model = NextCharacter()
    rate = _HIGH if name == "learning rate too high" else _RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    losses, fixed, rows = [], [], data.held_out[::8][:_FIXED_ROWS]
    for loss in train(model, optimizer, batches):
        losses.append(loss)
        with torch.no_grad():
            fixed.append(row_losses(model, rows).mean().item())
        if name == "optimizer state lost" and len(losses) == steps // 2:
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()
    shares = [letter_shares(batch) for batch in batches]
    return dict(
        zip(PANELS, (losses, fixed, batch_distances(shares, letter_shares(data.rows))), strict=True)
    )


def _batches(name: str, rows: Tensor, seed: int) -> Iterable[Tensor]:
    count = len(rows)
    order = Sequential(count) if name == "file order" else FullShuffle(count, seed=seed)
    indices = iter(order)
    cut = (rows[list(islice(indices, BATCH))] for _ in range(count // BATCH))
    return cycle(list(islice(cut, _AGAIN))) if name == "the same rows again" else cut


def _spoilt(name: str, batches: Iterable[Tensor], steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for step, batch in enumerate(islice(batches, steps)):
        if name == "one corrupt batch" and step == steps // 2:
            yield torch.randint(LETTERS, batch.shape, generator=generator)
        else:
            yield batch
