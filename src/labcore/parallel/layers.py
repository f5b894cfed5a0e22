"""Linear layers split across ranks, and the norm between them.

Column-parallel Y = X W^T + b: rank r holds some output features, W [out / N, in], and computes
those columns of Y. No collective follows, unless all of Y is needed; then it's an all-gather.
Row-parallel: rank r holds some input features, W [out, in / N], and computes a summand of Y. An
all-reduce follows, and the bias is added once, after it. (Columns and rows are those of W^T, as in
the papers; torch stores W.) A column layer followed by a row layer needs only one collective.

Letters: N ranks, r this rank, B rows, T tokens, C hidden_size.
Sources: Shoeybi et al., 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et al., 2022,
arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.models.llama import RMSNorm
from labcore.parallel.regions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    part,
    rank_and_size,
    reduce_from_ranks,
    scatter_sequence,
    scatter_to_ranks,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceParallelNorm",
]


def check_kind(name: str, module: object, kind: type[nn.Module]) -> None:
    """Raise TypeError unless the module is of the class that can be divided."""
    if not isinstance(module, kind):
        raise TypeError(
            f"{name} must be of class {kind.__name__}, got {type(module).__name__}; divide the "
            "model before replacing its layers"
        )


def own_copy(whole: Tensor, mine: tuple[slice, ...] = ()) -> nn.Parameter:
    """Copy this rank's part, so that the whole tensor's memory can be freed."""
    copy = whole.detach()[mine].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=whole.requires_grad)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose out_features are split across ranks.

    x [..., in_features], the same on every rank, becomes [..., out_features / N]; with
    gather_output, [..., out_features] on every rank.
    sequence_parallel: x is [B, T / N, in_features], this rank's tokens, and is gathered first.
    input_is_copied: the caller has already passed x through `copy_to_ranks` (or `gather_sequence`),
    once for several layers that read it; by default this layer does so.
    group: None is the default process group. Every rank draws the whole weights as `nn.Linear` does
    and keeps its part, so with the same seed on all ranks the layer equals the one-process layer.
    Raises ValueError for out_features that N doesn't divide.
    """

    cuts: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        input_is_copied: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.input_is_copied = input_is_copied
        part("out_features", out_features, group)  # raises before the whole layer is drawn
        self._take(nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype))

    @classmethod
    def of(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None, **options: Any) -> Self:
        """Return this rank's part of a whole layer, copied; options: those of the class.

        Raises TypeError unless linear is an `nn.Linear`, and ValueError as the class does.
        """
        return _part_of(linear, cls, group, options)

    def _take(self, whole: nn.Linear) -> None:
        self.in_features, self.out_features = whole.in_features, whole.out_features
        mine = part("out_features", whole.out_features, self.group)
        self.weight = own_copy(whole.weight, (mine,))
        self.bias = None if whole.bias is None else own_copy(whole.bias, (mine,))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features / N], or to all of them if gathered."""
        if not self.input_is_copied:
            enter = gather_sequence if self.sequence_parallel else copy_to_ranks
            x = enter(x, self.group)
        y = F.linear(x, self.weight, self.bias)
        return gather_from_ranks(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        """Show the whole layer's sizes and the number of ranks."""
        return _told(self)


class RowParallelLinear(nn.Module):
    """A linear layer whose in_features are split across ranks; the ranks' products are summed.

    x [..., in_features / N], the output of a column layer, becomes [..., out_features] on every
    rank. input_is_parallel=False: x is [..., in_features] on every rank, which takes its part.
    Every rank holds the whole bias, which is added once, after the sum.
    sequence_parallel: the output is [B, T / N, out_features], this rank's tokens of the sum.
    group, weights: as for ColumnParallelLinear.
    Raises ValueError if N doesn't divide in_features or, with sequence_parallel, T.
    """

    cuts: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        part("in_features", in_features, group)  # raises before the whole layer is drawn
        self._take(nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype))

    @classmethod
    def of(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None, **options: Any) -> Self:
        """Return this rank's part of a whole layer, copied; options: those of the class.

        Raises TypeError unless linear is an `nn.Linear`, and ValueError as the class does.
        """
        return _part_of(linear, cls, group, options)

    def _take(self, whole: nn.Linear) -> None:
        self.in_features, self.out_features = whole.in_features, whole.out_features
        mine = part("in_features", whole.in_features, self.group)
        self.weight = own_copy(whole.weight, (slice(None), mine))
        self.bias = None if whole.bias is None else own_copy(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features / N] to [..., out_features], T / N tokens of it if divided."""
        if not self.input_is_parallel:
            x = scatter_to_ranks(x, self.group)
        leave = scatter_sequence if self.sequence_parallel else reduce_from_ranks
        y = leave(F.linear(x, self.weight), self.group)
        if self.bias is None:
            return y
        # With divided tokens, each rank's bias gradient is only a summand.
        bias = copy_to_ranks(self.bias, self.group) if self.sequence_parallel else self.bias
        return y + bias

    def extra_repr(self) -> str:
        """Show the whole layer's sizes and the number of ranks."""
        return _told(self)


_Divided = TypeVar("_Divided", bound="ColumnParallelLinear | RowParallelLinear")


def _part_of(
    linear: nn.Linear,
    kind: type[_Divided],
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> _Divided:
    check_kind("linear", linear, nn.Linear)
    made = kind(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        group=group,
        device="meta",
        **options,
    )
    made._take(linear)
    made.train(linear.training)
    return made


def _told(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, ranks={rank_and_size(layer.group)[1]}"
    )


class SequenceParallelNorm(RMSNorm):
    """RMSNorm over this rank's tokens; every rank holds the whole weight and gradients are summed.

    x [B, T / N, C] becomes [B, T / N, C]. Each rank sees the gradients of its own tokens only.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, norm: RMSNorm, group: dist.ProcessGroup | None = None) -> Self:
        """Copy another norm's weight. Raises TypeError unless norm is an RMSNorm."""
        check_kind("norm", norm, RMSNorm)
        made = cls(norm.weight.numel(), norm.eps, device="meta")
        made.weight, made.group = own_copy(norm.weight), group
        return made.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., C], any floating dtype; returns the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = F.rms_norm(wide, wide.shape[-1:], eps=self.eps).to(x.dtype)
        return copy_to_ranks(self.weight, self.group) * normal
