"""The optimizer's step inside the backward: one parameter's gradient exists at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["step_in_backward"]


def step_in_backward(
    model: nn.Module, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> tuple[list[torch.optim.Optimizer], list[RemovableHandle]]:
    """Let each backward update every trainable parameter as soon as its gradient is complete.

    optimizer: makes the optimizer of one parameter. With an optimizer whose update of a parameter
    depends on no other parameter, the numbers equal those of the usual loop. Nothing that needs all
    gradients at once can work: clipping by the global norm, gradients added up over several
    backwards, a loss scaler that skips steps. Nor can several replicas: under
    DistributedDataParallel the hook sees the gradient before it's averaged, no error is raised, and
    the replicas drift apart.
    Returns the optimizers, for schedules and checkpoints, and the hooks, whose `remove()` ends it.
    Raises ValueError for a model without trainable parameters.
    Source: torch's tutorial "How to save memory by fusing the optimizer step into the backward
    pass", 2023.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "step_in_backward needs a model with trainable parameters, got none; "
            "set requires_grad of those that should learn"
        )
    optimizers: dict[Tensor, torch.optim.Optimizer] = {one: optimizer([one]) for one in trained}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [each.register_post_accumulate_grad_hook(update) for each in trained]
    return list(optimizers.values()), hooks
