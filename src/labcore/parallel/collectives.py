"""All-reduces written with point-to-point sends, to be read: afterwards every rank has the sum.

Letters: N ranks, r this rank. A tensor is flattened and cut into N parts, as even as possible. The
first parts may be one element longer, and some are empty if there are fewer elements than ranks.
In one step a rank sends and receives at the same time.

    name              steps                          bytes sent per rank, for a tensor of n bytes
    ring              2 (N - 1)                      2 n (N - 1) / N
    halving_doubling  2 log2 N, N a power of two     2 n (N - 1) / N
    one_shot          1                              n (N - 1)
    two_shot          2                              2 n (N - 1) / N

No all-reduce can send less than 2 n (N - 1) / N if each message has one receiver. The bytes are
means over the ranks. With uneven parts some ranks send more, but no rank's count is off by more
than 2 (N - 1) elements.

Every rank gets the same bits, because the order of a sum is fixed: by rank in `one_shot` and
`two_shot`; along the ring in `ring`, starting with the rank after the part's owner; by pairs in
`halving_doubling`. 16-bit floats are added in fp32 but sent in their own dtype. Their sum is
rounded once in `one_shot` and `two_shot`, and after every addition in the other two. Integers wrap.

Sources: Patarasuk and Yuan, 2009, Journal of Parallel and Distributed Computing 69 (ring, and the
lower bound on bytes); Thakur, Rabenseifner and Gropp, 2005, Int. J. of High Performance Computing
Applications 19 (halving and doubling); the one-shot and two-shot kernels of vLLM's custom
all-reduce and of TensorRT-LLM, whose MultiShot uses NVSwitch to send a message to all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from labcore.checks import non_negative, one_of, positive_int
from labcore.parallel.regions import rank_and_size

__all__ = [
    "ALL_REDUCES",
    "CollectiveTraffic",
    "Expected",
    "expected",
    "halving_doubling",
    "one_shot",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "two_shot",
]


@dataclass(kw_only=True, slots=True)
class CollectiveTraffic:
    """What this rank sent, accumulated over all calls that got this object.

    steps: rounds, including those in which this rank had nothing to send.
    sent: (step, receiver's rank in the group, bytes) for each message; none is empty.
    """

    steps: int = 0
    sent: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """The number of messages this rank sent."""
        return len(self.sent)

    @property
    def bytes(self) -> int:
        """The number of bytes this rank sent."""
        return sum(size for _, _, size in self.sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What an all-reduce costs by its definition.

    steps: rounds. messages: messages sent per rank. bytes: bytes sent per rank, the mean over
    ranks. Both assume that no part is empty. summed: bytes that a rank adds to others, also the
    mean.
    """

    steps: int
    messages: int
    bytes: float
    summed: float


def expected(name: str, ranks: int, nbytes: float) -> Expected:
    """Return steps, messages and bytes of all-reduce `name` for a tensor of nbytes on each rank.

    Raises ValueError for an unknown name, and for halving_doubling unless ranks is a power of two.
    """
    one_of("name", name, ALL_REDUCES)
    positive_int("ranks", ranks)
    non_negative("nbytes", nbytes, "pass the bytes of one rank's tensor")
    others = ranks - 1
    share = nbytes * others / ranks
    if name == "one_shot":
        return Expected(
            steps=min(others, 1), messages=others, bytes=nbytes * others, summed=nbytes * others
        )
    if name == "halving_doubling":
        steps = messages = 2 * _log2(ranks)
    else:
        steps = 2 * (min(others, 1) if name == "two_shot" else others)
        messages = 2 * others
    return Expected(steps=steps, messages=messages, bytes=2 * share, summed=share)


def _log2(ranks: int) -> int:
    if ranks & (ranks - 1):
        raise ValueError(
            f"for halving_doubling the number of ranks must be a power of two, got {ranks}; "
            "use 'ring' or 'two_shot'"
        )
    return ranks.bit_length() - 1


class _Wire:
    """This rank's end of the group; counts what it sends."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: CollectiveTraffic | None) -> None:
        self.group, self.traffic = group, traffic
        self.rank, self.ranks = rank_and_size(group)

    def step(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Run one round: send a tensor to each rank in sends, receive one from each in receives."""
        # Both ends know which parts are empty, so nobody sends those.
        out = {peer: part for peer, part in sends.items() if part.numel()}
        operations = [
            dist.P2POp(dist.isend, part, group=self.group, group_peer=peer)
            for peer, part in out.items()
        ]
        operations += [
            dist.P2POp(dist.irecv, part, group=self.group, group_peer=peer)
            for peer, part in receives.items()
            if part.numel()
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if self.traffic is not None:
            self.traffic.sent += [
                (self.traffic.steps, peer, part.nbytes) for peer, part in out.items()
            ]
            self.traffic.steps += 1


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor's elements as a contiguous 1-D tensor, a view if possible."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype == torch.bool:
        raise TypeError("tensor must hold numbers, got torch.bool; convert it with tensor.int()")
    return tensor.detach().reshape(-1).contiguous()


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum from left to right in at least fp32, rounded once to the dtype; returns a new tensor."""
    dtype = terms[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total += term
    return total.to(dtype)


def _bounds(numel: int, ranks: int) -> list[int]:
    """Return where the N parts begin, and the end of the last; the same cuts as `tensor_split`."""
    size, longer = divmod(numel, ranks)
    return [part * size + min(part, longer) for part in range(ranks + 1)]


def ring_reduce_scatter(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return part r of the sum over the ranks, in N - 1 steps: the first half of `ring`.

    tensor: the same shape and dtype on every rank; not modified.
    traffic: records what this rank sends.
    Returns a new tensor [numel / N], part r of `tensor.flatten().tensor_split(N)`.
    """
    wire = _Wire(group, traffic)
    rank, ranks = wire.rank, wire.ranks
    parts = _flat(tensor).tensor_split(ranks)
    # Each part's sum starts at the rank after its owner and reaches the owner last.
    total = parts[(rank - 1) % ranks]
    for step in range(ranks - 1):
        own = parts[(rank - 2 - step) % ranks]
        came = torch.empty_like(own)
        wire.step({(rank + 1) % ranks: total}, {(rank - 1) % ranks: came})
        total = _sum((came, own))
    return total.clone() if ranks == 1 else total


def ring_all_gather(
    part: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    numel: int | None = None,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return all ranks' parts in rank order, in N - 1 steps: the second half of `ring`.

    part: [numel / N], as long as part r of `tensor_split(N)` of numel elements; not modified.
    numel: elements of all parts together; by default all parts are as long as this one.
    traffic: records what this rank sends.
    Returns a new tensor [numel]. Raises ValueError for a part of the wrong length.
    """
    wire = _Wire(group, traffic)
    rank, ranks = wire.rank, wire.ranks
    own = _flat(part)
    whole = own.new_empty(own.numel() * ranks if numel is None else numel)
    parts = whole.tensor_split(ranks)
    if parts[rank].numel() != own.numel():
        raise ValueError(
            f"part must have {parts[rank].numel()} elements on rank {rank} of {ranks} for "
            f"numel={numel}, got {own.numel()}; pass part {rank} of tensor_split({ranks})"
        )
    parts[rank].copy_(own)
    for step in range(ranks - 1):
        newest, next_one = parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks]
        wire.step({(rank + 1) % ranks: newest}, {(rank - 1) % ranks: next_one})
    return whole


def ring(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return the sum over the ranks in 2 (N - 1) steps; each rank sends to the next one only.

    tensor: any shape, including empty; the same shape and dtype on every rank: fp64, fp32, 16-bit
    floats (added in fp32) or integers. It isn't modified, and no gradient flows.
    traffic: records what this rank sends.
    Returns a new tensor of the same shape, dtype and device, with the same bits on every rank.
    On a fresh NCCL group, run another collective first, as `torch.distributed.batch_isend_irecv`
    requires. Raises TypeError for a bool tensor, ValueError for a group without this process.
    """
    part = ring_reduce_scatter(tensor, group, traffic=traffic)
    return ring_all_gather(part, group, numel=tensor.numel(), traffic=traffic).view(tensor.shape)


def halving_doubling(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return the sum over the ranks by exchanging halves with ranks N/2, N/4, ... 1 away, and back.

    Arguments, result and errors are those of `ring`; also raises ValueError unless N is a power of
    two.
    """
    wire = _Wire(group, traffic)
    rank, ranks = wire.rank, wire.ranks
    flat = _flat(tensor)
    bounds = _bounds(flat.numel(), ranks)
    distances = [ranks >> (step + 1) for step in range(_log2(ranks))]
    total, first = flat, 0  # first: the first part that this rank sums
    for distance in distances:
        lower, upper = total.tensor_split([bounds[first + distance] - bounds[first]])
        own, given = (upper, lower) if rank & distance else (lower, upper)
        first += rank & distance
        came = torch.empty_like(own)
        wire.step({rank ^ distance: given}, {rank ^ distance: came})
        total = _sum((own, came))
    whole = torch.empty_like(flat)
    whole[bounds[rank] : bounds[rank + 1]] = total
    for distance in reversed(distances):
        here, there = (peer & -distance for peer in (rank, rank ^ distance))
        known = whole[bounds[here] : bounds[here + distance]]
        missing = whole[bounds[there] : bounds[there + distance]]
        wire.step({rank ^ distance: known}, {rank ^ distance: missing})
    return whole.view(tensor.shape)


def one_shot(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return the sum over the ranks in 1 step: each rank sends its tensor to all and adds up.

    Arguments, result and errors are those of `ring`.
    """
    wire = _Wire(group, traffic)
    rank, ranks = wire.rank, wire.ranks
    flat = _flat(tensor)
    others = [peer for peer in range(ranks) if peer != rank]
    terms = [flat if peer == rank else torch.empty_like(flat) for peer in range(ranks)]
    if others:
        wire.step(dict.fromkeys(others, flat), {peer: terms[peer] for peer in others})
    return _sum(terms).view(tensor.shape)


def two_shot(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    traffic: CollectiveTraffic | None = None,
) -> Tensor:
    """Return the sum over the ranks in 2 steps: rank p sums part p and sends its sum to all others.

    The two steps are a reduce-scatter and an all-gather. Arguments, result and errors are those of
    `ring`.
    """
    wire = _Wire(group, traffic)
    rank, ranks = wire.rank, wire.ranks
    flat = _flat(tensor)
    parts = flat.tensor_split(ranks)
    others = [peer for peer in range(ranks) if peer != rank]
    own = parts[rank]
    terms = [own if peer == rank else torch.empty_like(own) for peer in range(ranks)]
    if others:
        wire.step({peer: parts[peer] for peer in others}, {peer: terms[peer] for peer in others})
    whole = torch.empty_like(flat)
    sums = whole.tensor_split(ranks)
    sums[rank].copy_(_sum(terms))
    if others:
        wire.step(dict.fromkeys(others, sums[rank]), {peer: sums[peer] for peer in others})
    return whole.view(tensor.shape)


ALL_REDUCES: dict[str, Callable[..., Tensor]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "one_shot": one_shot,
    "two_shot": two_shot,
}
"""The all-reduces by name; all have the signature of `ring`."""
