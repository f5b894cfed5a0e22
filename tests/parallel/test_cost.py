"""Times by alpha and beta, where algorithms cross, and a fit that finds what was planted."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import scipy.optimize
import torch.distributed as dist

from labcore import processes
from labcore.parallel import cost
from labcore.parallel.collectives import ALL_REDUCES, expected
from labcore.parallel.cost import (
    LINKS,
    AlphaBetaFit,
    Link,
    all_reduce_seconds,
    crossover,
    fit_alpha_beta,
    measure_all_reduce,
    time_all_reduce,
)

SIZES = [2**power for power in range(6, 27, 2)]


def drawn_link(dice: random.Random) -> Link:
    alpha, beta = 10 ** dice.uniform(-7, -3), 10 ** dice.uniform(-12, -8)
    return Link(name="drawn", alpha=alpha, beta=beta, source="a test")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_seconds_are_those_of_the_formulas(ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    link, n, gamma = drawn_link(dice), dice.randrange(1, 10**8), 1e-10 * dice.random()
    a, b, others, share = link.alpha, link.beta, ranks - 1, n * (ranks - 1) / ranks
    written = {
        "ring": 2 * others * (a + n / ranks * b) + share * gamma,
        "one_shot": (a + others * n * b) * (ranks > 1) + others * n * gamma,
        "two_shot": (2 * a + 2 * share * b) * (ranks > 1) + share * gamma,
    }
    if ranks & others == 0:
        halves = [n / 2**step for step in range(1, int(math.log2(ranks)) + 1)]
        written["halving_doubling"] = sum(2 * (a + half * b) + half * gamma for half in halves)
    else:
        with pytest.raises(ValueError, match=f"power of two, got {ranks}"):
            all_reduce_seconds("halving_doubling", ranks, n, link)
    for name, seconds in written.items():
        assert all_reduce_seconds(name, ranks, n, link, gamma) == pytest.approx(seconds, rel=1e-12)
        if ranks == 1:
            assert seconds == 0


def test_more_of_anything_takes_longer(seed: int) -> None:
    dice = random.Random(seed)
    for name in ALL_REDUCES:
        link, n, ranks = drawn_link(dice), dice.randrange(1, 10**8), 2 ** dice.randrange(1, 5)
        plain = all_reduce_seconds(name, ranks, n, link)
        later = Link(name="", alpha=2 * link.alpha, beta=link.beta, source="")
        slower = Link(name="", alpha=link.alpha, beta=2 * link.beta, source="")
        assert all_reduce_seconds(name, ranks, n, later) > plain
        assert all_reduce_seconds(name, ranks, n, slower) > plain
        assert all_reduce_seconds(name, ranks, 2 * n, link) > plain
        assert all_reduce_seconds(name, 2 * ranks, n, link) > plain
        assert all_reduce_seconds(name, ranks, n, link, 1e-9) > plain


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_below_the_crossover_one_is_faster_and_above_the_other(ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    names = [name for name in ALL_REDUCES if name != "halving_doubling" or not ranks & (ranks - 1)]
    for a, b in itertools.permutations(names, 2):
        link, gamma = drawn_link(dice), dice.choice([0.0, 1e-10])

        def apart(n: float, a: str = a, b: str = b, link: Link = link, g: float = gamma) -> float:
            first = all_reduce_seconds(a, ranks, n, link, g)
            return first / all_reduce_seconds(b, ranks, n, link, g) - 1

        where = crossover(a, b, ranks, link, gamma)
        assert where == crossover(b, a, ranks, link, gamma)
        if where == math.inf:
            signs = {math.copysign(1, d) for n in [1, *SIZES, 1e15] if abs(d := apart(n)) > 1e-12}
            assert len(signs) < 2, (a, b)
        else:
            fewer = 1 if expected(a, ranks, 1).steps > expected(b, ranks, 1).steps else -1
            assert abs(apart(where)) < 1e-9
            assert fewer * apart(where / 2) > 0 > fewer * apart(where * 2), (a, b)


def test_crossovers_by_hand() -> None:
    link = Link(name="", alpha=1e-6, beta=1e-9, source="")
    # 6 alpha + 1.5 n beta = alpha + 3 n beta
    assert crossover("ring", "one_shot", 4, link) == pytest.approx(10_000 / 3)
    assert crossover("ring", "two_shot", 4, link) == math.inf
    assert crossover("ring", "ring", 4, link) == math.inf
    assert crossover("one_shot", "two_shot", 2, link) == math.inf  # as many bytes, fewer steps
    free = Link(name="", alpha=0.0, beta=1e-9, source="")
    assert crossover("ring", "one_shot", 4, free) == 0
    endless = Link(name="", alpha=1e-6, beta=0.0, source="")
    assert crossover("ring", "one_shot", 4, endless) == math.inf
    assert endless.bandwidth == math.inf
    with pytest.raises(ValueError, match="power of two, got 3"):
        crossover("ring", "halving_doubling", 3, link)


def test_links_say_where_they_come_from() -> None:
    published = {
        "NVLink 4": 450,
        "NVLink 3": 300,
        "PCIe 5.0 x16": 63.02,
        "PCIe 4.0 x16": 31.51,
        "InfiniBand 400 Gb/s": 50,
        "InfiniBand 100 Gb/s": 12.5,
    }
    assert {name: round(link.bandwidth / 1e9, 2) for name, link in LINKS.items()} == published
    for name, link in LINKS.items():
        assert link.name == name and 1e-7 < link.alpha < 1e-5
        assert f"alpha: {link.alpha * 1e6:g} us" in link.source
        assert f"beta: {link.bandwidth / 1e9:.4g} GB/s" in link.source


def test_a_link_refuses_what_is_no_time() -> None:
    with pytest.raises(ValueError, match="alpha must be a finite number, at least 0, got -1"):
        Link(name="", alpha=-1.0, beta=1e-9, source="")
    with pytest.raises(ValueError, match="beta must be a finite number, at least 0, got inf"):
        Link(name="", alpha=1e-6, beta=math.inf, source="")


def test_the_fit_finds_what_was_planted(seed: int) -> None:
    """With 5 % of noise, where absolute least squares would know nothing of alpha."""
    dice = random.Random(seed)
    for _ in range(50):
        link = drawn_link(dice)
        exact = [link.alpha + link.beta * n for n in SIZES]
        found = fit_alpha_beta(SIZES, exact)
        assert found.alpha == pytest.approx(link.alpha, rel=1e-6)
        assert found.beta == pytest.approx(link.beta, rel=1e-6)
        assert found.worst < 1e-9
    alpha, beta = 1e-4, 1e-9  # of these sizes about half are of alpha, half of beta
    noisy = [(alpha + beta * n) * (1 + 0.05 * dice.gauss(0, 1)) for n in SIZES]
    found = fit_alpha_beta(SIZES, noisy)
    # The standard errors are about 2 % and 3 %: five or more of them are allowed.
    assert found.alpha == pytest.approx(alpha, rel=0.15)
    assert found.beta == pytest.approx(beta, rel=0.2)
    assert found.at(2**20) == pytest.approx(alpha + beta * 2**20, rel=0.15)


def test_the_median_of_repeats_counts(seed: int) -> None:
    dice = random.Random(seed)
    exact = [1e-4 + 1e-9 * n for n in SIZES]
    repeats = [dice.sample([t, t, t, t * 100, t * 0.5], 5) for t in exact]
    assert fit_alpha_beta(SIZES, repeats) == fit_alpha_beta(SIZES, exact)


@pytest.mark.parametrize("kind", ["any", "falling", "bent"])
def test_the_fit_is_the_least_of_what_is_allowed(kind: str, seed: int) -> None:
    """Against a solver of least squares without negative numbers."""
    dice = random.Random(seed)
    for _ in range(20):
        sizes = sorted(dice.sample(range(4, 10**6), dice.randrange(2, 9)))
        times = {
            "any": [10 ** dice.uniform(-5, -2) for _ in sizes],
            "falling": [1 / (n + 1) for n in sizes],
            "bent": [1e-12 * n * n + 1e-9 * n for n in sizes],
        }[kind]
        found = fit_alpha_beta(sizes, times)
        rows = numpy.array([[1 / t, n / 1e6 / t] for n, t in zip(sizes, times, strict=True)])
        best, off = scipy.optimize.nnls(rows, numpy.ones(len(sizes)))
        assert min(found.alpha, found.beta) >= 0
        squares = sum(residual**2 for residual in found.residuals)
        assert squares == pytest.approx(off**2, rel=1e-6, abs=1e-12)
        assert found.alpha == pytest.approx(best[0], rel=1e-5, abs=1e-9)
        assert found.beta == pytest.approx(best[1] / 1e6, rel=1e-5, abs=1e-15)
        if kind == "falling":
            assert found.beta == 0 < found.alpha
        if kind == "bent":
            assert found.alpha == 0 < found.beta


def test_residuals_are_measured_minus_fitted() -> None:
    found = fit_alpha_beta([10, 20], [1.0, 2.0])
    assert (found.alpha, found.beta) == (pytest.approx(0, abs=1e-12), pytest.approx(0.1))
    off = fit_alpha_beta([1, 2, 3], [1.0, 1.0, 1.3])
    for size, seconds, residual in zip(off.sizes, off.seconds, off.residuals, strict=True):
        assert residual == pytest.approx((seconds - off.at(size)) / seconds)
    assert off.worst == max(abs(residual) for residual in off.residuals) > 0.01


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_fit_gives_the_link_it_was_measured_on(name: str, ranks: int, seed: int) -> None:
    link = drawn_link(random.Random(seed))
    found = fit_alpha_beta(SIZES, [all_reduce_seconds(name, ranks, n, link) for n in SIZES])
    back = found.link(name, ranks, name="here")
    assert back.name == "here" and name in back.source and f"{ranks} ranks" in back.source
    for n in (0, 1000, 10**9):
        assert all_reduce_seconds(name, ranks, n, back) == pytest.approx(found.at(n))
    assert back.beta == pytest.approx(link.beta, rel=1e-4)


def test_the_fit_refuses() -> None:
    for sizes, seconds, why in (
        ([8], [1.0], "sizes .* two .* got 1 different sizes and 1 times"),
        ([8, 8], [1.0, 2.0], "got 1 different sizes"),
        ([8, 16], [1.0], "got 2 different sizes and 1 times"),
        ([8, 16], [1.0, 0.0], "seconds must be a finite number above 0, got 0"),
        ([-8, 16], [1.0, 2.0], "sizes must be a finite number, at least 0, got -8"),
    ):
        with pytest.raises(ValueError, match=why):
            fit_alpha_beta(sizes, seconds)
    with pytest.raises(ValueError, match="ranks must be at least 2, got 1"):
        AlphaBetaFit(alpha=1.0, beta=1.0, sizes=(1,), seconds=(1.0,), residuals=(0.0,)).link(
            "ring", 1
        )


def strangers() -> str:
    """What a rank is told that times a group of others."""
    first = dist.new_group([0])
    try:
        return str(list(time_all_reduce([4], repeats=1, group=first)))
    except ValueError as problem:
        return str(problem)


def test_a_group_of_others_is_not_timed() -> None:
    member, stranger = processes.run(strangers, 2)
    assert member == "[4]"
    assert "got one without rank 1" in stranger


def with_clocks(sizes: list[int]) -> tuple[dict[int, list[float]], dict[str, list[float]], int]:
    """On rank r each look at the clock comes r + 1 seconds after the last, so a call takes that."""
    rank, _ = processes.rank_and_world()
    looked = itertools.count(0, rank + 1)
    cost.time = SimpleNamespace(perf_counter=lambda: next(looked))  # type: ignore[assignment]
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in "abc"}
    told = cost.in_rounds(calls, repeats=4, warmup=2)
    rounds = [sorted(called[at : at + 3]) for at in range(0, len(called), 3)]
    assert rounds == [["a", "b", "c"]] * 6  # each round has each call once
    assert len({tuple(called[at : at + 3]) for at in range(0, 18, 3)}) > 1  # in changing orders
    order = sum(ord(name) * 7**at for at, name in enumerate(called))
    return time_all_reduce(sizes, algorithm="two_shot", repeats=2), told, order


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    told = processes.run(with_clocks, 3, [4, 4004])
    assert len({order for *_, order in told}) == 1  # ranks that call in other orders would hang
    for by_size, by_name, _ in told:
        assert by_size == {4: [3.0, 3.0], 4004: [3.0, 3.0]}
        assert by_name == {name: [3.0] * 4 for name in "abc"}


def test_measured_times_can_be_fitted() -> None:
    sizes = [4, 1000, 40_000]
    for algorithm in ("backend", "ring"):
        told = measure_all_reduce(2, sizes, algorithm=algorithm, repeats=3)
        assert list(told) == sizes and all(len(times) == 3 for times in told.values())
        found = fit_alpha_beta(list(told), list(told.values()))
        assert found.seconds == tuple(statistics.median(times) for times in told.values())
        assert all(one > 0 for one in found.seconds) and found.alpha + found.beta > 0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of 'backend', 'ring'"):
        measure_all_reduce(2, [4], algorithm="tree")
    with pytest.raises(ValueError, match="power of two, got 3"):
        measure_all_reduce(3, [4], algorithm="halving_doubling")
    # Of many processes too the caller is told, and not by one that failed.
    for measured in (time_all_reduce, partial(measure_all_reduce, 2)):
        for sizes, why in (
            ([6], "sizes must be multiples of 4, .* got 6; pass 8"),
            ([0], "sizes must be at least 1, got 0; pass bytes"),
            ([], "at least one size, got none"),
        ):
            with pytest.raises(ValueError, match=why):
                measured(sizes)
        with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
            measured([4], repeats=0)
