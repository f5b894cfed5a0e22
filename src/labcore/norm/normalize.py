"""Normalize each ghost by its mean and variance: in plain operations, or faster on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labcore.norm import compiled

__all__ = ["Moments", "normalize", "plain"]

# Elements that go through all operations together: 1 MB in float32 fits a CPU's cache.
PIECE = 1 << 18


class Moments(NamedTuple):
    """The ghosts' statistics, without gradient: [ghosts, channels] each; the variance is biased."""

    mean: Tensor
    var: Tensor
    values: Tensor | float  # number per channel: [ghosts, 1], or one number for all ghosts


def normalize(
    x: Tensor,
    ghosts: int,
    larger: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    fused: bool = False,
    averages: compiled.Averages | None = None,
) -> tuple[Tensor, Moments | None]:
    """Compute what `plain` does, but on a CPU with fewer passes over memory.

    fused: compile both passes there, where the ghosts have one size. averages: what the compiled
    pass is to update; if it does, the returned moments are None.
    """
    # A compiler fuses `plain`, and torch.func cannot look into the fast implementation.
    if (
        x.device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return plain(x, ghosts, larger, weight, bias, eps)
    if not (x.is_contiguous() or x.movedim(1, -1).is_contiguous()):
        x = x.contiguous()
    moments: list[Tensor] = []
    if fused and not larger:
        cut = _Cut.whole(x, ghosts)
        (part,) = cut.of_batch(x)
        if found := compiled.passes(part, weight, bias, averages):
            out = _Compiled.apply(x, weight, bias, eps, cut, found, averages, moments)
            if averages is not None:
                return out, None
    if not moments:
        out = _Normalize.apply(x, weight, bias, eps, ghosts, larger, moments)
    mean, var = moments
    return out, Moments(mean, var, _count(x, ghosts, larger))


def plain(
    x: Tensor, ghosts: int, larger: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Moments]:
    """Compute (x − mean) / √(var + eps) · weight + bias with the mean and variance of x's ghost.

    x: [batch, channels, ...]; the first `larger` of the ghosts have one more row than the others.
    weight, bias: [channels] or None, in x's dtype.
    """
    rows = x.shape[0] // ghosts
    cut = larger * (rows + 1)
    blocks = [(x[:cut], larger), (x[cut:], ghosts - larger)] if larger else [(x, ghosts)]
    outs, means, variances = [], [], []
    for block, number in blocks:
        block = block.unflatten(0, (number, -1))
        dims = [1, *range(3, block.dim())]
        mean = block.mean(dims, keepdim=True)
        centered = block - mean
        var = centered.square().mean(dims, keepdim=True)
        out = centered * torch.rsqrt(var + eps)
        channels = [-1] + [1] * (block.dim() - 3)
        out = out if weight is None else out * weight.view(channels)
        out = out if bias is None else out + bias.view(channels)
        outs.append(out.flatten(0, 1))
        means.append(mean.detach().view(number, -1))
        variances.append(var.detach().view(number, -1))
    found = Moments(_join(means), _join(variances), _count(x, ghosts, larger))
    return _join(outs), found


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _count(x: Tensor, ghosts: int, larger: int) -> Tensor | float:
    """Return the number of values per channel of each ghost."""
    batch, channels = x.shape[:2]
    rows, area = batch // ghosts, x.numel() // (batch * channels)
    if not larger:
        return float(rows * area)
    more = x.new_full((larger, 1), (rows + 1) * area)
    return torch.cat([more, x.new_full((ghosts - larger, 1), rows * area)])


class _Cut(NamedTuple):
    """How the fast implementation views tensors like x: pieces of a few ghosts of equal size.

    A piece is [ghosts, values, channels] if channels are innermost (two dimensions, or
    channels_last), and [ghosts, rows, channels, area] otherwise.
    """

    rows: list[int]
    ghosts: list[int]
    channels: int
    area: int  # 1 if channels are innermost

    @classmethod
    def of(cls, x: Tensor, ghosts: int, larger: int) -> _Cut:
        batch, channels = x.shape[:2]
        together = max(1, PIECE * ghosts // x.numel())
        if together >= ghosts and not larger:
            return cls.whole(x, ghosts)
        area = x.numel() // (batch * channels) if x.is_contiguous() else 1
        sizes, numbers = [], []
        for number, size in ((larger, batch // ghosts + 1), (ghosts - larger, batch // ghosts)):
            for start in range(0, number, together):
                numbers.append(min(together, number - start))
                sizes.append(numbers[-1] * size)
        return cls(sizes, numbers, channels, area)

    @classmethod
    def whole(cls, x: Tensor, ghosts: int) -> _Cut:
        """Return the cut of x into one piece of all ghosts, which have the same size."""
        batch, channels = x.shape[:2]
        area = x.numel() // (batch * channels) if x.is_contiguous() else 1
        return cls([batch], [ghosts], channels, area)

    def of_batch(self, x: Tensor) -> list[Tensor]:
        """Return the pieces of a tensor with x's shape and strides."""
        shape = (self.channels,) if self.area == 1 else (self.channels, self.area)
        if self.area == 1 and x.dim() > 2:
            x = x.movedim(1, -1)
        if len(self.rows) == 1:
            return [x.view(self.ghosts[0], -1, *shape)]
        parts = zip(x.split(self.rows), self.ghosts, strict=True)
        return [part.view(number, -1, *shape) for part, number in parts]

    def of_ghosts(self, moment: Tensor) -> Sequence[Tensor]:
        """Return the pieces of a tensor [ghosts, 1, channels] or [ghosts, 1, channels, 1]."""
        return moment.split(self.ghosts) if len(self.ghosts) > 1 else [moment]

    def to_broadcast(self, parameter: Tensor | None) -> Tensor | None:
        """Shape a tensor [channels] to broadcast against a piece."""
        return parameter if parameter is None or self.area == 1 else parameter[:, None]

    def dims(self) -> int | tuple[int, int]:
        """Return the dimensions of a piece that a ghost's statistics sum over."""
        return 1 if self.area == 1 else (1, 3)


class _Normalize(torch.autograd.Function):
    """`plain`, piece by piece, without a temporary of x's size.

    The statistics are returned in the list `moments`, because autograd's handling of more outputs
    would cost time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        ghosts: int,
        larger: int,
        moments: list[Tensor],
    ) -> Tensor:
        cut = _Cut.of(x, ghosts, larger)
        dims = cut.dims()
        factor, offset = cut.to_broadcast(weight), cut.to_broadcast(bias)
        out = torch.empty_like(x)
        means, variances, inverses, scales = [], [], [], []
        for part, to in zip(cut.of_batch(x), cut.of_batch(out), strict=True):
            mean = part.sum(dims, keepdim=True)
            share = mean.numel() / part.numel()  # torch's mean divides, which is slower
            mean.mul_(share)
            squares = torch.ops.aten.mse_loss.out(part, mean, 0, out=to)  # (part − mean)², at once
            var = squares.sum(dims, keepdim=True).mul_(share)
            inverse = (var + eps).rsqrt_()
            scale = inverse if factor is None else inverse * factor
            if offset is None:
                shift = (mean * scale).neg_()
            else:
                shift = torch.addcmul(offset, mean, scale, value=-1)
            if cut.area == 1:
                torch.addcmul(shift, part, scale, out=to)
            else:  # addcmul is slow with two operands that are constant over the innermost axis.
                torch.mul(part, scale, out=to).add_(shift)
            means.append(mean)
            variances.append(var)
            inverses.append(inverse)
            scales.append(scale)
        mean = _join(means)
        moments += [mean.view(ghosts, -1), _join(variances).view(ghosts, -1)]
        ctx.save_for_backward(x, weight, mean, _join(inverses), _join(scales))
        ctx.cut, ctx.eps, ctx.ghosts, ctx.larger = cut, eps, ghosts, larger
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: mean and inverse depend on x.
            return _differentiable(ctx, x, weight, grad)
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        cut: _Cut = ctx.cut
        dims = cut.dims()
        to = torch.empty_like(x)
        totals, dots = [], []
        batch = zip(*map(cut.of_batch, (x, grad, to)), strict=True)
        ghost = zip(*map(cut.of_ghosts, (mean, inverse, scale)), strict=True)
        for (part, above, into), (center, inv, slope) in zip(batch, ghost, strict=True):
            total = above.sum(dims, keepdim=True)
            if cut.area == 1:  # Σ above · (part − center), with one pass less
                dot = torch.mul(part, above, out=into).sum(1, keepdim=True)
                dot.addcmul_(center, total, value=-1).mul_(inv)
            else:
                dot = torch.sub(part, center, out=into).mul_(above).sum(dims, keepdim=True)
                dot.mul_(inv)
            totals.append(total)
            dots.append(dot)
            # slope · (above − mean(above) − normalized · mean(above · normalized)), in powers of x.
            share = total.numel() / part.numel()
            bend = (dot * inv).mul_(slope)
            shift = (bend * center).addcmul_(slope, total, value=-1).mul_(share)
            if cut.area == 1:
                torch.addcmul(shift, above, slope, out=into)
                into.addcmul_(part, bend, value=-share)
            else:
                torch.mul(above, slope, out=into).addcmul_(part, bend, value=-share).add_(shift)
        return (
            to,
            _join(dots).view(ctx.ghosts, -1).sum(0) if ctx.needs_input_grad[1] else None,
            _join(totals).view(ctx.ghosts, -1).sum(0) if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


class _Compiled(torch.autograd.Function):
    """`_Normalize` for ghosts of one size, by the compiled passes on the whole batch at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        cut: _Cut,
        passes: compiled.Passes,
        averages: compiled.Averages | None,
        moments: list[Tensor],
    ) -> Tensor:
        ctx.eps, ctx.ghosts, ctx.larger = eps, cut.ghosts[0], 0
        ctx.cut, ctx.passes = cut, passes
        out = torch.empty_like(x)  # not a view, which could not be changed in place
        (part,), (to,) = cut.of_batch(x), cut.of_batch(out)
        values = x.numel() // (ctx.ghosts * cut.channels)
        keep = 0.0 if averages is None else averages.keep
        ctx.numbers = compiled.constants(eps, 1 / values, values / (values - 1), keep)
        kept: tuple[Tensor, ...] = ()
        if averages is not None:
            kept = averages.mean, averages.var, compiled.constants(*averages.weights)
        factor, offset = cut.to_broadcast(weight), cut.to_broadcast(bias)
        mean, var, inverse = passes.forward(part, to, factor, offset, ctx.numbers, kept)
        moments += [mean.view(ctx.ghosts, -1), var.view(ctx.ghosts, -1)]
        ctx.save_for_backward(x, weight, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: mean and inverse depend on x.
            return _differentiable(ctx, x, weight, grad)
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        into = torch.empty_like(x)
        (part,), (above,), (to,) = map(ctx.cut.of_batch, (x, grad, into))
        factor = ctx.cut.to_broadcast(weight)
        dot, total = ctx.passes.backward(part, above, to, factor, mean, inverse, ctx.numbers)
        return (
            into,
            dot.flatten() if ctx.needs_input_grad[1] else None,
            total.flatten() if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _differentiable(ctx: Any, x: Tensor, weight: Tensor | None, grad: Tensor) -> tuple[Any, ...]:
    """Compute the backward pass in a form that can be differentiated again."""
    bias = x.new_zeros(x.shape[1], requires_grad=True)  # Its value affects no gradient.
    out, _ = plain(x, ctx.ghosts, ctx.larger, weight, bias, ctx.eps)
    asked = {
        i: t for i, t in enumerate((x, weight, bias)) if t is not None and ctx.needs_input_grad[i]
    }
    found = torch.autograd.grad(out, list(asked.values()), grad, create_graph=True)
    grads = dict(zip(asked, found, strict=True))
    return tuple(grads.get(i) for i in range(len(ctx.needs_input_grad)))
