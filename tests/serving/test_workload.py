"""Arrivals and lengths by their laws, and requests that carry what was asked for."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest

from labcore.serving.simulation.workload import (
    Workload,
    bursts,
    fixed,
    lognormal,
    long_tail,
    poisson,
    recorded,
)


def deviations(values: list[float], mean: float, deviation: float) -> float:
    """How many standard errors the values' mean lies from the law's."""
    return abs(statistics.fmean(values) - mean) / (deviation / math.sqrt(len(values)))


@pytest.mark.parametrize("rate", [0.03, 7.0, 4000.0])
def test_poisson_gaps_are_exponential(rate: float, seed: int) -> None:
    times = poisson(rate, 4001, seed)
    gaps = [two - one for one, two in pairwise((0.0, *times))]
    assert min(gaps) >= 0 and len(times) == 4001
    # Five standard errors: a false alarm in 1.7 million draws of either.
    assert deviations(gaps, 1 / rate, 1 / rate) < 5
    above = [float(gap > 1 / rate) for gap in gaps]
    assert deviations(above, math.exp(-1), math.sqrt(math.exp(-1) * (1 - math.exp(-1)))) < 5


@pytest.mark.parametrize(("size", "n"), [(1, 5), (4, 12), (5, 13), (7, 3)])
def test_bursts_come_together(size: int, n: int, seed: int) -> None:
    times = bursts(3.0, n, seed, size=size)
    assert len(times) == n and list(times) == sorted(times)
    groups = [times[at : at + size] for at in range(0, n, size)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(set(times)) == -(-n // size)
    spread = bursts(3.0, n, seed, size=size, within=0.25)
    assert list(spread) == sorted(spread) and len(set(spread)) == n
    starts = sorted(set(times))
    assert all(any(0 <= time - start <= 0.25 for start in starts) for time in spread)


def test_bursts_keep_the_rate(seed: int) -> None:
    rate, n, size = 11.0, 6000, 6
    last = bursts(rate, n, seed, size=size)[-1]
    expected, deviation = n / rate, math.sqrt(n // size) * size / rate
    assert abs(last - expected) < 5 * deviation


def test_a_log_is_shifted_and_played_faster(seed: int) -> None:
    dice = random.Random(seed)
    times = sorted(dice.uniform(-5, 1e6) for _ in range(37))
    played = recorded(times, speed=2.5)
    assert played[0] == 0
    assert played == pytest.approx([(time - times[0]) / 2.5 for time in times])
    assert recorded([3.5]) == (0.0,)
    with pytest.raises(ValueError, match=r"times .* got 1\.0 after 2\.0"):
        recorded([0.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="at least one arrival"):
        recorded([])
    with pytest.raises(ValueError, match="finite"):
        recorded([0.0, math.nan])


def test_lengths_follow_their_laws(seed: int) -> None:
    assert fixed(9, 3) == (9, 9, 9)
    n = 4000
    drawn = lognormal(120.5, n, seed, sigma=0.8, most=10**9)
    logs = [math.log(length) for length in drawn]
    assert deviations(logs, math.log(120.5), 0.8) < 5.5  # rounding adds a little
    assert statistics.pstdev(logs) == pytest.approx(0.8, rel=0.1)

    least, most = 16, 2048
    tailed = long_tail(least, n, seed, most=most)
    assert least <= min(tailed) and max(tailed) <= most
    for edge in (24.5, 60.5, 300.5):
        chance = (least / edge - least / most) / (1 - least / most)
        above = [float(length > edge) for length in tailed]
        assert deviations(above, chance, math.sqrt(chance * (1 - chance))) < 5
    assert statistics.fmean(tailed) > 2 * statistics.median(tailed)
    heavy = long_tail(16, n, seed, tail=0.5, most=40)
    chance = (math.sqrt(16 / 28.5) - math.sqrt(16 / 40)) / (1 - math.sqrt(16 / 40))
    above = [float(length > 28.5) for length in heavy]
    assert deviations(above, chance, math.sqrt(chance * (1 - chance))) < 5


@pytest.mark.parametrize(("least", "most"), [(1, 1), (3, 5), (7, 7)])
def test_lengths_stay_within_their_bounds(least: int, most: int, seed: int) -> None:
    for drawn in (
        lognormal(4, 200, seed, sigma=3.0, least=least, most=most),
        long_tail(least, 200, seed, tail=0.3, most=most),
    ):
        assert least <= min(drawn) and max(drawn) <= most
        assert all(isinstance(length, int) for length in drawn)
    with pytest.raises(ValueError, match="most must be at least"):
        long_tail(most + 1, 2, seed, most=most)


def test_a_seed_draws_the_same_and_another_does_not(seed: int) -> None:
    for draw in (
        lambda s: poisson(2.0, 50, s),
        lambda s: bursts(2.0, 50, s, within=1.0),
        lambda s: lognormal(300, 50, s),
        lambda s: long_tail(10, 50, s),
        lambda s: Workload(fixed(1, 5), fixed(20, 5), fixed(3, 5), seed=s).requests(),
    ):
        assert draw(seed) == draw(seed) != draw(seed + 1)


def test_requests_carry_the_workload(seed: int) -> None:
    n = 23
    work = Workload(
        poisson(5.0, n, seed),
        lognormal(9, n, seed),
        long_tail(2, n, seed, most=99),
        prefix=7,
        groups=3,
        vocabulary=50,
        seed=seed,
        priorities=tuple(range(n)),
        patience=1.5,
        max_tokens=120,
    )
    requests = work.requests()
    assert len(requests) == len(work) == n
    assert [len(one.prompt) for one in requests] == list(work.prompts)
    assert [one.arrival for one in requests] == list(work.arrivals)
    assert [one.priority for one in requests] == list(range(n))
    assert [one.deadline for one in requests] == [time + 1.5 for time in work.arrivals]
    assert {one.sampling.max_tokens for one in requests} == {120}
    assert [work.lengths[one.id] for one in requests] == list(work.outputs)
    assert len({one.sampling.seed for one in requests}) == n
    assert all(0 <= token < 50 for one in requests for token in one.prompt)
    known = Workload(work.arrivals, work.prompts, work.outputs).requests()
    assert [one.sampling.max_tokens for one in known] == list(work.outputs)
    assert all(one.deadline is None and one.priority == 0 for one in known)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_prompts_of_a_group_share_their_prefix_and_no_more(groups: int, seed: int) -> None:
    n, prefix = 40, 33
    work = Workload(
        fixed(1, n),
        lognormal(40, n, seed, sigma=0.6),
        fixed(1, n),
        prefix=prefix,
        groups=groups,
        vocabulary=10**12,
        seed=seed,
    )
    prompts = [one.prompt for one in work.requests()]
    heads: dict[int, tuple[int, ...]] = {}
    for number, prompt in enumerate(prompts):
        shared = min(prefix, len(prompt) - 1)
        head = heads.setdefault(work.group(number), ())
        longer = max(head, prompt[:shared], key=len)
        assert longer[: min(len(head), shared)] == prompt[: min(len(head), shared)]
        heads[work.group(number)] = longer
    assert len({head[:1] for head in heads.values()}) == len(heads) <= groups
    # With so many tokens two own parts begin alike once in a thousand million runs.
    own = [prompt[min(prefix, len(prompt) - 1) :][0] for prompt in prompts]
    assert len(set(own)) == n


def test_only_a_share_of_the_prompts_has_the_prefix(seed: int) -> None:
    n, prefix = 400, 12
    made = {}
    for sharing in (0.0, 0.25, 0.7, 1.0):
        work = Workload(
            fixed(1, n), fixed(20, n), fixed(1, n), prefix=prefix, sharing=sharing,
            vocabulary=10**6, seed=seed,
        )  # fmt: skip
        prompts = [one.prompt for one in work.requests()]
        head = max((one[:prefix] for one in prompts), key=[p[:prefix] for p in prompts].count)
        made[sharing] = {at for at, one in enumerate(prompts) if one[:prefix] == head}
        assert made[sharing] == {at for at in range(n) if work.shares(at)} or not sharing
        # Six standard deviations of a share of n.
        assert abs(sum(map(work.shares, range(n))) / n - sharing) < 3 / n**0.5 + 1e-9
    assert made[0.25] < made[0.7] < made[1.0] == set(range(n))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharing": 1.5}, "sharing must be between 0 and 1, got 1.5"),
        ({"prompts": (1,)}, "prompts must have one entry for each of 2 arrivals, got 1"),
        ({"outputs": (1, 2, 3)}, "outputs must have one entry"),
        ({"outputs": (1, 0)}, "outputs must be at least 1, got 0"),
        ({"arrivals": (1.0, 0.5)}, "arrivals must be in order"),
        ({"arrivals": (-1.0, 0.5)}, "arrivals must be a finite number, at least 0"),
        ({"priorities": (1,)}, "priorities must have one entry"),
        ({"max_tokens": 4}, "at least the longest output, 5, got 4"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"prefix": -1}, "prefix must be at least 1"),
        ({"patience": 0.0}, "patience must be a finite number above 0"),
    ],
)
def test_what_is_no_workload_is_refused(changes: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"arrivals": (0.0, 1.0), "prompts": (3, 4), "outputs": (5, 1)}
    with pytest.raises(ValueError, match=message):
        Workload(**{**fields, **changes})  # type: ignore[arg-type]
