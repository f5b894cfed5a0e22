"""Each region and its gradient, from the definition: what every rank holds is known to all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labcore import processes
from labcore.parallel import regions
from labcore.parallel.regions import (
    copy_to_ranks,
    divisors,
    gather_from_ranks,
    gather_sequence,
    part,
    rank_and_size,
    reduce_from_ranks,
    scatter_sequence,
    scatter_to_ranks,
)
from tests.parallel.pairs import Differences, Pairs, differences, module_seed, say

COUNTS = (2, 3, 4)
DIVIDED = {
    "gather": gather_from_ranks,
    "scatter": scatter_to_ranks,
    "gather sequence": gather_sequence,
    "scatter sequence": scatter_sequence,
}
REGIONS = {"copy": copy_to_ranks, "reduce": reduce_from_ranks, **DIVIDED}


def whole(shape: tuple[int, ...], ranks: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Every rank's tensor, [N, *shape]: small whole numbers, whose sums are exact in any dtype."""
    return torch.randint(-8, 9, (ranks, *shape), generator=g).to(dtype)


def expected(name: str, xs: Tensor, grads: Tensor, rank: int, dim: int) -> tuple[Tensor, Tensor]:
    """What rank r has after the forward and after the backward; xs and grads [N, ...]."""
    ranks = len(xs)

    def slices(x: Tensor) -> Tensor:
        return x.tensor_split(ranks, dim)[rank]

    def joined(x: Tensor) -> Tensor:
        return torch.cat(list(x), dim)

    return {
        "copy": lambda: (xs[rank], grads.sum(0)),
        "reduce": lambda: (xs.sum(0), grads[rank]),
        "gather": lambda: (joined(xs), slices(grads[rank])),
        "scatter": lambda: (slices(xs[rank]), joined(grads)),
        "gather sequence": lambda: (joined(xs), slices(grads.sum(0))),
        "scatter sequence": lambda: (slices(xs.sum(0)), joined(grads)),
    }[name]()


def shapes(name: str, ranks: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of x and of the result, the divided dimension where the function needs it."""
    long, short = [3, 5, 7], [3, 5, 7]
    long[dim] = ranks * short[dim]
    return {
        "copy": (tuple(short), tuple(short)),
        "reduce": (tuple(short), tuple(short)),
        "gather": (tuple(short), tuple(long)),
        "scatter": (tuple(long), tuple(short)),
        "gather sequence": (tuple(short), tuple(long)),
        "scatter sequence": (tuple(long), tuple(short)),
    }[name]


def one_region(name: str, g: torch.Generator, group: dist.ProcessGroup | None = None) -> Pairs:
    rank, ranks = rank_and_size(group)
    for dim, dtype in itertools.product((0, 1, -1), (torch.float64, torch.float32, torch.bfloat16)):
        start, end = shapes(name, ranks, dim)
        xs, grads = whole(start, ranks, dtype, g), whole(end, ranks, dtype, g)
        # No tensor here is contiguous: [3, 5, 7] with the first dimension innermost.
        x = xs[rank].permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
        grad = grads[rank].permute(1, 2, 0).contiguous().permute(2, 0, 1)
        before = x.detach().clone(), grad.clone()
        region = REGIONS[name]
        y = region(x, group, dim) if name in DIVIDED else region(x, group)
        y.backward(grad)
        there, back = expected(name, xs, grads, rank, dim)
        label = f"{str(dtype)[6:]} along {dim}"
        yield f"{label}: forward", y, there
        yield f"{label}: backward", x.grad, back
        yield f"{label}: x afterwards", x, before[0]
        yield f"{label}: gradient afterwards", grad, before[1]


def expanded_gradient(g: torch.Generator) -> Pairs:
    """The gradient of a sum is one number seen many times; a sum in place would go wrong."""
    rank, ranks = rank_and_size()
    for name, region in REGIONS.items():
        start, end = shapes(name, ranks, 1)
        xs = whole(start, ranks, torch.float64, g)
        x = xs[rank].clone().requires_grad_()
        (region(x, None, 1) if name in DIVIDED else region(x)).sum().backward()
        ones = torch.ones(ranks, *end, dtype=torch.float64)
        yield name, x.grad, expected(name, xs, ones, rank, 1)[1]


def second_derivative(g: torch.Generator) -> Pairs:
    """Of the sum over ranks r of w_r x^3: 6 x times the sum of all w_r."""
    rank, ranks = rank_and_size()
    weights = whole((4,), ranks, torch.float64, g)
    x = torch.randn(4, generator=g, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(4, generator=g, dtype=torch.float64)
    loss = reduce_from_ranks((weights[rank] * copy_to_ranks(x) ** 3).sum())
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first @ probe, x)
    yield "loss", loss, (weights * x**3).sum()
    yield "first", first, 3 * weights.sum(0) * x**2
    yield "second", second, 6 * weights.sum(0) * x * probe


def in_groups(g: torch.Generator) -> Pairs:
    """Two groups that lie across each other's ranks."""
    rank, ranks = rank_and_size()
    members = [list(range(ranks))[first::2] for first in range(2)]
    groups = [dist.new_group(one) for one in members]
    own = groups[rank % 2]
    for name in REGIONS:
        for label, actual, wanted in one_region(name, g, own):
            yield f"{name}: {label}", actual, wanted


def without_gradients(g: torch.Generator) -> Pairs:
    rank, ranks = rank_and_size()
    for name, region in REGIONS.items():
        xs = whole(shapes(name, ranks, 1)[0], ranks, torch.float32, g)
        grads = whole(shapes(name, ranks, 1)[1], ranks, torch.float32, g)
        with torch.inference_mode():
            y = region(xs[rank], None, 1) if name in DIVIDED else region(xs[rank])
        yield name, y.clone(), expected(name, xs, grads, rank, 1)[0]


def small_slices(g: torch.Generator) -> Pairs:
    """A slice that lies in a row as it is keeps nothing of what it was cut from."""
    ranks = rank_and_size()[1]
    x = whole((1, 5 * ranks, 7), 1, torch.float32, g)[0]
    for name, region in (("scatter", scatter_to_ranks), ("sequence", scatter_sequence)):
        own = region(x, None, 1)
        yield name, torch.tensor(own.untyped_storage().nbytes()), torch.tensor(own.nbytes)


def faults() -> Iterator[tuple[str, str, mock._patch]]:
    """(name, the region that shows it, the patch that plants it)."""
    gather, reduce = regions._all_gather, regions._all_reduce

    def reversed_gather(x: Tensor, group: object, dim: int) -> Tensor:
        return torch.cat(gather(x, group, dim).chunk(rank_and_size()[1], dim)[::-1], dim)

    def mean(x: Tensor, group: object) -> Tensor:
        return reduce(x, group) / rank_and_size()[1]

    def in_place(x: Tensor, group: object) -> Tensor:
        return x.data.copy_(reduce(x, group)).view_as(x)

    def next_slice(x: Tensor, group: object, dim: int) -> Tensor:
        rank, ranks = rank_and_size()
        return x.chunk(ranks, dim)[(rank + 1) % ranks].contiguous()

    def shifted(x: Tensor, group: object, dim: int) -> Tensor:
        return next_slice(reduce(x, group), None, dim)

    plant = functools.partial(mock.patch.object, regions)
    yield "gather in the wrong order", "gather", plant("_all_gather", reversed_gather)
    yield "mean instead of sum", "reduce", plant("_all_reduce", mean)
    yield "no sum in the backward", "copy", plant("_all_reduce", lambda x, group: x.clone())
    yield "slice of the next rank", "scatter", plant("_own_slice", next_slice)
    yield "sum in the caller's tensor", "reduce", plant("_all_reduce", in_place)
    yield "reduce-scatter shifted by one", "scatter sequence", plant("_reduce_scatter", shifted)


def everything(seed: int) -> tuple[Differences, Differences, list[str]]:
    checks = {name: functools.partial(one_region, name) for name in REGIONS}
    checks |= {
        "expanded gradient": expanded_gradient,
        "second derivative": second_derivative,
        "no gradients": without_gradients,
        "small slices": small_slices,
    }
    if rank_and_size()[1] == 4:
        checks["groups"] = in_groups
    planted: Differences = {}
    for name, region, patch in faults():
        with patch:
            planted |= {name: differences({name: checks[region]}, seed)[name]}
    return differences(checks, seed), planted, refusals()


def refusals() -> list[str]:
    rank, ranks = rank_and_size()
    told = []
    lonely = dist.new_group([0])
    for ask in (
        lambda: part("num_key_value_heads", 6 * ranks + 1),
        lambda: scatter_to_ranks(torch.zeros(2, ranks + 1)),
        lambda: scatter_sequence(torch.zeros(2, ranks + 1, 3)),
        lambda: rank_and_size(lonely) if rank else part("width", 0),
    ):
        with pytest.raises(ValueError) as problem:
            ask()
        told.append(str(problem.value))
    return told


Runs = tuple[int, list[Differences], list[Differences], list[list[str]]]


@pytest.fixture(scope="module", params=COUNTS)
def runs(request: pytest.FixtureRequest) -> Runs:
    came = processes.run(everything, request.param, module_seed(), timeout_s=300)
    return request.param, *map(list, zip(*came, strict=True))  # type: ignore[return-value]


def test_forward_and_backward_are_those_of_the_definition(runs: Runs) -> None:
    _, by_rank, _, _ = runs
    for name in by_rank[0]:
        limit = 1e-14 if name == "second derivative" else 0.0  # whole numbers are exact
        assert not say(by_rank, name, limit), name


def test_each_planted_fault_is_seen(runs: Runs) -> None:
    _, _, planted, _ = runs
    assert len(planted[0]) == 6
    for name in planted[0]:
        assert say(planted, name, 1e-3), name


def test_what_does_not_divide_is_named_with_what_does(runs: Runs) -> None:
    ranks, _, _, told = runs
    for rank, (heads, sliced, tokens, lonely) in enumerate(told):
        size = 6 * ranks + 1
        fitting = ", ".join(map(str, divisors(size)))
        assert heads.startswith("num_key_value_heads must be a multiple of ")
        assert f" {ranks} ranks, got {size}; " in heads and f" among {fitting}, or " in heads
        assert f"dimension -1 of a tensor of shape (2, {ranks + 1}) must be" in sliced
        assert f"dimension 1 of a tensor of shape (2, {ranks + 1}, 3) must be" in tokens
        other = f"got one without rank {rank}" if rank else "width must be at least 1, got 0"
        assert other in lonely


def test_alone_all_are_identities(generator: torch.Generator) -> None:
    x = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    assert rank_and_size() == (0, 1)
    assert part("width", 7) == slice(0, 7)
    for name, region in REGIONS.items():
        assert region(x) is x, name


@pytest.mark.parametrize("size", [1, 2, 7, 12, 49, 360])
def test_divisors_are_all_and_in_order(size: int) -> None:
    assert divisors(size) == [n for n in range(1, size + 1) if size % n == 0]


def test_a_long_list_of_divisors_is_cut_short() -> None:
    with (
        mock.patch.object(regions, "rank_and_size", lambda group: (0, 7)),
        pytest.raises(ValueError, match="among 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 18, …, or"),
    ):
        part("width", 360)
