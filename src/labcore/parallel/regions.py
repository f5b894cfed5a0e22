"""What a tensor does between ranks: each way there has a way back for its gradient.

Six functions in three pairs; in each pair one function is the gradient of the other.

| function | forward | backward | is the gradient of |
|---|---|---|---|
| `copy_to_ranks` | identity | all-reduce | `reduce_from_ranks` |
| `reduce_from_ranks` | all-reduce | identity | `copy_to_ranks` |
| `gather_from_ranks` | all-gather | own slice | `scatter_to_ranks` |
| `scatter_to_ranks` | own slice | all-gather | `gather_from_ranks` |
| `gather_sequence` | all-gather | reduce-scatter | `scatter_sequence` |
| `scatter_sequence` | reduce-scatter | all-gather | `gather_sequence` |

They hold for a loss that every rank computes alike from whole tensors: each rank then has the
gradient of that one loss, not of N of them. Every rank of the group must call them, forward and
backward, in the same order. Without a process group, or in one of a single rank, all are
identities. Letters: N ranks, r this rank, B rows, T tokens, C width.

Sources: Shoeybi et al., 2019, arXiv 1909.08053; for the last two Korthikanti et al., 2022,
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
    """(r, N): this process's place in the group and the group's size; (0, 1) without a group.

    group: None is the default group, where one was made.
    Raises ValueError for a group that this process does not belong to.
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
    """The numbers of ranks among which `size` equal things can be divided, in order."""
    low = [n for n in range(1, int(size**0.5) + 1) if size % n == 0]
    return sorted({*low, *(size // n for n in low)})


def part(name: str, size: int, group: dist.ProcessGroup | None = None) -> slice:
    """Which of `size` things are this rank's: [r size / N, (r + 1) size / N).

    name: of the dimension, for the error.
    Raises ValueError that names a dimension that N does not divide, with the N that do.
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
    """x as it is; its gradient is the sum of all ranks' gradients.

    Where every rank holds the same x and goes on with a part of the weights: before a layer that
    is divided by columns. x: [...], any floating dtype; returns the same shape.
    """
    return _between(x, group, _same, partial(reduce_from_ranks, group=group))


def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' x; its gradient goes to each of them as it is.

    Where every rank holds one summand: after a layer that is divided by rows. x: [...], of one
    shape on all ranks; returns the same shape, another tensor. The sum is in x's dtype.
    """
    return _between(
        x, group, partial(_all_reduce, group=group), partial(copy_to_ranks, group=group)
    )


def gather_from_ranks(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = -1) -> Tensor:
    """All ranks' x side by side along `dim`, in the order of ranks; its gradient is the own slice.

    Where every rank goes on alike with the whole. x: [..., n, ...]; returns [..., N n, ...].
    """
    return _between(
        x,
        group,
        partial(_all_gather, group=group, dim=dim),
        partial(scatter_to_ranks, group=group, dim=dim),
    )


def scatter_to_ranks(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = -1) -> Tensor:
    """This rank's slice of x along `dim`; the gradients of all slices are gathered.

    Where every rank holds the same x. x: [..., N n, ...]; returns [..., n, ...], a copy.
    Raises ValueError for a dimension that N does not divide.
    """
    return _between(
        x,
        group,
        partial(_own_slice, group=group, dim=dim),
        partial(gather_from_ranks, group=group, dim=dim),
    )


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """All ranks' tokens along `dim`; each token's gradient is the sum of all ranks' gradients.

    `gather_from_ranks` and `copy_to_ranks` in one: before a layer that is divided by columns,
    where each rank holds some of the tokens. x: [B, T / N, ...]; returns [B, T, ...].
    """
    return _between(
        x,
        group,
        partial(_all_gather, group=group, dim=dim),
        partial(scatter_sequence, group=group, dim=dim),
    )


def scatter_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """The sum of all ranks' x, of which each keeps its own tokens along `dim`.

    `reduce_from_ranks` and `scatter_to_ranks` in one: after a layer that is divided by rows.
    x: [B, T, ...]; returns [B, T / N, ...]. The gradient is all-gathered.
    Raises ValueError for a dimension that N does not divide.
    """
    return _between(
        x,
        group,
        partial(_reduce_scatter, group=group, dim=dim),
        partial(gather_sequence, group=group, dim=dim),
    )


Way = Callable[[Tensor], Tensor]


class _Between(torch.autograd.Function):
    """there(x), with back(gradient); back is a function of this module, so it can be derived."""

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
    # The collective sums in place, and the caller's tensor stays as it is.
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
    # A slice that lies in a row as it is would otherwise keep all of x in memory.
    return x.narrow(dim, mine.start, mine.stop - mine.start).clone(
        memory_format=torch.contiguous_format
    )


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    mine = part(f"dimension {dim} of a tensor of shape {tuple(x.shape)}", x.shape[dim], group)
    if not (x.is_cuda and "nccl" in dist.get_backend_config(group)):
        # Not every version of gloo has a reduce-scatter; its sum of everything is the same value
        # for twice the bytes.
        return _cut(_all_reduce(x, group), dim, mine)
    pieces = [piece.contiguous() for piece in x.chunk(rank_and_size(group)[1], dim)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=group)
    return total
