"""What an all-reduce costs: seconds = steps * alpha + bytes * beta, and a fit of alpha and beta.

alpha is the cost of a step, even with an empty message. beta is the cost of each byte. gamma, if
given, is the cost of adding one byte to another. A rank sends and receives at the same time. All
its messages share its link, and the messages of one step start together. Small messages are bound
by alpha and need few steps; large ones are bound by beta and need few bytes.

Source: Thakur, Rabenseifner and Gropp, 2005, Int. J. of High Performance Computing Applications
19; the model is from Hockney, 1994, Parallel Computing 20.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labcore import processes
from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.parallel.collectives import ALL_REDUCES, expected
from labcore.parallel.regions import rank_and_size

__all__ = [
    "LINKS",
    "AlphaBetaFit",
    "Link",
    "all_reduce_seconds",
    "crossover",
    "fit_alpha_beta",
    "measure_all_reduce",
    "time_all_reduce",
]

BACKEND = "backend"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects a rank to the others, in one direction; the other direction has the same.

    alpha: seconds per step. beta: seconds per byte. source: where the numbers come from. base:
    seconds that a collective costs once, before its first step.
    """

    name: str
    alpha: float
    beta: float
    source: str
    base: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "base"):
            non_negative(name, getattr(self, name), "pass seconds")
        non_negative("beta", self.beta, "pass seconds a byte, 1 / bandwidth")

    @property
    def bandwidth(self) -> float:
        """Bytes per second in one direction; inf if beta is 0."""
        return 1 / self.beta if self.beta else math.inf


def _link(name: str, microseconds: float, step: str, gigabytes: float, rate: str) -> Link:
    alpha = f"alpha: {microseconds:g} us, protocol LL of {step} in src/graph/tuning.cc of NCCL 2.30"
    return Link(
        name=name,
        alpha=microseconds * 1e-6,
        beta=1e-9 / gigabytes,
        source=f"{alpha}; beta: {gigabytes:.4g} GB/s, {rate}",
    )


_RING_NVLINK, _RING_PCI = "a ring's step over NVLink", "a ring's step over PCI"
_TREE_NET = "a tree's step over the network, which stands for rings of one GPU a node"
_PCIE = "16 lanes of {} GT/s coded 128b/130b, PCI Express Base Specification {} of the PCI-SIG"
_NVLINK = "half of the {} GB/s of both directions in the data sheet of NVIDIA's {} SXM"
_PORT = "a port of {} Gb/s ({}) in the user manual of NVIDIA's {} adapters"
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        _link("NVLink 4", 0.6, _RING_NVLINK, 450, _NVLINK.format(900, "H100")),
        _link("NVLink 3", 0.6, _RING_NVLINK, 300, _NVLINK.format(600, "A100")),
        _link("PCIe 5.0 x16", 1.0, _RING_PCI, 64 * 128 / 130, _PCIE.format(32, "5.0")),
        _link("PCIe 4.0 x16", 1.0, _RING_PCI, 32 * 128 / 130, _PCIE.format(16, "4.0")),
        _link("InfiniBand 400 Gb/s", 5.0, _TREE_NET, 50, _PORT.format(400, "NDR", "ConnectX-7")),
        _link("InfiniBand 100 Gb/s", 5.0, _TREE_NET, 12.5, _PORT.format(100, "EDR", "ConnectX-4")),
    )
}
"""Links by name, per rank and direction, from published figures.

The bandwidths are what the wire can carry. The alphas are the shortest that NCCL assumes, those of
its LL protocol, which reaches at most half of that bandwidth. The 6.6 us that NCCL adds for a ring
of any length are left out. Measured times are therefore longer, unless the switch does the sums
(NVLink SHARP). `protocols.protocol_links` gives what NCCL itself expects of each protocol; on a
real machine use `fit_alpha_beta`. InfiniBand means one port per rank and one rank per node.
"""


def all_reduce_seconds(
    name: str,
    ranks: int,
    nbytes: float,
    link: Link | Mapping[str, Link],
    gamma: float = 0.0,
) -> float:
    """Return the seconds of one of `ALL_REDUCES`: base + steps * alpha + bytes * beta (+ sums).

    nbytes: of the tensor on each rank. link: a mapping holds one wire under several protocols, as
    from `protocols.protocol_links`; the fastest of them for this message counts. gamma: seconds per
    byte added to another.
    0 for one rank. Raises ValueError for an unknown name or an unsupported number of ranks.
    """
    non_negative("gamma", gamma, "pass seconds a byte")
    does = expected(name, ranks, nbytes)
    if not does.steps:
        return 0.0
    links = (link,) if isinstance(link, Link) else link.values()
    wire = min(one.base + does.steps * one.alpha + does.bytes * one.beta for one in links)
    return wire + does.summed * gamma


def crossover(a: str, b: str, ranks: int, link: Link, gamma: float = 0.0) -> float:
    """Return the size in bytes at which all-reduces a and b take equally long.

    Below it, the one with fewer steps is faster; above it, the other. inf if there is no such size,
    because one of them is at least as fast at every size.
    """
    empty = [all_reduce_seconds(name, ranks, 0, link, gamma) for name in (a, b)]
    # Computed per byte, because a difference of times would lose digits.
    bare = Link(name=link.name, alpha=0.0, beta=link.beta, source=link.source)
    slopes = [all_reduce_seconds(name, ranks, 1, bare, gamma) for name in (a, b)]
    ahead, steeper = empty[1] - empty[0], slopes[0] - slopes[1]
    if ahead * steeper <= 0:
        return math.inf if ahead or not steeper else 0.0
    return ahead / steeper


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBetaFit:
    """seconds = alpha + beta * bytes, fitted to an operation's times.

    alpha: seconds of an empty message, for all its steps. beta: seconds per byte of the tensor.
    sizes: bytes. seconds: the measured median for each size. residuals: (seconds - fitted) /
    seconds for each size; the fit minimizes the sum of their squares.
    """

    alpha: float
    beta: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest of the residuals' absolute values."""
        return max(map(abs, self.residuals))

    def at(self, nbytes: float) -> float:
        """Return the fitted seconds for a tensor of nbytes."""
        return self.alpha + self.beta * non_negative("nbytes", nbytes)

    def link(self, algorithm: str, ranks: int, *, name: str = "fitted") -> Link:
        """Return the link for which `all_reduce_seconds(algorithm, ranks, ...)` gives these times.

        algorithm: one of `ALL_REDUCES`: the one that was measured, or your assumption about the
        backend's.
        ranks: of the measurement, at least 2.
        """
        does = expected(algorithm, ranks, 1)
        if ranks < 2:
            raise ValueError("ranks must be at least 2, got 1; one rank sends nothing")
        return Link(
            name=name,
            alpha=self.alpha / does.steps,
            beta=self.beta / does.bytes,
            source=f"fitted to {len(self.sizes)} sizes of {algorithm} on {ranks} ranks",
        )


def fit_alpha_beta(
    sizes: Sequence[int], seconds: Sequence[float] | Sequence[Sequence[float]]
) -> AlphaBetaFit:
    """Fit seconds = alpha + beta * bytes with alpha, beta >= 0 by relative least squares.

    sizes: bytes, at least two different ones. seconds: for each size a time or repeats of it;
    repeats count by their median, which a few outliers don't change. Errors are relative to the
    times, because absolute ones would depend on the largest messages alone and leave alpha
    undetermined. `fit_alpha_beta(list(times), list(times.values()))` accepts what
    `measure_all_reduce` returns.
    Raises ValueError for fewer sizes, lengths that differ, or times that aren't above 0.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            "sizes must hold at least two different sizes, and seconds a time for each, got "
            f"{len(set(sizes))} different sizes and {len(seconds)} times; measure more sizes"
        )
    for size in sizes:
        non_negative("sizes", size, "pass bytes")
    times = [statistics.median(one) if isinstance(one, Sequence) else float(one) for one in seconds]
    for one in times:
        positive("seconds", one)
    alpha, beta = _least_squares([float(size) for size in sizes], times)
    residuals = [(t - alpha - beta * n) / t for n, t in zip(sizes, times, strict=True)]
    return AlphaBetaFit(
        alpha=alpha,
        beta=beta,
        sizes=tuple(sizes),
        seconds=tuple(times),
        residuals=tuple(residuals),
    )


def _least_squares(sizes: list[float], times: list[float]) -> tuple[float, float]:
    """Return alpha, beta >= 0 that minimize the sum of ((alpha + beta * size - time) / time)**2."""
    weights = [one**-2 for one in times]

    def mean(values: list[float]) -> float:
        return math.fsum(map(math.prod, zip(weights, values, strict=True))) / math.fsum(weights)

    size, seconds = mean(sizes), mean(times)
    aside = [one - size for one in sizes]
    both = [d * (t - seconds) for d, t in zip(aside, times, strict=True)]
    beta = mean(both) / mean([d * d for d in aside])
    alpha = seconds - beta * size
    # The sum is convex, so if its free minimum violates a bound, the best point lies on that
    # bound.
    if beta < 0:
        return seconds, 0.0
    if alpha < 0:
        products = [n * t for n, t in zip(sizes, times, strict=True)]
        return 0.0, mean(products) / mean([n * n for n in sizes])
    return alpha, beta


def in_rounds(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, from the slowest rank.

    Each round makes every call once, in a fresh random order that is the same on all ranks; the
    ranks start each call together. Without a process group, only this process is timed.
    Raises ValueError for a group without this process, which torch would silently leave untimed.
    """
    rank_and_size(group)
    joined = dist.is_available() and dist.is_initialized()
    meeting = torch.zeros(1, device=device)
    gpu = meeting.is_cuda

    def once(call: Callable[[], object]) -> float:
        if joined:
            dist.all_reduce(meeting, group=group)  # a barrier: all ranks start together
        if gpu:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    order, dice = list(calls), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + positive_int("repeats", repeats)):
        dice.shuffle(order)
        for name in order:
            took = once(calls[name])
            if number >= warmup:
                samples[name].append(took)
    if not joined:
        return samples
    slowest = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return dict(zip(calls, slowest.tolist(), strict=True))


def time_all_reduce(
    sizes: Sequence[int],
    *,
    algorithm: str = BACKEND,
    repeats: int = 20,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> dict[int, list[float]]:
    """Return each size's all-reduce seconds in each repeat; call it on all ranks of a group.

    sizes: bytes of an fp32 tensor, multiples of 4. algorithm: "backend" for `dist.all_reduce`, or
    one of `ALL_REDUCES`. device: of the tensors; a GPU if the group's backend is NCCL.
    Returns the same on every rank, for each repeat the time of the slowest rank. A round contains
    every size, in random order, so a slow phase of the machine affects all sizes.
    Raises ValueError for invalid sizes, an unknown algorithm, an unsupported number of ranks, or a
    group without this process.
    """
    _check_measurement(sizes, algorithm, repeats)

    def call(size: int) -> Callable[[], object]:
        tensor = torch.empty(size // 4, device=device).zero_()  # Zeros stay zeros when summed.
        if algorithm == BACKEND:
            return lambda: dist.all_reduce(tensor, group=group)
        return lambda: ALL_REDUCES[algorithm](tensor, group)

    calls = {str(size): call(size) for size in sizes}
    told = in_rounds(calls, repeats=repeats, warmup=warmup, group=group, device=device)
    return {int(size): seconds for size, seconds in told.items()}


def _check_measurement(sizes: Sequence[int], algorithm: str, repeats: int) -> None:
    one_of("algorithm", algorithm, (BACKEND, *ALL_REDUCES))
    positive_int("repeats", repeats)
    if not sizes:
        raise ValueError("sizes must hold at least one size, got none; pass bytes")
    for size in sizes:
        if positive_int("sizes", size, "pass bytes") % 4:
            raise ValueError(
                f"sizes must be multiples of 4, the bytes of an fp32 element, got {size}; "
                f"pass {size - size % 4 + 4}"
            )


def measure_all_reduce(
    ranks: int,
    sizes: Sequence[int],
    *,
    algorithm: str = BACKEND,
    repeats: int = 20,
    timeout_s: float = 120,
) -> dict[int, list[float]]:
    """Run `time_all_reduce` in gloo processes on this machine and return seconds by size.

    The processes share the machine's cores; their links are sockets and memory. timeout_s: for
    everything.
    Raises ValueError as `time_all_reduce` does, and `ProcessesError` if a process failed.
    """
    positive_int("ranks", ranks, "pass the number of processes")
    _check_measurement(sizes, algorithm, repeats)  # fail here rather than in a process
    if algorithm != BACKEND:
        expected(algorithm, ranks, 0)
    told = processes.run(
        time_all_reduce,
        ranks,
        list(sizes),
        algorithm=algorithm,
        repeats=repeats,
        timeout_s=timeout_s,
    )
    return told[0]
