"""Digits sorted by class, the worst possible order, with every batch quantity known exactly.

The gradients of all rows fit in memory. This allows checking the design effect predicted from one
batch size against measurements at others. Settings were chosen on TUNING_SEEDS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive_int
from labcore.data import Digits, digits
from labcore.shuffling.correlation import (
    LabelEntropy,
    design_effect,
    intraclass_correlation,
    label_entropy,
    per_sample_gradients,
    predicted_design_effect,
)
from labcore.shuffling.orders import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    Sequential,
    shards_of,
)
from labcore.studies import runs

__all__ = [
    "BATCH",
    "ORDERS",
    "SEEDS",
    "SIZES",
    "TUNING_SEEDS",
    "Effects",
    "OrderRun",
    "batches_of",
    "effects",
    "gradients",
    "sorted_digits",
    "train",
]

BATCH, EPOCHS, LEARNING_RATE = 32, 6, 0.5
TUNING_SEEDS = (900, 901)
SEEDS = (0, 1, 2, 3, 4)
SIZES = (4, 8, 16, 32, 64, 128, 256)
_HEAD = 650  # weights and biases of the output layer, at the end of a gradient

Order = Callable[[int, int], Iterable[int]]  # (rows, seed) -> row indices; each loop is an epoch

ORDERS: Mapping[str, Order] = {
    "sorted": lambda rows, seed: Sequential(rows, seed=seed),
    "buffer 128": lambda rows, seed: BufferShuffle(rows, buffer_size=128, seed=seed),
    "buffer 512": lambda rows, seed: BufferShuffle(rows, buffer_size=512, seed=seed),
    "blocks": lambda rows, seed: BlockShuffle(shards_of(rows, 45), blocks=8, seed=seed),
    "full": lambda rows, seed: FullShuffle(rows, seed=seed),
}


@functools.cache
def sorted_digits() -> Digits:
    """Return the digits of labcore.data with the training images sorted by class."""
    data = digits()
    order = data.train_y.argsort(stable=True)
    return Digits(
        train_x=data.train_x[order],
        train_y=data.train_y[order],
        test_x=data.test_x,
        test_y=data.test_y,
        version=data.version,
    )


def batches_of(order: str, size: int, *, seed: int = 0, epochs: int = 1) -> list[Tensor]:
    """Return the row indices of whole batches, int64 [size] each; drop rows left after an epoch.

    order: a key of ORDERS, applied to the rows of `sorted_digits`.
    """
    rows = ORDERS[one_of("order", order, ORDERS)](len(sorted_digits().train_y), seed)
    positive_int("size", size)
    every = (torch.tensor(list(rows)) for _ in range(positive_int("epochs", epochs)))
    return [batch for epoch in every for batch in epoch.split(size) if len(batch) == size]


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True, kw_only=True)
class OrderRun(runs.Run):
    """A run on sorted digits.

    accuracy: on the test images. entropy: the entropy of each batch's labels.
    """

    accuracy: float
    entropy: LabelEntropy


def train(order: str, seed: int, *, epochs: int = EPOCHS) -> OrderRun:
    """Train a network with one hidden layer by plain SGD, with the rows in one of ORDERS."""
    data, model = sorted_digits(), _network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = batches_of(order, BATCH, seed=seed, epochs=epochs)

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.train_x[rows]), data.train_y[rows])

    return OrderRun(
        losses=tuple(runs.train(loss_of, optimizer, batches)),
        accuracy=runs.judge(model, data.test_x, data.test_y)[0],
        entropy=label_entropy(data.train_y[rows] for rows in batches),
    )


@functools.cache
def gradients(seed: int = 0) -> Tensor:
    """Return each training image's gradient [1438, 4810], fp32, after one shuffled epoch."""
    data, model = sorted_digits(), _network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in batches_of("full", BATCH, seed=seed):
        optimizer.zero_grad()
        F.cross_entropy(model(data.train_x[rows]), data.train_y[rows]).backward()
        optimizer.step()
    return per_sample_gradients(model, F.cross_entropy, data.train_x, data.train_y)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """The design effect of the output layer's gradient by batch size, for one order.

    icc: the intraclass correlation at batch size `at`. predicted: 1 + (b - 1) icc.
    """

    at: int
    icc: float
    sizes: tuple[int, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]


def effects(
    order: str,
    *,
    seed: int = 0,
    at: int = BATCH,
    epochs: int = 3,
    sizes: tuple[int, ...] = SIZES,
) -> Effects:
    """Predict the design effect at `sizes` from the correlation at one batch size, and measure it.

    For speed, this uses only the output layer's 650 entries of the gradient. The prediction assumes
    that any two rows of a batch are equally similar, whatever the batch size.
    """
    rows = gradients(seed)[:, -_HEAD:]

    def cut(size: int) -> list[Tensor]:
        return [rows[batch] for batch in batches_of(order, size, seed=seed, epochs=epochs)]

    icc = intraclass_correlation(cut(at))
    return Effects(
        at=at,
        icc=icc,
        sizes=sizes,
        predicted=tuple(predicted_design_effect(icc, size) for size in sizes),
        measured=tuple(design_effect(cut(size)) for size in sizes),
    )
