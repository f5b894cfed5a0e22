"""Limits that adapt to the norms so far: AutoClip's percentile and ZClip's z-score."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from labcore import checks
from labcore.clipping.apply import clear_where_skipped, coefficients_for, measured, scale
from labcore.clipping.contract import (
    Clipped,
    Gradients,
    Parameters,
    gradients,
    limit_above_zero,
    policy,
)
from labcore.clipping.norms import combined, norm_order

__all__ = ["AutoClip", "ZClip"]


class AutoClip:
    """Clip the global norm to a percentile of all norms so far, including this step's.

    percentile: 0 to 100, interpolated linearly between norms; 100 clips nothing.
    window: the number of latest norms that count; None for all.
    norm_type, nonfinite: as in `clip_by_global_norm`. A norm that is not finite, or that "zero"
    cleaned, does not enter the history.
    Source: Seetharaman, Wichern, Pardo and Le Roux, arXiv:2007.14469.
    """

    def __init__(
        self,
        percentile: float = 10.0,
        *,
        window: int | None = None,
        norm_type: float = 2.0,
        nonfinite: str = "raise",
    ) -> None:
        checks.non_negative("percentile", percentile)
        if percentile > 100:
            raise ValueError(f"percentile must be at most 100, got {percentile}; pass 10 for 10%")
        if window is not None:
            checks.positive_int("window", window, "pass None to keep all norms")
        self.percentile = float(percentile)
        self.window = window
        self.norm_type = norm_order(norm_type)
        self.nonfinite = policy(nonfinite)
        self._norms = torch.full((window or 256,), math.nan, dtype=torch.float64)
        self._steps = 0

    @property
    def history(self) -> Tensor:
        """[n] float64: the norms that count, oldest first; NaN marks a step without one."""
        if self.window is not None and self._steps > self.window:
            return self._norms.roll(-(self._steps % self.window))
        return self._norms[: self._steps]

    def threshold(self) -> Tensor:
        """[] float64: the limit from the history; infinite if there are no norms."""
        if self._steps == 0:
            return self._norms.new_full((), math.inf)
        seen = self._norms[: min(self._steps, len(self._norms))]
        limit = torch.nanquantile(seen, self.percentile / 100)
        return torch.where(torch.isnan(limit), math.inf, limit)

    @torch.no_grad()
    def clip(self, parameters: Parameters) -> Clipped:
        """Add the gradients' norm to the history and clip them to `threshold()`, in place."""
        found = gradients(parameters)
        norm, finite = _global_norm(found, self.norm_type, self.nonfinite)
        self._append(torch.where(finite, norm, math.nan))
        return _clipped(found, norm, self.threshold(), finite, self.norm_type, self.nonfinite)

    def _append(self, norm: Tensor) -> None:
        if self._norms.device != norm.device:
            self._norms = self._norms.to(norm.device)
        if self.window is None and self._steps == len(self._norms):
            self._norms = torch.cat([self._norms, torch.full_like(self._norms, math.nan)])
        self._norms[self._steps % len(self._norms)] = norm
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        return {"norms": self.history.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, keeping only the latest `window` norms of a longer history."""
        norms = state["norms"].to(torch.float64)
        if self.window is not None:
            norms = norms[-self.window :]
        size = self.window or max(256, len(norms))
        self._norms = torch.full((size,), math.nan, dtype=torch.float64, device=norms.device)
        self._norms[: len(norms)] = norms
        self._steps = len(norms)


class ZClip:
    """Clip the global norm when it is more than z deviations above a running mean.

    With running mean m and deviation s, a norm n whose score (n - m) / s is above `z` is clipped to
    m + z^2 s / score: the higher the score, the closer to m. The running mean and variance then
    take in n, or its limit if it was a spike; max_norm doesn't affect them. After identical norms
    the deviation is 0, so every larger norm is clipped to the mean.

    z: the score above which a norm is a spike.
    alpha: the weight of the old mean and variance in the new ones.
    warmup: the number of norms to collect before any spike is clipped.
    max_norm: an additional limit that always applies, even during warm-up; infinity for none.
    nonfinite: as in `clip_by_global_norm`. A norm that is not finite, or that "zero" cleaned, does
    not enter the mean or the variance.
    Source: Kumar, Owen, Roy Chowdhury and Güra, arXiv:2504.02507; eps is from the authors' code.
    """

    def __init__(
        self,
        z: float = 2.5,
        alpha: float = 0.97,
        *,
        warmup: int = 25,
        max_norm: float = math.inf,
        eps: float = 1e-6,
        nonfinite: str = "raise",
    ) -> None:
        self.z = float(checks.positive("z", z))
        self.alpha = float(checks.fraction("alpha", alpha))
        self.warmup = checks.positive_int("warmup", warmup)
        self.max_norm = limit_above_zero("max_norm", max_norm)
        self.eps = float(checks.non_negative("eps", eps))
        self.nonfinite = policy(nonfinite)
        # [count of norms, mean, variance] in one tensor: nothing is read back from a GPU.
        self._state = torch.zeros(3, dtype=torch.float64)

    @property
    def mean(self) -> Tensor:
        """[] float64: the running mean of the norms; during warm-up, the mean so far."""
        return self._state[1]

    @property
    def variance(self) -> Tensor:
        """[] float64: the running variance; during warm-up, the variance so far."""
        return self._state[2]

    @torch.no_grad()
    def clip(self, parameters: Parameters) -> Clipped:
        """Clip the gradients, in place, and update the mean and variance with their norm."""
        found = gradients(parameters)
        norm, finite = _global_norm(found, 2.0, self.nonfinite)
        self._state = self._state.to(norm.device)
        limit = self._limit(norm)
        self._follow(torch.minimum(norm, limit), finite)
        limit = limit.clamp(max=self.max_norm)
        return _clipped(found, norm, limit, finite, 2.0, self.nonfinite)

    def _limit(self, norm: Tensor) -> Tensor:
        """[]: the limit of a spike, or infinity if the norm is not a spike."""
        count, mean, variance = self._state.unbind()
        deviation = variance.sqrt()
        score = (norm - mean) / (deviation + self.eps)
        spike = (count >= self.warmup) & (score > self.z)
        return torch.where(spike, mean + self.z**2 * deviation / score, math.inf)

    def _follow(self, norm: Tensor, finite: Tensor) -> None:
        count, mean, variance = self._state.unbind()
        # During warm-up: mean and variance of all norms so far (Welford's update). Then: running.
        weight = torch.where(count < self.warmup, 1 / (count + 1), 1 - self.alpha)
        new_mean = mean + weight * (norm - mean)
        spread = torch.where(
            count < self.warmup, (norm - mean) * (norm - new_mean), (norm - new_mean) ** 2
        )
        new_variance = variance + weight * (spread - variance)
        new = torch.stack([count + 1, new_mean, new_variance])
        self._state = torch.where(finite, new, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the count, mean and variance."""
        return {"state": self._state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._state = state["state"].to(torch.float64)


def _global_norm(found: Gradients, order: float, nonfinite: str) -> tuple[Tensor, Tensor]:
    norms, finite = measured(found, order, nonfinite, None)
    return combined(norms, order), finite


def _clipped(
    found: Gradients, norm: Tensor, limit: Tensor, finite: Tensor, order: float, nonfinite: str
) -> Clipped:
    factor = coefficients_for(norm, limit, finite, nonfinite)
    scale(found, factor, None)
    clear_where_skipped(found, finite, nonfinite)
    return Clipped(
        norms=norm.reshape(1),
        coefficients=factor.reshape(1),
        finite=finite,
        names=("all",),
        sizes=(1,),
        norm_type=order,
    )
