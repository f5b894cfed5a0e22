"""How the order of rows affects the running statistics of ghost batches, by policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labcore.checks import positive_int
from labcore.norm.convert import convert_ghost_batchnorm
from labcore.norm.ghosts import POLICIES, Running, ghost_sizes
from labcore.norm.layers import GhostBatchNorm1d
from labcore.studies.ghost_norm.large_batches import Rows

__all__ = ["accuracy_by_policy", "predict_variances", "running_variances"]


def running_variances(
    values: Tensor, *, ghost: int, steps: int = 3, momentum: float = 0.1
) -> dict[str, float]:
    """Measure the running variance by policy, the mean over channels, after `steps` forwards.

    values: [B, C] floating point, the input of each training forward, with its rows in this order.
    The running variance starts at 1, as in PyTorch's layers. Measured in fp64.
    """
    found: dict[str, float] = {}
    for policy in POLICIES:
        layer = GhostBatchNorm1d(
            values.shape[1],
            momentum=momentum,
            ghost_size=ghost,
            running=policy,
            dtype=torch.float64,
        )
        for _ in range(positive_int("steps", steps)):
            layer(values.double())
        found[policy] = layer.state_dict()["running_var"].mean().item()
    return found


def predict_variances(
    variances: Tensor, total: float, *, ghost: int, steps: int = 3, momentum: float = 0.1
) -> dict[str, float]:
    """Predict the running variances from the variance of each row's group.

    variances: [B]. A row's group is its class if rows are sorted by class, or all rows if they are
    shuffled. total: the variance of all rows. A ghost is predicted to have the mean over its rows,
    which is too small for a ghost with rows of two classes.
    Every update keeps a share 1 - momentum of the old value and adds a share momentum of the new.
    """
    sizes = ghost_sizes(len(variances), ghost)
    each = [part.double().mean().item() for part in variances.split(list(sizes))]
    rounds: Mapping[str, tuple[list[float], float]] = {
        "sequential": (each, momentum),
        "pooled": ([total], momentum),
        "mean": ([sum(each) / len(each)], momentum),
        "divided": (each, momentum / len(each)),
    }
    found = {}
    for policy, (updates, factor) in rounds.items():
        running = 1.0
        for update in updates * steps:
            running += factor * (update - running)
        found[policy] = running
    return found


@torch.no_grad()
def accuracy_by_policy(
    model: nn.Module, data: Rows, rows: Tensor, *, ghost: int, passes: int = 50
) -> dict[str, float]:
    """Return the test accuracy by policy, with fixed weights and new running statistics.

    rows: [B], the training images of the single batch, in order. The batch passes `passes` times
    through a copy of `model` in training mode.
    """
    found: dict[str, float] = {}
    for policy in POLICIES:
        fresh = _from_the_start(model, ghost, policy)
        for _ in range(positive_int("passes", passes)):
            fresh(data.train_x[rows])
        guesses = fresh.eval()(data.test_x).argmax(1)
        found[policy] = (guesses == data.test_y).double().mean().item()
    return found


def _from_the_start(model: nn.Module, ghost: int, policy: Running) -> nn.Module:
    fresh = convert_ghost_batchnorm(copy.deepcopy(model), ghost, running=policy)
    for layer in fresh.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
    return fresh.train()
