"""Optimizers on digits: a small network, the size of its updates and of the optimizer state.

The functions take the optimizers or settings to compare and return numbers. They don't plot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from labcore.checks import fraction, one_of, positive_int
from labcore.data import Digits
from labcore.studies import runs
from labcore.studies.lion.traps import weight_path

__all__ = [
    "STATE_TENSORS",
    "DigitsRun",
    "TrainConfig",
    "predict_state_bytes",
    "predict_update_rms",
    "state_bytes",
    "train_digits",
    "update_rms",
]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# How many parameter-sized state tensors each rule keeps.
STATE_TENSORS = {
    "gradient_descent": 0,
    "momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
    "lion": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The configuration of a training run of the digits network.

    steps: optimizer steps. batch: images per step. hidden: width of the hidden layer.
    dtype: dtype of parameters, gradients and images.
    schedule: "constant", or "cosine" from the optimizer's learning rate to 0 over the run.
    seed: seed of the initial weights and the order of the images.
    check_every: steps between measurements of the loss over the whole training part.
    """

    steps: int = 300
    batch: int = 64
    hidden: int = 64
    dtype: torch.dtype = torch.float32
    schedule: str = "cosine"
    seed: int = 0
    check_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "hidden", "check_every"):
            positive_int(name, getattr(self, name))
        one_of("schedule", self.schedule, ("constant", "cosine"))


@dataclass(frozen=True, kw_only=True)
class DigitsRun(runs.Run):
    """A run of the digits network, whose checks are over the whole training part.

    update_rms: (step, root mean square of the weights' change, in units of the learning rate).
    accuracy, test_loss: on the test part, after the last step.
    state_bytes: bytes of the optimizer state.
    """

    update_rms: tuple[tuple[int, float], ...]
    accuracy: float
    test_loss: float
    state_bytes: int


def _network(hidden: int, generator: torch.Generator, like: Tensor) -> nn.Sequential:
    """Build the network, 64 pixels -> hidden, ReLU -> 10 logits, drawn from `generator` alone."""
    layers = [
        nn.utils.skip_init(nn.Linear, 64, hidden),
        nn.ReLU(),
        nn.utils.skip_init(nn.Linear, hidden, 10),
    ]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return nn.Sequential(*layers).to(like)


def train_digits(make_optimizer: OptimizerFactory, config: TrainConfig, data: Digits) -> DigitsRun:
    """Train the digits network once with `make_optimizer(parameters)`.

    Runs on the device of data.train_x. With the same config, every optimizer gets the same initial
    weights and order of images, so runs can be compared in pairs.
    Raises ValueError if the batch is larger than the training part.
    """
    count = len(data.train_x)
    if config.batch > count:
        raise ValueError(f"batch must be at most the {count} training images, got {config.batch}")
    generator = torch.Generator().manual_seed(config.seed)
    train_x, test_x = data.train_x.to(config.dtype), data.test_x.to(config.dtype)
    model = _network(config.hidden, generator, train_x)
    optimizer = make_optimizer(model.parameters())
    checks: list[tuple[int, float]] = []
    updates: list[tuple[int, float]] = []

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(train_x[rows]).float(), data.train_y[rows])

    drawn = runs.shuffled(count, config.batch, generator)
    batches: Iterator[Tensor] = itertools.islice(drawn, config.steps)
    if config.schedule == "cosine":
        batches = runs.cosine(optimizer, batches, config.steps)
    losses: list[float] = []
    for rows in batches:
        step, before = len(losses), None
        if step % config.check_every == 0:
            checks.append((step, runs.judge(model, train_x, data.train_y)[1]))
            before = parameters_to_vector(model.parameters()).detach().clone()
        losses.append(runs.step(loss_of, optimizer, rows))
        if before is not None:
            updates.append((step, _relative_change(model, before, optimizer)))
    checks.append((config.steps, runs.judge(model, train_x, data.train_y)[1]))
    accuracy, test_loss = runs.judge(model, test_x, data.test_y)
    return DigitsRun(
        losses=tuple(losses),
        checks=tuple(checks),
        update_rms=tuple(updates),
        accuracy=accuracy,
        test_loss=test_loss,
        state_bytes=state_bytes(optimizer),
    )


def _relative_change(model: nn.Module, before: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Return the root mean square of the weights' change since `before`, over the learning rate."""
    moved = parameters_to_vector(model.parameters()).detach() - before
    rate = float(optimizer.param_groups[0]["lr"])
    return moved.double().square().mean().sqrt().item() / rate if rate else 0.0


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state, without parameters or gradients."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def predict_state_bytes(parameters: int, optimizer: str, dtype: torch.dtype = torch.float32) -> int:
    """Predict the bytes of optimizer state for `parameters` weights.

    optimizer: a key of STATE_TENSORS. The result is state tensors x elements x element size. Step
    counters (4 bytes per tensor in PyTorch) aren't included.
    """
    positive_int("parameters", parameters)
    one_of("optimizer", optimizer, STATE_TENSORS)
    return parameters * STATE_TENSORS[optimizer] * dtype.itemsize


def update_rms(
    make_optimizer: OptimizerFactory,
    signal: float,
    *,
    weights: int = 2000,
    steps: int = 150,
    seed: int = 0,
) -> float:
    """Measure the root mean square of an update, with gradients signal + standard normal noise.

    Averages over `weights` weights and the last third of `steps`. make_optimizer must use lr = 1
    and no decay, so that a weight's change equals the update.
    """
    generator = torch.Generator().manual_seed(seed)
    path = weight_path(
        make_optimizer,
        lambda _, w: signal + torch.randn(w.shape, generator=generator),
        start=torch.zeros(weights, dtype=torch.float64),
        steps=steps,
    )
    late = path.diff(dim=0)[-(steps // 3) :]
    return late.square().mean().sqrt().item()


def predict_update_rms(signal: float, beta1: float = 0.9) -> float:
    """Predict Adam's `update_rms` after the averages have settled, with negligible eps.

    The first moment has mean `signal` and variance (1 - beta1) / (1 + beta1). The second moment is
    1 + signal**2.
    """
    fraction("beta1", beta1)
    variance = (1 - beta1) / (1 + beta1)
    return math.sqrt((signal**2 + variance) / (signal**2 + 1))
