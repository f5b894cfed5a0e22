"""Small and large batches on images: how runs are configured, trained and judged.

The images are digits in two forms: MNIST-1D, 8,192 training rows made by a program, and the 8 x 8
handwritten digits, 512 images. Learning rates are chosen on TUNING_SEEDS and on validation rows.
After that, SEEDS and the test rows are used once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive, positive_int
from labcore.data import digits
from labcore.studies.ghost_norm import mnist1d
from labcore.studies.ghost_norm.stacks import Norm, Stack

__all__ = [
    "EPOCHS", "GHOST", "LARGE", "RATES", "SEEDS", "SMALL", "SOURCES", "TUNING_SEEDS",
    "Check", "Regime", "Rows", "TrainedNetwork", "network", "split", "train",
]  # fmt: skip

SMALL, LARGE, GHOST, EPOCHS = 32, 512, 32, 20
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
TUNING_SEEDS, SEEDS = (900, 901, 902), tuple(range(6))
PARTS = ("test", "validation")
POOL = 1000  # handwritten digits from which each seed draws its 512; the other 797 are test images


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """What a network learns from and is judged on.

    train_x fp32 [N, inputs] and train_y int64 [N]; test_x and test_y likewise.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data set: its training rows and inputs, and the width of the networks that learn it."""

    rows: int
    inputs: int
    hidden: int
    split: Callable[[int, str], Rows]


@functools.cache
def _mnist1d_judges(part: str) -> tuple[Tensor, Tensor]:
    seed = 10**9 + PARTS.index(part)
    return mnist1d.draw(8192, torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=32)
def _mnist1d(seed: int, part: str) -> Rows:
    """Every seed has training rows of its own; the evaluation rows are the same for all."""
    x, y = mnist1d.draw(SOURCES["MNIST-1D"].rows, torch.Generator().manual_seed(seed))
    test_x, test_y = _mnist1d_judges(part)
    return Rows(train_x=x, train_y=y, test_x=test_x, test_y=test_y)


@functools.lru_cache(maxsize=32)
def _digits(seed: int, part: str) -> Rows:
    """512 images drawn by the seed from 1,000; test: the other 797; validation: the pool's rest."""
    pool = digits(train_share=POOL / 1797)
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))
    rows, rest = order.tensor_split([SOURCES["digits"].rows])
    judges = {
        "test": (pool.test_x, pool.test_y),
        "validation": (pool.train_x[rest], pool.train_y[rest]),
    }
    test_x, test_y = judges[part]
    return Rows(
        train_x=pool.train_x[rows], train_y=pool.train_y[rows], test_x=test_x, test_y=test_y
    )


SOURCES: Mapping[str, Source] = {
    "MNIST-1D": Source(rows=8192, inputs=mnist1d.LENGTH, hidden=64, split=_mnist1d),
    "digits": Source(rows=512, inputs=64, hidden=64, split=_digits),
}


def split(seed: int, *, source: str = "MNIST-1D", part: str = "test") -> Rows:
    """Return the training rows of `seed`, and the rows on which `part` judges.

    source: of SOURCES. part: "test" or "validation"; the two never share a row.
    """
    one_of("part", part, PARTS)
    return SOURCES[one_of("source", source, SOURCES)].split(seed, part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """A way to train: SGD with momentum 0.9 and a learning rate that falls to 0 along a cosine.

    batch: rows per step. lr: the first learning rate. epochs: passes over the training rows, which
    set the number of updates. norm: as in Stack. ghost: rows per ghost; None for the whole batch.
    source: of SOURCES. fresh: draw new rows for every epoch, so that no row comes twice; MNIST-1D
    only.
    """

    batch: int
    lr: float
    epochs: int = EPOCHS
    norm: Norm = "batch"
    ghost: int | None = None
    source: str = "MNIST-1D"
    fresh: bool = False

    def __post_init__(self) -> None:
        positive_int("batch", self.batch)
        positive_int("epochs", self.epochs)
        positive("lr", self.lr)
        rows = SOURCES[one_of("source", self.source, SOURCES)].rows
        if self.batch > rows:
            raise ValueError(f"batch must be at most the {rows} training rows, got {self.batch}")
        if self.ghost is not None and (self.norm != "batch" or self.ghost > self.batch):
            raise ValueError(
                f'ghosts need norm "batch" and at most the batch of {self.batch} rows, '
                f'got norm "{self.norm}" and ghosts of {self.ghost}'
            )
        if self.fresh and self.source != "MNIST-1D":
            raise ValueError(f"only MNIST-1D has fresh rows, got source {self.source!r}")

    @property
    def updates(self) -> int:
        """Optimizer steps in the run."""
        return self.epochs * (SOURCES[self.source].rows // self.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a check during training found.

    updates: steps done. training_loss: over the training part, normalized by the statistics of that
    part, in nats; in a run on fresh rows, over the epoch that was last read. accuracy, test_loss:
    on the evaluation rows, with the running statistics.
    """

    updates: int
    training_loss: float
    accuracy: float
    test_loss: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedNetwork:
    """One network after its training.

    checks: the last is at the end.
    """

    checks: tuple[Check, ...]
    model: nn.Sequential

    @property
    def end(self) -> Check:
        """The check after the last step."""
        return self.checks[-1]

    @property
    def accuracy(self) -> float:
        """The accuracy on the evaluation rows at the end."""
        return self.end.accuracy


def network(regime: Regime, seeds: Sequence[int]) -> tuple[Stack, list[torch.Generator]]:
    """Build one network per seed; return them and the generators that go on to draw the order."""
    source = SOURCES[regime.source]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stack = Stack(
        generators,
        inputs=source.inputs,
        hidden=source.hidden,
        norm=regime.norm,
        ghost=regime.ghost,
    )
    return stack, generators


class _Stream:
    """The training rows of every seed, x [N, rows, inputs] and y [N, rows], in batches."""

    def __init__(self, regime: Regime, seeds: Sequence[int], part: str) -> None:
        read = [split(seed, source=regime.source, part=part) for seed in seeds]
        self.regime = regime
        self.x = torch.stack([rows.train_x for rows in read])
        self.y = torch.stack([rows.train_y for rows in read])

    def batches(self, generators: Sequence[torch.Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x [N, B, inputs] and y [N, B] of every step, each seed in an order of its own."""
        count, size = self.x.shape[1], self.regime.batch
        for epoch in range(self.regime.epochs):
            if self.regime.fresh and epoch:
                drawn = [mnist1d.draw(count, each) for each in generators]
                self.x, self.y = map(torch.stack, zip(*drawn, strict=True))
            order = torch.stack([torch.randperm(count, generator=each) for each in generators])
            for rows in order[:, : count - count % size].split(size, dim=1):
                index = rows[:, :, None].expand(-1, -1, self.x.shape[2])
                yield self.x.gather(1, index), self.y.gather(1, rows)


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of each network, [N], from logits [N, B, 10] and y [N, B]."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


def train(
    regime: Regime, seeds: Sequence[int], *, part: str = "test", checks: int = 1
) -> list[TrainedNetwork]:
    """Train one network per seed, side by side; the networks share nothing.

    A seed determines the training rows, the first weights and the order, so regimes can be compared
    seed by seed. part: the evaluation rows (see `split`). checks: how many checks to make, evenly
    spaced; the last one is at the end.
    """
    stack, generators = network(regime, seeds)
    stream = _Stream(regime, seeds, part)
    optimizer = torch.optim.SGD(stack.parameters(), lr=regime.lr, momentum=0.9)
    places = {
        round(regime.updates * (n + 1) / positive_int("checks", checks)) for n in range(checks)
    }
    found: list[list[Check]] = []
    for step, (x, y) in enumerate(stream.batches(generators)):
        lr = regime.lr * 0.5 * (1 + math.cos(math.pi * step / regime.updates))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        _losses(stack(x), y).sum().backward()
        optimizer.step()
        if step + 1 in places:
            found.append(_check(stack, stream, step + 1, seeds, part))
    stack.eval()
    return [
        TrainedNetwork(checks=each, model=stack.member(n))
        for n, each in enumerate(zip(*found, strict=True))
    ]


@torch.no_grad()
def _check(
    stack: Stack, stream: _Stream, step: int, seeds: Sequence[int], part: str
) -> list[Check]:
    learned = _losses(stack(stream.x, whole=True), stream.y).tolist()
    judged = [split(seed, source=stream.regime.source, part=part) for seed in seeds]
    x = torch.stack([rows.test_x for rows in judged])
    y = torch.stack([rows.test_y for rows in judged])
    logits = stack.eval()(x)
    stack.train()
    losses, right = _losses(logits, y).tolist(), (logits.argmax(2) == y).double().mean(1).tolist()
    return [
        Check(updates=step, training_loss=a, accuracy=b, test_loss=c)
        for a, b, c in zip(learned, right, losses, strict=True)
    ]
