"""A product in chunks, each summed over the ranks while the next one is computed.

In a row-parallel product every rank computes some of the terms, and an all-reduce adds them up. The
wire waits for the product, and the next product waits for the wire. Cut into chunks of rows of x,
everything except the first product and the last all-reduce can overlap, as long as the two don't
compete for the same hardware. Each chunk adds costs: a launch, and the alpha of its all-reduce. If
the cores that compute also move the bytes, as with gloo, overlap hides nothing and chunks lose.

Sources: Wang et al., 2023, ASPLOS, doi 10.1145/3567955.3567959 (decomposed collectives); Jangda et
al., 2022, ASPLOS, arXiv 2105.05720 (overlap of a product and its all-reduce).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labcore import processes
from labcore.checks import floating, non_negative, positive_int
from labcore.parallel.cost import Link, all_reduce_seconds, in_rounds
from labcore.parallel.regions import rank_and_size
from labcore.timing import Timing

__all__ = [
    "OverlapRun",
    "best_chunks",
    "chunked_linear",
    "measure_overlap",
    "overlapped_seconds",
]


class _Work(Protocol):
    def wait(self) -> object: ...


def chunked_linear(
    x: Tensor,
    weight: Tensor,
    chunks: int,
    group: dist.ProcessGroup | None = None,
    *,
    overlap: bool = True,
) -> Tensor:
    """Return x @ weight summed over the ranks, in chunks of x's rows, for a row-parallel layer.

    x: [..., F / N], this rank's columns of the input. weight: [F / N, C], this rank's rows of the
    whole weight, transposed from what `torch.nn.Linear` stores. Both have the same floating dtype.
    chunks: the number of chunks, capped at the number of rows of x.
    overlap: run each chunk's all-reduce while the next product is computed; False waits for it.
    Returns a new tensor [..., C], the same on every rank, equal to one product and one all-reduce
    up to rounding. No gradient flows. A single process returns the plain product.
    Raises TypeError unless x is floating point, ValueError for shapes that don't match and for a
    group without this process.
    """
    positive_int("chunks", chunks)
    floating("x", x)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            "x and weight must be [..., F / N] and [F / N, C], got "
            f"{list(x.shape)} and {list(weight.shape)}; pass weight.T for torch.nn.Linear's weight"
        )
    alone = rank_and_size(group)[1] == 1

    def reduce(part: Tensor) -> _Work | None:
        return None if alone else dist.all_reduce(part, group=group, async_op=True)

    return _chunked(x, weight, chunks, reduce, overlap=overlap)


@torch.no_grad()
def _chunked(
    x: Tensor,
    weight: Tensor,
    chunks: int,
    reduce: Callable[[Tensor], _Work | None],
    *,
    overlap: bool,
) -> Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])  # [M, F / N]
    out = rows.new_empty(len(rows), weight.shape[1])
    under_way = []
    for inside, part in zip(rows.tensor_split(chunks), out.tensor_split(chunks), strict=True):
        if not len(part):
            continue
        torch.mm(inside, weight, out=part)
        work = reduce(part)
        if work is not None:
            under_way.append(work)
            if not overlap:
                work.wait()
    if overlap:
        for work in under_way:
            work.wait()
    return out.view(*x.shape[:-1], weight.shape[1])


def overlapped_seconds(
    compute: float,
    wire: float,
    chunks: int,
    *,
    launch: float = 0.0,
    alpha: float = 0.0,
    shared: bool = False,
) -> float:
    """Return the seconds of a product and its all-reduce in equal chunks, by the pipeline formula.

    compute: seconds of the whole product. wire: seconds of the whole message without its alphas.
    launch: seconds that each chunk adds to its product. alpha: seconds that each chunk adds to
    its all-reduce. With p = compute / chunks + launch and w = wire / chunks + alpha, the time is
    p + (chunks - 1) * max(p, w) + w, which is never below compute or below wire.
    shared: the product and the wire need the same cores, so nothing overlaps. The time is then
    chunks * (p + w), which is least for one chunk.
    """
    positive_int("chunks", chunks)
    costs = {"compute": compute, "wire": wire, "launch": launch, "alpha": alpha}
    for name, value in costs.items():
        non_negative(name, value, "pass seconds")
    product, message = compute / chunks + launch, wire / chunks + alpha
    if shared:
        return chunks * (product + message)
    return product + (chunks - 1) * max(product, message) + message


def best_chunks(
    compute: float, wire: float, *, launch: float = 0.0, alpha: float = 0.0, most: int = 64
) -> int:
    """Return the number of chunks, up to most, with the least `overlapped_seconds`.

    Of equally fast numbers it returns the smallest. It assumes that the wire shares nothing with
    the product; otherwise one chunk is best. Arguments in seconds.
    """
    times = [
        overlapped_seconds(compute, wire, chunks, launch=launch, alpha=alpha)
        for chunks in range(1, positive_int("most", most) + 1)
    ]
    least = min(times) * (1 + 1e-9)  # A gain within rounding is not worth another chunk.
    return next(chunks for chunks, seconds in enumerate(times, 1) if seconds <= least)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapRun:
    """A row-parallel product timed in five forms, in the same rounds; seconds.

    compute: the product alone. wire: the all-reduce alone. plain: one after the other.
    chunked: in chunks, waiting for each. overlapped: in chunks, as in `chunked_linear`.
    chunks: how many. nbytes: of the message. link: its name, "gloo" or a simulated link's.
    """

    compute: Timing
    wire: Timing
    plain: Timing
    chunked: Timing
    overlapped: Timing
    chunks: int
    nbytes: int
    link: str

    @property
    def gain(self) -> float:
        """The median of plain over that of overlapped; above 1, overlap pays off."""
        return self.plain.p50 / self.overlapped.p50


class _Pretended:
    """A simulated link: an all-reduce only takes the time that its bytes would need.

    Messages go one after another. Waiting uses no other hardware, as with a dedicated link.
    """

    def __init__(self, link: Link, ranks: int, algorithm: str) -> None:
        self.link, self.ranks, self.algorithm = link, ranks, algorithm
        self.free = 0.0

    def reduce(self, part: Tensor) -> _Work:
        took = all_reduce_seconds(self.algorithm, self.ranks, part.nbytes, self.link)
        self.free = max(self.free, time.perf_counter()) + took
        return _Arrival(self.free)


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float

    def wait(self) -> None:
        while (left := self.at - time.perf_counter()) > 0:
            # A sleep may overrun by more than the message takes, so poll the last millisecond.
            if left > 1e-3:
                time.sleep(left - 1e-3)


def _time_forms(
    rows: int,
    inner: int,
    width: int,
    chunks: int,
    repeats: int,
    pretended: _Pretended | None,
) -> dict[str, list[float]]:
    """Time the five forms, on every rank of a group or alone with a simulated link."""
    x, weight = torch.ones(rows, inner), torch.full((inner, width), 1.0 / inner)
    message = torch.zeros(rows, width)

    def reduce(part: Tensor) -> _Work | None:
        return pretended.reduce(part) if pretended else dist.all_reduce(part, async_op=True)

    def wire() -> None:
        if (work := reduce(message)) is not None:
            work.wait()

    forms: dict[str, Callable[[], object]] = {
        "compute": lambda: _chunked(x, weight, 1, lambda _: None, overlap=False),
        "wire": wire,
        "plain": lambda: _chunked(x, weight, 1, reduce, overlap=False),
        "chunked": lambda: _chunked(x, weight, chunks, reduce, overlap=False),
        "overlapped": lambda: _chunked(x, weight, chunks, reduce, overlap=True),
    }
    return in_rounds(forms, repeats=repeats)


def measure_overlap(
    *,
    ranks: int = 2,
    rows: int = 256,
    inner: int = 1024,
    width: int = 1024,
    chunks: int = 4,
    repeats: int = 20,
    link: Link | None = None,
    algorithm: str = "ring",
    timeout_s: float = 120,
) -> OverlapRun:
    """Measure what chunks and overlap do to x [rows, inner] @ weight [inner, width], in fp32.

    inner: per rank, F / N.
    link: None runs `ranks` processes on this machine, which communicate through gloo and share its
    cores. With a link, only this process runs. Its products are real, but its all-reduces sum
    nothing: each takes `all_reduce_seconds(algorithm, ranks, ..., link)`, one after another, and
    leaves the core free. ranks and algorithm then enter only that formula.
    algorithm: ignored without a link; gloo chooses its own.
    timeout_s: for everything, if processes run.
    Raises ValueError for sizes below 1 and for what `all_reduce_seconds` rejects.
    """
    sizes = {"ranks": ranks, "rows": rows, "inner": inner, "width": width, "chunks": chunks}
    for name, size in sizes.items():
        positive_int(name, size)
    arguments = (rows, inner, width, chunks, positive_int("repeats", repeats))
    if link is None:
        told = processes.run(_time_forms, ranks, *arguments, None, timeout_s=timeout_s)[0]
    else:
        told = _time_forms(*arguments, _Pretended(link, ranks, algorithm))
    return OverlapRun(
        **{form: Timing(samples=tuple(seconds)) for form, seconds in told.items()},
        chunks=chunks,
        nbytes=rows * width * 4,
        link="gloo" if link is None else link.name,
    )
