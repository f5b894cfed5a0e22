"""Each all-reduce is the sum on every rank, in the order, steps and bytes that it states."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labcore import processes
from labcore.device import seed_from_environment
from labcore.parallel.collectives import (
    ALL_REDUCES,
    CollectiveTraffic,
    expected,
    halving_doubling,
    one_shot,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    two_shot,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int8, torch.uint8)
RANKS = (1, 2, 3, 4, 5)
Case = tuple[str, int, torch.dtype]
Told = Callable[[int], list[dict[str, Any]]]  # What each of so many ranks told.
each_ranks = pytest.mark.parametrize("ranks", RANKS)


def names(ranks: int) -> list[str]:
    return [name for name in ALL_REDUCES if name != "halving_doubling" or ranks in (1, 2, 4)]


def lengths(ranks: int) -> list[int]:
    return sorted({0, 1, ranks - 1, 7, 1000})


def cases(ranks: int) -> list[Case]:
    return [
        (name, length, dtype)
        for name in names(ranks)
        for length in lengths(ranks)
        for dtype in (*FLOATS, *INTEGERS)
    ]


def drawn(seed: int, rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings: floats of all magnitudes and signs, integers that overflow."""
    dice = torch.Generator().manual_seed(seed + 1009 * rank + length)
    if dtype.is_floating_point:
        wide = torch.randn(length, generator=dice, dtype=torch.float64)
        return (wide * torch.randn(length, generator=dice).double().exp()).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (length,), generator=dice, dtype=dtype)


def every_case(seed: int) -> dict[str, Any]:
    """All of one group, in one start of its processes: they start slowly."""
    rank, ranks = processes.rank_and_world()
    told: dict[str, Any] = {"seed": seed, "sums": {}, "traffic": {}, "backend": {}}
    for name, length, dtype in cases(ranks):
        own = drawn(seed, rank, length, dtype)
        before, traffic = own.clone(), CollectiveTraffic()
        total = ALL_REDUCES[name](own, traffic=traffic)
        assert torch.equal(own, before), "the caller's tensor was changed"
        assert total.untyped_storage().data_ptr() != own.untyped_storage().data_ptr() or not length
        told["sums"][name, length, dtype] = total
        told["traffic"][name, length, dtype] = traffic
        if dtype == torch.float64:
            dist.all_reduce(before)
            told["backend"][name, length, dtype] = before
    told["shapes"] = shapes(seed, rank, ranks)
    told["halves"] = halves(seed, rank, ranks)
    told["refused"] = refused(ranks)
    told["groups"] = groups(rank) if ranks == 4 else None
    return told


def shapes(seed: int, rank: int, ranks: int) -> list[str]:
    """What does not come back as it should, of tensors that do not lie in a row."""
    wrong = []
    whole = drawn(seed, rank, 3 * 5 * 14, torch.float64).view(3, 5, 14)
    for name in names(ranks):
        for own in (whole[..., ::2].transpose(0, 2), whole[0, 0, 0], whole[:, :0]):
            asked = own.clone().requires_grad_() if own.is_contiguous() else own
            total, twice = ALL_REDUCES[name](asked), ALL_REDUCES[name](asked)
            backend = own.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(backend)
            good = total.shape == own.shape and torch.allclose(total, backend, 1e-12, 1e-12)
            if not good or total.requires_grad or not torch.equal(total, twice):
                wrong.append(f"{name} of {list(own.shape)}")
    return wrong


def halves(seed: int, rank: int, ranks: int) -> dict[int, tuple[Tensor, Tensor, CollectiveTraffic]]:
    """Part and whole of each length, and what both halves sent."""
    told = {}
    for length in lengths(ranks):
        traffic = CollectiveTraffic()
        part = ring_reduce_scatter(drawn(seed, rank, length, torch.float32), traffic=traffic)
        whole = ring_all_gather(part, numel=length, traffic=traffic)
        told[length] = part, whole, traffic
    same = ring_all_gather(torch.full((3,), float(rank)))  # even parts need no number
    assert same.tolist() == [float(r) for r in range(ranks) for _ in range(3)]
    return told


def refused(ranks: int) -> dict[str, str]:
    calls: dict[str, Callable[[], object]] = {
        "bool": lambda: ring(torch.ones(3, dtype=torch.bool)),
        "list": lambda: two_shot([1.0]),  # type: ignore[arg-type]
        "part": lambda: ring_all_gather(torch.ones(4), numel=3 * ranks),
        "odd": lambda: halving_doubling(torch.ones(3)),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as problem:
            told[name] = str(problem)
    return told


def groups(rank: int) -> dict[str, Any]:
    """Ranks 1 and 3 of four among themselves: their ranks in the group are 0 and 1."""
    group = dist.new_group([1, 3])
    told = {}
    for name, reduce in ALL_REDUCES.items():
        traffic = CollectiveTraffic()
        try:
            told[name] = reduce(torch.arange(3) + rank, group, traffic=traffic).tolist()
            assert {peer for _, peer, _ in traffic.sent} == {1 - rank // 2}
        except ValueError as problem:
            told[name] = str(problem)
    return told


@pytest.fixture(scope="module")
def told() -> Told:
    asked = seed_from_environment()
    seed = random.SystemRandom().randrange(2**31) if asked is None else asked

    @functools.cache
    def once(ranks: int) -> list[dict[str, Any]]:
        return processes.run(every_case, ranks, seed, timeout_s=120)

    def of(ranks: int) -> list[dict[str, Any]]:
        print(f"LABCORE_SEED={seed}")
        return once(ranks)

    return of


@each_ranks
def test_the_sum_is_that_of_the_backend_and_of_wider_numbers(ranks: int, told: Told) -> None:
    ranks_told = told(ranks)
    seed = ranks_told[0]["seed"]
    assert len(ranks_told) == ranks
    for name, length, dtype in cases(ranks):
        total = ranks_told[0]["sums"][name, length, dtype]
        terms = torch.stack([drawn(seed, rank, length, dtype) for rank in range(ranks)])
        assert total.dtype == dtype and total.shape == (length,)
        if not dtype.is_floating_point:
            assert torch.equal(total, terms.sum(0, dtype=dtype))
            continue
        exact, size = terms.double().sum(0), terms.double().abs().sum(0)
        eps = torch.finfo(dtype).eps
        # A rounding at each addition and one at the end, each of half an eps at most of what is
        # there, which is never more than the sum of the absolute values; fp16 may be subnormal.
        atol = ranks * (eps / 2) * (1 + ranks * eps) * size + ranks * eps * torch.finfo(dtype).tiny
        assert ((total.double() - exact).abs() <= atol).all(), (name, length, dtype)
        if dtype == torch.float64:
            backend = ranks_told[0]["backend"][name, length, dtype]
            assert ((total - backend).abs() <= 2 * atol).all()


@each_ranks
def test_every_rank_has_the_same_bits(ranks: int, told: Told) -> None:
    first, *others = (one["sums"] for one in told(ranks))
    assert set(first) == set(cases(ranks))
    for other in others:
        for case, total in first.items():
            assert torch.equal(total, other[case]), case


def folded(terms: list[Tensor]) -> Tensor:
    """From left to right, every sum rounded to the dtype of the terms."""
    return functools.reduce(lambda total, term: total + term, terms)


@each_ranks
def test_sums_are_taken_in_the_stated_order(ranks: int, told: Told) -> None:
    """To the bit, in a dtype where another order shows."""
    seed = told(ranks)[0]["seed"]
    for dtype in (torch.float32, torch.bfloat16):
        sums = {name: told(ranks)[0]["sums"][name, 1000, dtype] for name in names(ranks)}
        terms = [drawn(seed, rank, 1000, dtype) for rank in range(ranks)]
        by_rank = folded([term.float() for term in terms]).to(dtype)
        assert torch.equal(sums["one_shot"], by_rank)
        assert torch.equal(sums["two_shot"], by_rank)
        parts = [term.tensor_split(ranks) for term in terms]
        around = [
            folded([parts[(part + 1 + hop) % ranks][part] for hop in range(ranks)])
            for part in range(ranks)
        ]
        assert torch.equal(sums["ring"], torch.cat(around))
        if "halving_doubling" in sums:
            while len(terms) > 1:
                half = len(terms) // 2
                terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
            assert torch.equal(sums["halving_doubling"], terms[0])
        if ranks > 2:
            assert not torch.equal(sums["one_shot"], sums["ring"])


@each_ranks
def test_steps_and_bytes_are_the_expected_ones(ranks: int, told: Told) -> None:
    for name, length, dtype in cases(ranks):
        traffics = [one["traffic"][name, length, dtype] for one in told(ranks)]
        by_name = expected(name, ranks, length * dtype.itemsize)
        assert [traffic.steps for traffic in traffics] == [by_name.steps] * ranks
        sent = [traffic.bytes for traffic in traffics]
        assert sum(sent) == pytest.approx(ranks * by_name.bytes, rel=1e-12)
        for size in sent:
            assert abs(size - by_name.bytes) <= 2 * (ranks - 1) * dtype.itemsize
        if length % ranks == 0:
            assert sent == [pytest.approx(by_name.bytes, rel=1e-12)] * ranks
        for traffic in traffics:
            assert traffic.messages == len(traffic.sent) <= by_name.messages
            assert all(size for _, _, size in traffic.sent)
            if length >= ranks:
                assert traffic.messages == by_name.messages


@each_ranks
def test_who_speaks_to_whom(ranks: int, told: Told) -> None:
    for rank, one in enumerate(told(ranks)):
        sent = {name: one["traffic"][name, 1000, torch.float32].sent for name in names(ranks)}
        others = [peer for peer in range(ranks) if peer != rank]
        after = (rank + 1) % ranks
        assert [hop[:2] for hop in sent["ring"]] == [(s, after) for s in range(2 * (ranks - 1))]
        assert [hop[:2] for hop in sent["one_shot"]] == [(0, peer) for peer in others]
        assert [hop[:2] for hop in sent["two_shot"]] == [(s, p) for s in (0, 1) for p in others]
        if ranks == 4:
            peers = [rank ^ distance for distance in (2, 1, 1, 2)]
            assert [hop[1:] for hop in sent["halving_doubling"]] == [
                (peer, size) for peer, size in zip(peers, (2000, 1000, 1000, 2000), strict=True)
            ]


@each_ranks
def test_the_halves_of_the_ring(ranks: int, told: Told) -> None:
    for rank, one in enumerate(told(ranks)):
        for length, (part, whole, traffic) in one["halves"].items():
            total = one["sums"]["ring", length, torch.float32]
            assert torch.equal(part, total.tensor_split(ranks)[rank])
            assert torch.equal(whole, total)
            assert traffic == one["traffic"]["ring", length, torch.float32]  # adds up


@each_ranks
def test_any_shape_and_no_gradient(ranks: int, told: Told) -> None:
    assert [one["shapes"] for one in told(ranks)] == [[]] * ranks


@each_ranks
def test_what_is_refused_says_why(ranks: int, told: Told) -> None:
    for rank, one in enumerate(told(ranks)):
        problem = one["refused"]
        assert "must hold numbers, got torch.bool; convert it" in problem["bool"]
        assert "tensor must be a torch.Tensor, got list" in problem["list"]
        assert f"part must have 3 elements on rank {rank} of {ranks}" in problem["part"]
        assert "got 4; pass part" in problem["part"]
        if ranks in (3, 5):
            assert f"a power of two, got {ranks}; use 'ring'" in problem["odd"]
        else:
            assert "odd" not in problem


def test_a_group_inside_the_group(told: Told) -> None:
    for rank, one in enumerate(told(4)):
        for total in one["groups"].values():
            if rank in (1, 3):
                assert total == [4, 6, 8]
            else:
                assert f"got one without rank {rank}" in total


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_process_alone_gets_a_copy(name: str) -> None:
    own, traffic = torch.arange(6.0).view(2, 3), CollectiveTraffic()
    total = ALL_REDUCES[name](own, traffic=traffic)
    assert torch.equal(total, own) and total.data_ptr() != own.data_ptr()
    assert traffic.bytes == traffic.messages == 0 == traffic.steps == expected(name, 1, 24).steps


def test_expected_is_the_table() -> None:
    """For 4 ranks and 1,000 bytes, and for 8."""
    table = {
        "ring": ((6, 6, 1500, 750), (14, 14, 1750, 875)),
        "halving_doubling": ((4, 4, 1500, 750), (6, 6, 1750, 875)),
        "one_shot": ((1, 3, 3000, 3000), (1, 7, 7000, 7000)),
        "two_shot": ((2, 6, 1500, 750), (2, 14, 1750, 875)),
    }
    assert list(table) == list(ALL_REDUCES)
    for name, rows in table.items():
        for ranks, row in zip((4, 8), rows, strict=True):
            found = expected(name, ranks, 1000)
            assert (found.steps, found.messages, found.bytes, found.summed) == row
    assert [fn.__name__ for fn in (ring, halving_doubling, one_shot, two_shot)] == list(table)


def test_expected_refuses() -> None:
    with pytest.raises(ValueError, match="name must be one of 'ring', .* did you mean 'ring'"):
        expected("rings", 4, 1000)
    with pytest.raises(ValueError, match="power of two, got 6; use 'ring' or 'two_shot'"):
        expected("halving_doubling", 6, 1000)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        expected("ring", 0, 1000)
    with pytest.raises(ValueError, match="nbytes must be a finite number, at least 0, got -1"):
        expected("ring", 2, -1)
