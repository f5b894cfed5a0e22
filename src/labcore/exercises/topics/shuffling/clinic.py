"""Five runs with one fault each, told apart by their loss, their batches and a held-out loss."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from labcore.exercises.clinic import Clinic, Fault

__all__ = ["CLINIC"]

CLASSES, ROWS, INPUTS = 6, 300, 40  # ROWS per class
BATCH, EPOCHS = 30, 4
STEPS = EPOCHS * CLASSES * ROWS // BATCH
RATE, TOO_HIGH = 0.5, 4.0
RESTART_AT, AGAIN = 100, 3  # steps until the first stop, and between later ones


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The rows of each step's batch, and the learning rate."""

    batches: Callable[[], Iterator[Tensor]]
    rate: float = RATE


@functools.cache
def _data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of overlapping classes, in class order, and a sixth as many held out."""
    generator = torch.Generator().manual_seed(20)
    centers = 0.4 * torch.randn(CLASSES, 1, INPUTS, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, CLASSES, ROWS, INPUTS, generator=generator, dtype=torch.float64)
    labels = torch.arange(CLASSES).repeat_interleave(ROWS)
    seen, held = (centers + noise).reshape(2, -1, INPUTS)
    some = torch.arange(0, len(labels), 6)
    return seen, labels, held[some], labels[some]


def _shuffled() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(21)
    for _ in range(EPOCHS):
        yield from torch.randperm(CLASSES * ROWS, generator=generator).split(BATCH)


def _small_buffer() -> Iterator[Tensor]:
    """Rows in stored order, through a buffer as long as one class."""
    generator = torch.Generator().manual_seed(22)
    for _ in range(EPOCHS):
        waiting, order = list(range(ROWS)), []
        for row in range(ROWS, CLASSES * ROWS):
            slot = int(torch.randint(ROWS, (), generator=generator))
            order.append(waiting[slot])
            waiting[slot] = row
        order += [waiting[place] for place in torch.randperm(ROWS, generator=generator).tolist()]
        yield from torch.tensor(order).split(BATCH)


def _worker_a_class() -> Iterator[Tensor]:
    """Each worker shuffles the rows of one class; the workers take turns."""
    generator = torch.Generator().manual_seed(23)
    for _ in range(EPOCHS):
        lanes = [
            (ROWS * label + torch.randperm(ROWS, generator=generator)).split(BATCH)
            for label in range(CLASSES)
        ]
        for turn in zip(*lanes, strict=True):
            yield from turn


def _class_missing() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(24)
    rows = torch.cat([torch.arange(2 * ROWS), torch.arange(3 * ROWS, CLASSES * ROWS)])
    while True:
        yield from rows[torch.randperm(len(rows), generator=generator)].split(BATCH)


def _starts_over() -> Iterator[Tensor]:
    """After RESTART_AT steps the run restarts its epoch every AGAIN steps."""
    batches = list(_shuffled())
    yield from batches[:RESTART_AT]
    yield from itertools.cycle(batches[:AGAIN])


def _observe(run: _Run) -> dict[str, list[float]]:
    """Train softmax regression in float64 and record each step before its update."""
    inputs, labels, held, held_labels = _data()
    weight = torch.zeros(INPUTS, CLASSES, dtype=torch.float64)
    shown = []
    for rows in itertools.islice(run.batches(), STEPS):
        x, y = inputs[rows], labels[rows]
        scores = (x @ weight).log_softmax(1)
        shares = y.bincount(minlength=CLASSES).double() / len(y)
        held_loss = nll_loss((held @ weight).log_softmax(1), held_labels)
        shown.append([nll_loss(scores, y), torch.special.entr(shares).sum(), held_loss])
        error = scores.exp() - one_hot(y, CLASSES)
        weight = weight - run.rate / len(y) * x.T @ error
    titles = ("loss of the batch", "entropy of its labels", "loss on held-out rows")
    return dict(zip(titles, torch.tensor(shown).T.tolist(), strict=True))


CLINIC = Clinic(
    id="shuffling.clinic",
    points=5,
    healthy=lambda: _Run(batches=_shuffled),
    faults={
        "buffer too small": Fault(
            make=lambda: _Run(batches=_small_buffer),
            symptom="the batches hold a few classes more than the others, so that their "
            "entropy lies between zero and the healthy one and sinks where an epoch begins; on "
            "held-out rows the run learns class after class and goes on in waves.",
        ),
        "each worker reads one class": Fault(
            make=lambda: _Run(batches=_worker_a_class),
            symptom="the labels of a batch have no entropy at all, in any step, and the loss jumps "
            "from batch to batch more than the healthy one; as all classes come by every six "
            "steps, the loss on held-out rows hardly suffers.",
        ),
        "learning rate too high": Fault(
            make=lambda: _Run(batches=_shuffled, rate=TOO_HIGH),
            symptom="the batches are the healthy ones, label by label, and yet both losses are "
            "high and rough from the first steps to the last.",
        ),
        "one class is never read": Fault(
            make=lambda: _Run(batches=_class_missing),
            symptom="the entropy is steadily a little lower than the healthy one, and so is the "
            "batch loss, for there is less to tell apart; on held-out rows the loss is far higher "
            "from the first steps on and rises: a part of them is of a kind that the run never "
            "sees.",
        ),
        "resumes begin the epoch anew": Fault(
            make=lambda: _Run(batches=_starts_over),
            symptom="from some step on the batch loss sinks far below the healthy one while the "
            "loss on held-out rows rises: the same rows are learned by heart. The entropy repeats "
            "itself.",
        ),
    },
    observe=_observe,
    axis=range(1, STEPS + 1),
    explanation="The entropy looks at the data and not at the model, so it tells faults of the "
    "order from a learning rate. It has a blind spot: batches that come again and again are as "
    "mixed as they were the first time. What gives them away is the distance between the batch "
    "loss and the held-out loss, which opens when the repeats begin; where a class is missing it "
    "is open from the start.",
)
