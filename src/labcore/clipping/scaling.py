"""Clipping under a GradScaler: two recipes that are right, and the wrong form of each.

The loss is multiplied by a large scale before backward, so that small gradients survive float16;
`unscale_` divides the gradients again. All four end with gradients of zero or none. A scaler for
the CPU is `torch.amp.GradScaler("cpu")`.
"""

from __future__ import annotations

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from labcore import checks
from labcore.clipping.clip import clip_by_global_norm
from labcore.clipping.contract import Clipped, Parameters

__all__ = [
    "clipped_step",
    "step_clipped_before_unscaling",
    "step_or_skip",
    "step_or_skip_without_update",
]


def clipped_step(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    parameters: Parameters,
    max_norm: float,
) -> Clipped:
    """One step: scale, backward, unscale_, clip, step, update.

    An overflow of the scaled gradients is no error but the scaler's business: `unscale_` notes it,
    `step` then leaves the step out and `update` lowers the scale. So the policy here is "skip".
    """
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clipped = clip_by_global_norm(parameters, max_norm, nonfinite="skip")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return clipped


def step_clipped_before_unscaling(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    parameters: Parameters,
    max_norm: float,
) -> Clipped:
    """Wrong: clips the scaled gradients, so that the limit in force is max_norm / scale.

    Nothing fails; at the scale of 65,536 that a scaler starts with the step is 65,536 times too
    short wherever the true norm is above max_norm.
    """
    scaler.scale(loss).backward()
    clipped = clip_by_global_norm(parameters, max_norm, nonfinite="skip")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return clipped


def step_or_skip(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    parameters: Parameters,
    max_norm: float,
    *,
    spike: float,
) -> bool:
    """`clipped_step` where the norm is at most `spike`; else no step, but update all the same.

    Returns whether it stepped. Deciding reads the norm: a host synchronization on a GPU.
    """
    stepped = _unless_spike(loss, optimizer, scaler, parameters, max_norm, spike)
    scaler.update()
    return stepped


def step_or_skip_without_update(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    parameters: Parameters,
    max_norm: float,
    *,
    spike: float,
) -> bool:
    """Wrong: a step that was skipped ends without `update`, so the scaler still waits for it.

    The next call's `unscale_` raises a RuntimeError, and an overflow never lowers the scale.
    """
    stepped = _unless_spike(loss, optimizer, scaler, parameters, max_norm, spike)
    if stepped:
        scaler.update()
    return stepped


def _unless_spike(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    parameters: Parameters,
    max_norm: float,
    spike: float,
) -> bool:
    checks.positive("spike", spike)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clipped = clip_by_global_norm(parameters, max_norm, nonfinite="skip")
    stepped = bool(clipped.norm <= spike)
    if stepped:
        scaler.step(optimizer)
    optimizer.zero_grad()
    return stepped
