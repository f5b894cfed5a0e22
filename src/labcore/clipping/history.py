"""Limits that follow the norms seen so far: AutoClip's percentile, ZClip's z-score."""

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
    """Clip the global norm to a percentile of all norms so far, this step's included.

    percentile: 0 to 100, interpolated linearly between norms; at 100 nothing is clipped.
    window: how many of the latest norms count; None for all.
    norm_type, nonfinite: as in `clip_by_global_norm`. A norm that is not finite, or was cleaned by
    "zero", does not enter the history.
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
            raise ValueError(f"percentile must be at most 100, got {percentile}; pass 10 for 10 %")
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
        """[n] float64: the norms that count, oldest first; NaN stands for a step left out."""
        if self.window is not None and self._steps > self.window:
            return self._norms.roll(-(self._steps % self.window))
        return self._norms[: self._steps]

    def threshold(self) -> Tensor:
        """[] float64: the limit that the history gives; infinite without any norm."""
        if self._steps == 0:
            return self._norms.new_full((), math.inf)
        seen = self._norms[: min(self._steps, len(self._norms))]
        limit = torch.nanquantile(seen, self.percentile / 100)
        return torch.where(torch.isnan(limit), math.inf, limit)

    @torch.no_grad()
    def clip(self, parameters: Parameters) -> Clipped:
        """Take the gradients' norm into the history and clip them to `threshold()`, in place."""
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
        """The history."""
        return {"norms": self.history.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; of a longer history the latest `window` norms are kept."""
        norms = state["norms"].to(torch.float64)
        if self.window is not None:
            norms = norms[-self.window :]
        size = self.window or max(256, len(norms))
        self._norms = torch.full((size,), math.nan, dtype=torch.float64, device=norms.device)
        self._norms[: len(norms)] = norms
        self._steps = len(norms)


class ZClip:
    """Clip the global norm where it stands out from a running mean by more than z deviations.

    With running mean m and deviation s, a norm n whose score (n - m) / s is above `z` is clipped to
    m + z^2 s / score: the further out, the closer to m. The means take n, or its limit where it was
    a spike; max_norm has no part in them. After norms that are all alike the deviation is 0, and
    every larger norm is clipped to the mean.

    z: score above which a norm is a spike. alpha: share of the old mean and variance in the new.
    warmup: how many norms are collected, unclipped, before there is a mean.
    max_norm: a limit at all times besides, during warm-up too; infinity for none.
    nonfinite: as in `clip_by_global_norm`. A norm that is not finite, or was cleaned by "zero",
    enters no mean.
    Source: Kumar, Owen, Roy Chowdhury and Güra, arXiv:2504.02507; eps is that of the authors' code.
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
        """[] float64: the running mean of the norms; in warm-up the mean so far."""
        return self._state[1]

    @property
    def variance(self) -> Tensor:
        """[] float64: the running variance; in warm-up the variance so far."""
        return self._state[2]

    @torch.no_grad()
    def clip(self, parameters: Parameters) -> Clipped:
        """Clip the gradients, in place, and take their norm into the mean and variance."""
        found = gradients(parameters)
        norm, finite = _global_norm(found, 2.0, self.nonfinite)
        self._state = self._state.to(norm.device)
        limit = self._limit(norm)
        self._follow(torch.minimum(norm, limit), finite)
        limit = limit.clamp(max=self.max_norm)
        return _clipped(found, norm, limit, finite, 2.0, self.nonfinite)

    def _limit(self, norm: Tensor) -> Tensor:
        """[]: where a spike is cut; infinite for a norm that is none."""
        count, mean, variance = self._state.unbind()
        deviation = variance.sqrt()
        score = (norm - mean) / (deviation + self.eps)
        spike = (count >= self.warmup) & (score > self.z)
        return torch.where(spike, mean + self.z**2 * deviation / score, math.inf)

    def _follow(self, norm: Tensor, finite: Tensor) -> None:
        count, mean, variance = self._state.unbind()
        # Warm-up: mean and variance of all norms so far, by Welford's update; then running ones.
        weight = torch.where(count < self.warmup, 1 / (count + 1), 1 - self.alpha)
        new_mean = mean + weight * (norm - mean)
        spread = torch.where(
            count < self.warmup, (norm - mean) * (norm - new_mean), (norm - new_mean) ** 2
        )
        new_variance = variance + weight * (spread - variance)
        new = torch.stack([count + 1, new_mean, new_variance])
        self._state = torch.where(finite, new, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and variance."""
        return {"state": self._state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
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
