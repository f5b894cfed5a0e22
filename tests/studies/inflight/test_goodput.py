"""Goodput counts requests that meet both limits, and separation has its own limits."""

from __future__ import annotations

import random

from labcore.serving.metrics import RequestMetrics, goodput
from labcore.studies.inflight import goodput as study
from labcore.studies.inflight.goodput import Times, attained, best


def test_attainment_counts_those_that_meet_both(seed: int) -> None:
    chance = random.Random(seed)
    pairs = [(chance.random(), chance.random()) for _ in range(50)]
    times = Times(*map(tuple, zip(*pairs, strict=True)))
    for limits in ((0.5, 0.5), (1.0, 0.2), (0.0, 1.0)):
        met = sum(a <= limits[0] and b <= limits[1] for a, b in pairs)
        assert attained(times, ttft=limits[0], tpot=limits[1]) == met / 50


def test_goodput_ends_at_the_first_load_that_misses_the_goal() -> None:
    good, bad = Times((0.1,) * 10, (0.1,) * 10), Times((0.1,) * 8 + (9.0, 9.0), (0.1,) * 10)
    assert best({1: good, 2: good, 3: bad, 4: good}, ttft=1, tpot=1) == 2
    assert best({1: bad}, ttft=1, tpot=1) == 0


def test_a_run_has_the_times_of_its_requests() -> None:
    """The share of a light run is what the server's own goodput says."""
    run = study._run("together, whole prompts", 128, 2, 0.0, study.COST)
    assert len(run.ttft) == len(run.tpot) == 60 and min(run.ttft) > 0
    assert attained(run, ttft=10, tpot=10) == 1
    assert goodput([], ttft=1, tpot=1) == 0


def test_a_dear_transfer_costs_time_between_tokens() -> None:
    near, far = (study._run("apart", 512, 4, seconds, study.COST) for seconds in (0.0, 1e-4))
    assert near.ttft == far.ttft
    assert sum(far.tpot) > sum(near.tpot)


def test_separation_and_chunks_gain_and_lose_where_the_chapter_says() -> None:
    data = study.sweep()

    def goodputs(prompt: int, ttft: float, tpot: float, transfer: int) -> list[float]:
        limits = {"ttft": ttft, "tpot": tpot}
        return [best(data[way, prompt, transfer], **limits) for way in study.WAYS]

    whole, chunks, apart = goodputs(512, 1.0, 0.012, 10)
    assert whole < chunks < apart
    whole, chunks, apart = goodputs(512, 0.3, 0.02, 10)
    assert whole > chunks > apart
    # A slow link's time counts as time per token: it decides only where the limit is strict.
    whole, chunks, apart = goodputs(512, 1.0, 0.008, 10)
    assert apart > max(whole, chunks) > 0 == goodputs(512, 1.0, 0.008, 100)[-1]
    for tpot in (0.012, 0.02):
        assert goodputs(512, 1.0, tpot, 100) == goodputs(512, 1.0, tpot, 10)
    for ttft in (0.3, 1.0):
        for tpot in (0.008, 0.012):
            assert len(set(goodputs(128, ttft, tpot, 10))) == 1
        whole, chunks, apart = goodputs(128, ttft, 0.02, 10)
        assert apart < whole == chunks == study.RATES[-1]


def test_who_never_got_a_token_meets_no_limit() -> None:
    metrics = [
        RequestMetrics(id="a", prompt=1, output=1, finish="length", arrival=0.0, ttft=0.1),
        RequestMetrics(id="b", prompt=1, output=0, finish="deadline", arrival=0.0),
    ]
    assert attained(Times.of(metrics), ttft=1e9, tpot=1e9) == 0.5
