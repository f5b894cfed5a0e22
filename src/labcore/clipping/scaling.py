"""Clipping under a GradScaler: two correct recipes, and a wrong version of each.

The scaler multiplies the loss by a large scale before backward, so small gradients survive float16.
`unscale_` divides the gradients by the scale. All four functions end with `zero_grad`. On a CPU,
use `torch.amp.GradScaler("cpu")`.
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
    """Do one step: scale, backward, unscale_, clip, step, update.

    An overflow of the scaled gradients is not an error, because the scaler handles it: `unscale_`
    detects it, `step` skips the step and `update` lowers the scale. So the policy is "skip".
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
    """Wrong: clip the scaled gradients, which makes the effective limit max_norm / scale.

    No error occurs. At a scaler's initial scale of 65,536, the gradient ends up 65,536 times too
    small whenever the true norm is above max_norm.
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
    """Do a `clipped_step` if the norm is at most `spike`. Otherwise skip the step, but update.

    Returns whether it stepped. Reading the norm costs a host synchronization on a GPU.
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
    """Wrong: after a skipped step, don't call `update`, which the scaler still expects.

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
