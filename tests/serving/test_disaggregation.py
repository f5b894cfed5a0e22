"""Prompts and outputs on separate replicas: times by hand, and what the separation buys."""

from __future__ import annotations

import functools

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import goodput
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.disaggregation import disaggregate
from labcore.serving.simulation.router import route_requests
from labcore.serving.simulation.workload import Workload, fixed, lognormal, poisson

COST = CostModel(base=1.0, per_prefill_token=0.25, per_decode_row=0.5)


def scheduler() -> Scheduler:
    return Scheduler(BlockPool(400, 16), max_num_batched_tokens=512)


def test_times_of_one_request_by_hand() -> None:
    asked = Request("a", tuple(range(8)), SamplingConfig(max_tokens=4), arrival=2.0)
    (found,) = disaggregate([asked], scheduler, COST, transfer=0.125).metrics
    # 1 + 8 / 4 for the prompt and the first token, 8 / 8 for the transfer, three decodes of 1.5.
    assert (found.ttft, found.e2e, found.output) == (3.0, 3.0 + 1.0 + 4.5, 4)
    assert found.tpot == pytest.approx(5.5 / 3) and found.finish == "length"
    short = Request("b", (1, 2), SamplingConfig(max_tokens=1))
    run = disaggregate([short], scheduler, COST)
    assert run.metrics[0].e2e == run.metrics[0].ttft == 1.5 and run.decode.metrics == ()


def test_every_request_gets_its_imposed_length(seed: int) -> None:
    work = Workload(
        poisson(0.05, 30, seed), lognormal(40, 30, seed, most=200), lognormal(9, 30, seed, most=30)
    )
    run = disaggregate(work, scheduler, COST, prefill=2, decode=2, transfer=1e-3)
    assert {one.id: one.output for one in run.metrics} == dict(work.lengths)
    assert all(one.tpot is None or one.tpot > 0 for one in run.metrics)
    assert [one.arrival for one in run.metrics] == sorted(one.arrival for one in run.metrics)
    with pytest.raises(ValueError, match="transfer must be a finite number, at least 0"):
        disaggregate(work, scheduler, COST, transfer=-1.0)
    for options in ({"policy": "max_utilization"}, {"max_num_batched_tokens": 8}):
        wrong = functools.partial(Scheduler, BlockPool(400, 16), **options)
        with pytest.raises(ValueError, match="a decode replica's scheduler must promise blocks"):
            disaggregate(work, scheduler, COST, decoder=wrong)


def test_outputs_no_longer_wait_for_prompts(seed: int) -> None:
    """At the same number of replicas, long prompts delay no token on a decode replica."""
    n = 60
    work = Workload(poisson(0.02, n, seed), fixed(300, n), fixed(20, n))
    apart = disaggregate(work, scheduler, COST)
    together = route_requests(work, 2, scheduler, COST, policy="least_loaded")
    slowest = [max(one.tpot or 0.0 for one in run.metrics) for run in (apart, together)]
    assert slowest[0] < 0.5 * slowest[1]
    bound = {"ttft": 1e9, "tpot": 1.2 * slowest[0]}
    assert goodput(apart.metrics, **bound) > goodput(together.metrics, **bound)


def test_goodput_counts_what_met_both_bounds() -> None:
    asked = [Request(f"{n}", (1,) * 8, SamplingConfig(max_tokens=2)) for n in range(2)]
    (first, second) = route_requests(asked, 1, scheduler, COST).metrics
    assert first.ttft == second.ttft == 5.0 and first.e2e == 7.0
    assert goodput((first, second), ttft=5.0, tpot=2.0) == pytest.approx(2 / 7)
    assert goodput((first, second), ttft=4.9, tpot=2.0) == 0
    assert goodput((), ttft=1.0, tpot=1.0) == 0
