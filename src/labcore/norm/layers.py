"""Ghost batch normalization layers: torch's BatchNorm over parts of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labcore.checks import floating, one_of, positive_int
from labcore.norm.compiled import Averages
from labcore.norm.ghosts import POLICIES, Running, blend, running_step, split
from labcore.norm.normalize import Moments, normalize

__all__ = ["GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d"]


class _GhostBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Base class of the three layers; see GhostBatchNorm1d."""

    fused = False  # for layers that an earlier version pickled

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ghost_size: int,
        running: Running = "sequential",
        bias: bool = True,
        fused: bool = False,
    ) -> None:
        self.ghost_size = positive_int(
            "ghost_size", ghost_size, "pass the number of rows per ghost"
        )
        self.running = one_of("running", running, POLICIES)
        self.fused = fused
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`. The output has its shape, dtype and (if dense) memory format."""
        self._check_input_dim(input)
        floating("input", input)
        batch, channels = input.shape[:2]
        if channels != self.num_features:
            raise RuntimeError(
                f"input must have num_features={self.num_features} channels in dimension 1, "
                f"got {channels}; pass [batch, {self.num_features}, ...]"
            )
        by_batch = self.training or self.running_mean is None
        if not by_batch or batch <= self.ghost_size or input.numel() == 0:
            return super().forward(input)
        ghosts, larger = split(batch, self.ghost_size)
        if ghosts == 1:
            return super().forward(input)
        if (batch // ghosts) * input.numel() == batch * channels:
            raise ValueError(
                "a ghost must hold more than one value per channel, got ghosts of one row without "
                "spatial extent; pass ghost_size=2 or more"
            )
        x = input
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        dtype = torch.promote_types(input.dtype, torch.float32)
        if not all(t is None or t.dtype == dtype for t in (x, weight, bias)):
            x = x.to(dtype)
            weight = None if weight is None else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        tracks = self.training and self.track_running_stats
        # A compiler would take the number of ghosts for a constant.
        fused = self.fused and not torch.compiler.is_compiling()
        averages = self._averages(ghosts, dtype) if fused and tracks else None
        out, moments = normalize(
            x, ghosts, larger, weight, bias, self.eps, fused=fused, averages=averages
        )
        if moments is None:
            self._count(ghosts)
        elif tracks:
            self._track(moments)
        return out.to(input.dtype)

    def _averages(self, ghosts: int, dtype: torch.dtype) -> Averages | None:
        """Return the averages that the compiled pass updates; None leaves them to `_track`."""
        mean, var, factor = self.running_mean, self.running_var, self.momentum
        if mean is None or var is None or factor is None or self.running == "pooled":
            return None
        if mean.dtype != dtype or var.dtype != dtype:
            return None
        if self.running == "mean":
            return Averages(mean, var, 1 - factor, (factor / ghosts,) * ghosts)
        factor = factor / ghosts if self.running == "divided" else factor
        weights = tuple(factor * (1 - factor) ** left for left in range(ghosts - 1, -1, -1))
        return Averages(mean, var, (1 - factor) ** ghosts, weights)

    def _count(self, ghosts: int) -> int:
        """Count the updates of a batch, and return their number."""
        updates = ghosts if self.running in ("sequential", "divided") else 1
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(updates)
        return updates

    def _track(self, moments: Moments) -> None:
        mean, var, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or tracked is None:
            return
        rows = running_step(self.running, *moments)
        updates = self._count(moments.mean.shape[0])
        factor = self.momentum
        if factor is not None and self.running == "divided":
            factor = factor / updates
        blend((mean, var), rows, factor, tracked)

    def extra_repr(self) -> str:
        """Return torch's settings, followed by the ghost settings."""
        fused = ", fused=True" if self.fused else ""
        ghosts = f"ghost_size={self.ghost_size}, running={self.running!r}{fused}"
        return f"{super().extra_repr()}, {ghosts}"


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with statistics over ghosts, parts of the batch (arXiv 1705.08741).

    In training, every ghost of `ghost_size` rows is normalized by its own mean and variance, as if
    it were the batch. A large batch then computes what gradient accumulation over its ghosts would.
    In evaluation, and for a batch no larger than one ghost, the layer is torch's. It is an instance
    of torch's layer, with the same parameters, buffers and state dict.

    If ghost_size does not divide the batch, the ghosts are nearly even, and none has a single row;
    see `ghost_sizes`. A training batch with a single value per channel raises an error, as in
    torch. So do ghosts of one row (ghost_size=1) if a row has no spatial extent.

    The running averages r take in the ghosts' means and unbiased variances s₁ … s_k, with m =
    momentum:

        "sequential"  r ← (1 − m) r + m s_i for i = 1 … k in turn, as in the paper and in a loop of
                      BatchNorm: r ← (1 − m)ᵏ r + m Σ (1 − m)ᵏ⁻ⁱ s_i. The average forgets k times
                      faster, and the last ghosts weigh most: on sorted data they dominate.
        "divided"     The same with m / k for m: about one update of m per batch, with nearly even
                      weights.
        "mean"        r ← (1 − m) r + m (s₁ + … + s_k) / k: even weights, whatever the sizes.
        "pooled"      r ← (1 − m) r + m s, with s of the whole batch: BatchNorm's own averages. Only
                      this variance includes the variance between the ghosts' means, which is most
                      of it on sorted data.

    num_batches_tracked counts updates: k per batch for "sequential" and "divided", otherwise one.
    With momentum=None, all updates so far weigh the same ("sequential" and "divided" then agree).
    Without running statistics, evaluation normalizes by ghosts as training does.

    float16 and bfloat16 inputs are computed in float32 and returned in their own dtype. On a CPU,
    the layer uses a fast implementation; under `torch.compile`, torch.func and on other devices it
    uses plain operations. Both can be differentiated twice. Under DistributedDataParallel, every
    process splits its own part of the batch. Code that recognizes torch's BatchNorm by its class,
    such as `convert_sync_batchnorm`, treats this layer the same way. In training, torch.jit.trace,
    torch.fx.symbolic_trace and forward-mode differentiation fail; torch.export works.

    Shapes: input and output [batch, num_features] or [batch, num_features, length]. The output has
    the input's dtype, and its memory format if that is dense.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in torch.
        ghost_size: rows per ghost, at least 1.
        running: "sequential", "pooled", "mean" or "divided".
        fused: on a CPU, run each pass as one compiled function, where the ghosts have one size. The
            first call takes several seconds longer, or less if inductor finds the code in its cache
            on disk. Sums are added in another order, so results differ by rounding. Without a C++
            compiler, the layer warns and runs as with fused=False. On other devices it runs as with
            fused=False, without a warning.

    Errors: ValueError and TypeError for bad settings, a wrong number of dimensions or a wrong
    dtype; RuntimeError for a wrong number of channels.
    """


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over ghosts of the batch; see GhostBatchNorm1d.

    Shapes: input and output [batch, num_features, height, width].
    """


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over ghosts of the batch; see GhostBatchNorm1d.

    Shapes: input and output [batch, num_features, depth, height, width].
    """
