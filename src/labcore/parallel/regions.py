"""Differentiable collectives: what a tensor does between ranks, and its gradient on the way back.

The six functions form three pairs. In each pair, one function is the gradient of the other.

| function | forward | backward | is the gradient of |
|---|---|---|---|
| `copy_to_ranks` | identity | all-reduce | `reduce_from_ranks` |
| `reduce_from_ranks` | all-reduce | identity | `copy_to_ranks` |
| `gather_from_ranks` | all-gather | own slice | `scatter_to_ranks` |
| `scatter_to_ranks` | own slice | all-gather | `gather_from_ranks` |
| `gather_sequence` | all-gather | reduce-scatter | `scatter_sequence` |
| `scatter_sequence` | reduce-scatter | all-gather | `gather_sequence` |

The gradients are right if every rank computes the same loss from whole tensors: each rank then has
the gradient of that one loss, not of N copies of it. Every rank of the group must call the
functions, forward and backward, in the same order. Without a process group, or with one rank, all
of them are identities. Letters: N ranks, r this rank, B rows, T tokens, C width.

Sources: Shoeybi et al., 2019, arXiv 1909.08053; for the last pair, Korthikanti et al., 2022,
arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labcore.checks import positive_int

__all__ = [
    "copy_to_ranks",
    "divisors",
    "gather_from_ranks",
    "gather_sequence",
    "part",
    "rank_and_size",
    "reduce_from_ranks",
    "scatter_sequence",
    "scatter_to_ranks",
]

SHOWN_DIVISORS = 12


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return (r, N), this process's rank in the group and the group's size; (0, 1) without a group.

    group: None is the default group, if it exists.
    Raises ValueError for a group that doesn't contain this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"group must contain this process, got one without rank {dist.get_rank()}; call this "
            "only in the processes of the group"
        )
    return rank, dist.get_world_size(group)


def divisors(size: int) -> list[int]:
    """Return the divisors of `size` in ascending order: the numbers of ranks that can share it."""
    low = [n for n in range(1, int(size**0.5) + 1) if size % n == 0]
    return sorted({*low, *(size // n for n in low)})


def part(name: str, size: int, group: dist.ProcessGroup | None = None) -> slice:
    """Return this rank's slice of `size` items: [r size / N, (r + 1) size / N).

    name: the dimension's name, for the error message.
    Raises ValueError if N doesn't divide the dimension; the message lists the N that do.
    """
    rank, ranks = rank_and_size(group)
    if positive_int(name, size) % ranks:
        choice = divisors(size)
        listed = ", ".join(map(str, choice[:SHOWN_DIVISORS]))
        listed += ", …" if len(choice) > SHOWN_DIVISORS else ""
        raise ValueError(
            f"{name} must be a multiple of the {ranks} ranks, got {size}; choose a number of "
            f"ranks among {listed}, or another {name}"
        )
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return x unchanged; its gradient is the sum of all ranks' gradients.

    Use it where every rank holds the same x but only part of the weights, before a column-parallel
    layer. x: [...], any floating dtype; returns the same shape.
    """
    return _between(x, group, _same, partial(reduce_from_ranks, group=group))


def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' x; its gradient goes to each rank unchanged.

    Use it where every rank holds one summand, after a row-parallel layer. x: [...], the same shape
    on all ranks; returns a new tensor of that shape. The sum is computed in x's dtype.
    """
    return _between(
        x, group, partial(_all_reduce, group=group), partial(copy_to_ranks, group=group)
    )


def gather_from_ranks(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = -1) -> Tensor:
    """Concatenate all ranks' x along `dim`, in rank order; the gradient is this rank's slice.

    Use it where every rank does the same work on the whole tensor afterwards. x: [..., n, ...];
    returns [..., N n, ...].
    """
    return _between(
        x,
        group,
        partial(_all_gather, group=group, dim=dim),
        partial(scatter_to_ranks, group=group, dim=dim),
    )


def scatter_to_ranks(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = -1) -> Tensor:
    """Return this rank's slice of x along `dim`; the gradients of all slices are gathered.

    Use it where every rank holds the same x. x: [..., N n, ...]; returns [..., n, ...], a copy.
    Raises ValueError for a dimension that N doesn't divide.
    """
    return _between(
        x,
        group,
        partial(_own_slice, group=group, dim=dim),
        partial(gather_from_ranks, group=group, dim=dim),
    )


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """Gather all ranks' tokens along `dim`; a token's gradient is the sum of all ranks' gradients.

    This combines `gather_from_ranks` and `copy_to_ranks`. Use it before a column-parallel layer
    when each rank holds some of the tokens. x: [B, T / N, ...]; returns [B, T, ...].
    """
    return _between(
        x,
        group,
        partial(_all_gather, group=group, dim=dim),
        partial(scatter_sequence, group=group, dim=dim),
    )


def scatter_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """Sum all ranks' x and return this rank's tokens of the sum along `dim`.

    This combines `reduce_from_ranks` and `scatter_to_ranks`. Use it after a row-parallel layer.
    x: [B, T, ...]; returns [B, T / N, ...]. The gradient is all-gathered.
    Raises ValueError for a dimension that N doesn't divide.
    """
    return _between(
        x,
        group,
        partial(_reduce_scatter, group=group, dim=dim),
        partial(gather_sequence, group=group, dim=dim),
    )


Way = Callable[[Tensor], Tensor]


class _Between(torch.autograd.Function):
    """Compute there(x), with gradient back(gradient); `back` is differentiable too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _between(x: Tensor, group: dist.ProcessGroup | None, there: Way, back: Way) -> Tensor:
    return x if rank_and_size(group)[1] == 1 else _Between.apply(x, there, back)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # The collective works in place; clone to keep the caller's tensor unchanged.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(rank_and_size(group)[1])]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim)


def _own_slice(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    mine = part(f"dimension {dim} of a tensor of shape {tuple(x.shape)}", x.shape[dim], group)
    return _cut(x, dim, mine)


def _cut(x: Tensor, dim: int, mine: slice) -> Tensor:
    # Clone, because a view would keep all of x in memory.
    return x.narrow(dim, mine.start, mine.stop - mine.start).clone(
        memory_format=torch.contiguous_format
    )


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    mine = part(f"dimension {dim} of a tensor of shape {tuple(x.shape)}", x.shape[dim], group)
    if not (x.is_cuda and "nccl" in dist.get_backend_config(group)):
        # Not every version of gloo has reduce-scatter; an all-reduce gives the same values for
        # twice the bytes.
        return _cut(_all_reduce(x, group), dim, mine)
    pieces = [piece.contiguous() for piece in x.chunk(rank_and_size(group)[1], dim)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=group)
    return total
