"""Small and large batches on digits: how runs are configured, tuned and reported.

The training part has 512 images, so a batch of 512 is all of it. Learning rates are chosen on
TUNING_SEEDS and on validation images. After that, SEEDS and the test images are used once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive, positive_int
from labcore.data import Digits, digits
from labcore.norm.layers import GhostBatchNorm1d
from labcore.studies import runs

__all__ = [
    "EPOCHS",
    "GHOST",
    "IMAGES",
    "LARGE",
    "LEARNING_RATE",
    "LEARNING_RATES",
    "PLAIN_LEARNING_RATE",
    "PLAIN_REGIMES",
    "REGIMES",
    "SEEDS",
    "SMALL",
    "SWEEP_BATCHES",
    "SWEEP_GHOSTS",
    "TARGET",
    "TUNING_SEEDS",
    "GhostRun",
    "Regime",
    "landscape",
    "network",
    "split",
    "sweep_regime",
    "train",
]

IMAGES = 512  # in the training part
HIDDEN = 64  # units in each of the two hidden layers
SMALL, LARGE, GHOST = 32, 512, 32
EPOCHS = 30
POOL = 1000  # images from which each seed draws its training part; the other 797 are test images
TUNING_SEEDS = tuple(range(900, 905))
SEEDS = tuple(range(16))
LEARNING_RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
# From the case `digits/tuning`: the best validation accuracy of the small batch.
LEARNING_RATE = 0.3
PLAIN_LEARNING_RATE = 0.1  # for the network without normalization
TARGET = 0.1  # loss over the training part, for counting the steps to reach it
SWEEP_BATCHES = (32, 64, 128, 256, 512)
SWEEP_GHOSTS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """A training configuration: SGD with momentum 0.9 and a cosine learning rate schedule to 0.

    batch: images per step. lr: the initial learning rate. ghost: images per ghost batch; None for
    the whole batch. steps: None for EPOCHS passes over the images. normalized: whether to use batch
    normalization.
    """

    batch: int
    lr: float
    ghost: int | None = None
    steps: int | None = None
    normalized: bool = True

    def __post_init__(self) -> None:
        positive_int("batch", self.batch)
        positive("lr", self.lr)
        if self.batch > IMAGES:
            raise ValueError(f"batch must be at most the {IMAGES} images, got {self.batch}")

    @property
    def updates(self) -> int:
        """Optimizer steps in the run."""
        return EPOCHS * (IMAGES // self.batch) if self.steps is None else self.steps


_MANY = EPOCHS * (IMAGES // SMALL)
_ROOT = LEARNING_RATE * math.sqrt(LARGE / SMALL)
_LINEAR = LEARNING_RATE * LARGE / SMALL

REGIMES: Mapping[str, Regime] = {
    "small batch": Regime(batch=SMALL, lr=LEARNING_RATE),
    "large batch": Regime(batch=LARGE, lr=LEARNING_RATE),
    "large, linear rate": Regime(batch=LARGE, lr=_LINEAR),
    "large, root rate": Regime(batch=LARGE, lr=_ROOT),
    "large, root rate, ghosts": Regime(batch=LARGE, lr=_ROOT, ghost=GHOST),
    "large, root rate, more updates": Regime(batch=LARGE, lr=_ROOT, steps=_MANY),
    "large, root rate, ghosts, more updates": Regime(
        batch=LARGE, lr=_ROOT, ghost=GHOST, steps=_MANY
    ),
    "large, more updates": Regime(batch=LARGE, lr=LEARNING_RATE, steps=_MANY),
    "large, ghosts, more updates": Regime(batch=LARGE, lr=LEARNING_RATE, ghost=GHOST, steps=_MANY),
}
"""Name -> regime. The learning rate is the small batch's, times 4 (root rule) or 16 (linear)."""

PLAIN_REGIMES: Mapping[str, Regime] = {
    "small batch": Regime(batch=SMALL, lr=PLAIN_LEARNING_RATE, normalized=False),
    "large, more updates": Regime(
        batch=LARGE, lr=PLAIN_LEARNING_RATE, steps=_MANY, normalized=False
    ),
}
"""Regimes without normalization."""


def sweep_regime(batch: int, ghost: int, *, many: bool = False, epochs: int = EPOCHS) -> Regime:
    """Return a regime for the explorer, with the learning rate from the square-root rule.

    many: use the small batch's number of updates instead of its number of epochs.
    Raises ValueError if the ghost is larger than the batch.
    """
    if ghost > batch:
        raise ValueError(f"ghost must be at most the batch of {batch}, got {ghost}")
    return Regime(
        batch=batch,
        lr=LEARNING_RATE * math.sqrt(batch / SMALL),
        ghost=None if ghost == batch else ghost,
        steps=epochs * (IMAGES // (SMALL if many else batch)),
    )


@functools.cache
def _pool() -> Digits:
    return digits(train_share=POOL / 1797)


def split(seed: int, part: str = "test") -> Digits:
    """Return IMAGES training images, drawn by `seed` from a pool of 1,000, and evaluation images.

    part: the evaluation images. "test" is the 797 images outside the pool, the same for every seed.
    "validation" is the pool's 488 images that this seed doesn't train on.
    """
    one_of("part", part, ("test", "validation"))
    pool = _pool()
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))
    rows, rest = order[:IMAGES], order[IMAGES:]
    judge = (
        (pool.test_x, pool.test_y) if part == "test" else (pool.train_x[rest], pool.train_y[rest])
    )
    return Digits(
        train_x=pool.train_x[rows],
        train_y=pool.train_y[rows],
        test_x=judge[0],
        test_y=judge[1],
        version=pool.version,
    )


def network(regime: Regime, generator: torch.Generator) -> nn.Sequential:
    """Build a network: 64 pixels -> two hidden layers with norm and ReLU -> 10 logits [B, 10].

    The weights are drawn from `generator` alone (He et al., arXiv 1502.01852) and are the same for
    every regime. Without normalization, the hidden layers have biases instead.
    """
    layers: list[nn.Module] = []
    for width in (64, HIDDEN):
        layers.append(nn.utils.skip_init(nn.Linear, width, HIDDEN, bias=not regime.normalized))
        if regime.normalized:
            layers.append(_norm(HIDDEN, regime.ghost))
        layers.append(nn.ReLU())
    layers.append(nn.utils.skip_init(nn.Linear, HIDDEN, 10))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _norm(width: int, ghost: int | None) -> nn.Module:
    if ghost is None:
        return nn.BatchNorm1d(width)
    return GhostBatchNorm1d(width, ghost_size=ghost)


@dataclass(frozen=True, kw_only=True, eq=False)
class GhostRun(runs.Run):
    """A run of one regime. Its checks are over the training part, with that part's statistics.

    accuracy, test_loss: on the evaluation images, with the running statistics.
    refreshed: the accuracy with the statistics of the whole training part instead.
    training_accuracy, training_loss: on the training part with its own statistics, at the end.
    model: the network.
    """

    accuracy: float
    test_loss: float
    refreshed: float
    training_accuracy: float
    training_loss: float
    model: nn.Sequential


def train(
    regime: Regime,
    seed: int,
    *,
    part: str = "test",
    check_every: int = 0,
    until: float = -math.inf,
) -> GhostRun:
    """Train once; `seed` determines the images, the weights and the order.

    Regimes with the same seed share images and initial weights, so runs can be compared in pairs.
    part: the evaluation images (see `split`).
    check_every: steps between measurements of the loss over the training part; 0 measures only at
    the end.
    until: end the run at a check with at most this loss.
    """
    data = split(seed, part)
    generator = torch.Generator().manual_seed(seed)
    model = network(regime, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=regime.lr, momentum=0.9)
    checks: list[tuple[int, float]] = []
    losses: list[float] = []

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.train_x[rows]), data.train_y[rows])

    drawn = itertools.islice(runs.shuffled(IMAGES, regime.batch, generator), regime.updates)
    for rows in runs.cosine(optimizer, drawn, regime.updates):
        if check_every and len(losses) % check_every == 0:
            checks.append((len(losses), _with_own_statistics(model, data)[1]))
            if checks[-1][1] <= until:
                break
        losses.append(runs.step(loss_of, optimizer, rows))
    accuracy, test_loss = runs.judge(model.eval(), data.test_x, data.test_y)
    training_accuracy, training_loss = _with_own_statistics(model, data)
    return GhostRun(
        losses=tuple(losses),
        checks=(*checks, (len(losses), training_loss)),
        accuracy=accuracy,
        test_loss=test_loss,
        refreshed=runs.judge(_refreshed(model, data.train_x), data.test_x, data.test_y)[0],
        training_accuracy=training_accuracy,
        training_loss=training_loss,
        model=model,
    )


def _plain(model: nn.Sequential) -> nn.Sequential:
    """Return a copy in training mode that has plain batch normalization if the model has any."""
    norms = [layer for layer in model if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    like = Regime(batch=IMAGES, lr=1.0, normalized=bool(norms))
    plain = network(like, torch.Generator())
    plain.load_state_dict(model.state_dict())
    return plain.train()


@torch.no_grad()
def _refreshed(model: nn.Sequential, images: Tensor) -> nn.Sequential:
    """Return a copy in evaluation mode with the statistics of `images` as running statistics."""
    plain = _plain(model)
    for layer in plain:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 1.0  # the next batch replaces the statistics
    plain(images)
    return plain.eval()


def _with_own_statistics(model: nn.Sequential, data: Digits) -> tuple[float, float]:
    """Return the accuracy and loss over the training part, normalized with its own statistics."""
    return runs.judge(_plain(model), data.train_x, data.train_y)


def landscape(model: nn.Sequential, data: Digits) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the loss over the training part as a function of the weights, for `sharpness`.

    Returns (loss, weights) for a copy of `model`. It's always normalized with the training part's
    statistics, whatever ghost size the model was trained with.
    """
    plain = _plain(model)
    return (
        lambda: F.cross_entropy(plain(data.train_x), data.train_y),
        list(plain.parameters()),
    )
