"""Replicas behind a router: nothing is lost, and each policy does what its name says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.router import (
    ROUTERS,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    route_requests,
)
from labcore.serving.simulation.simulate import Simulator, simulate
from labcore.serving.simulation.workload import (
    Workload,
    bursts,
    fixed,
    lognormal,
    long_tail,
    poisson,
    recorded,
)

COST = CostModel(base=0.01, per_prefill_token=2e-4, per_decode_row=5e-4)


def server() -> Scheduler:
    return Scheduler(BlockPool(96, 4), max_num_seqs=4, max_num_batched_tokens=32, max_waiting=1000)


def mixed(seed: int, n: int = 60, rate: float = 25.0, **options: object) -> Workload:
    prompts = lognormal(30, n, seed, sigma=0.5, most=90)
    outputs = long_tail(2, n, seed, most=60)
    return Workload(poisson(rate, n, seed), prompts, outputs, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ROUTERS)
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_every_request_is_served_by_one_replica(policy: str, replicas: int, seed: int) -> None:
    work = mixed(seed, prefix=12, groups=3)
    told = route_requests(work, replicas, server, COST, policy=policy)
    assert len(told.runs) == replicas and sum(told.counts) == len(work)
    for place, run in enumerate(told.runs):
        assert all(told.assigned[one.id] == place for one in run.metrics)
        assert len(run.metrics) == told.counts[place]
    assert {one.id: one.output for one in told.metrics} == work.lengths
    assert [one.arrival for one in told.metrics] == list(work.arrivals)
    ends = [one.arrival + one.e2e for one in told.metrics if one.e2e is not None]
    assert told.seconds == pytest.approx(max(ends) - work.arrivals[0])
    assert told.tokens_per_second == pytest.approx(sum(work.outputs) / told.seconds)
    assert told.summary()["e2e"]["n"] == len(work)
    assert told == route_requests(work, replicas, server, COST, policy=policy)


@pytest.mark.parametrize("policy", ROUTERS)
def test_one_replica_is_one_server(policy: str, seed: int) -> None:
    work = mixed(seed, prefix=9)
    noise = (-0.2, 0.1)
    alone = simulate(work, server, COST, residuals=noise, seed=seed)
    assert route_requests(
        work, 1, server, COST, policy=policy, residuals=noise, seed=seed
    ).runs == (alone,)


@pytest.mark.parametrize(("n", "replicas"), [(7, 2), (12, 3), (13, 4), (3, 5)])
def test_round_robin_sends_each_the_same_number(n: int, replicas: int, seed: int) -> None:
    told = route_requests(mixed(seed, n=n), replicas, server, COST)
    assert list(told.assigned.values()) == [place % replicas for place in range(n)]
    assert max(told.counts) - min(told.counts) <= 1


class Watched:
    """A router that notes the loads at each of another's choices."""

    def __init__(self, router: LeastLoaded | PrefixAware | RoundRobin) -> None:
        self.router = router
        self.seen: list[tuple[list[int], int]] = []

    def choose(self, request: Request, replicas: Sequence[Simulator]) -> int:
        loads = [replica.outstanding for replica in replicas]
        assert all(replica.now >= request.arrival for replica in replicas)
        chosen = self.router.choose(request, replicas)
        self.seen.append((loads, chosen))
        return chosen


def test_least_loaded_takes_the_shortest_queue(seed: int) -> None:
    watched = Watched(LeastLoaded())
    route_requests(mixed(seed, rate=60.0), 3, server, COST, policy=watched)
    assert all(loads[chosen] == min(loads) for loads, chosen in watched.seen)
    assert any(len(set(loads)) > 1 for loads, _ in watched.seen)


def test_a_slow_replica_is_spared_by_load_and_not_by_turns(seed: int) -> None:
    slow = CostModel(base=0.06, per_prefill_token=1.2e-3, per_decode_row=3e-3)
    work = mixed(seed, n=90, rate=30.0)
    costs = [COST, slow, COST]
    turns = route_requests(work, 3, server, costs)
    load = route_requests(work, 3, server, costs, policy="least_loaded")
    assert turns.counts == (30, 30, 30)
    assert load.counts[1] < 25 < min(load.counts[0], load.counts[2])
    assert load.summary()["e2e"]["mean"] < turns.summary()["e2e"]["mean"]


def test_prefix_aware_finds_more_in_the_caches(seed: int) -> None:
    """Six long prefixes, and pools that hold a few: a replica of its own for each group pays."""
    n = 90
    work = Workload(
        poisson(6.0, n, seed), fixed(76, n), fixed(4, n), prefix=64, groups=6, seed=seed
    )
    told = {name: route_requests(work, 3, server, COST, policy=name) for name in ROUTERS}
    rates = {name: one.hit_rate for name, one in told.items()}
    assert rates["prefix_aware"] > rates["round_robin"] + 0.1
    assert rates["prefix_aware"] > rates["least_loaded"] + 0.1
    reads = {
        name: sum(step.prefill_tokens for run in one.runs for step in run.steps)
        for name, one in told.items()
    }
    assert reads["prefix_aware"] < min(reads["round_robin"], reads["least_loaded"])
    for one in told.values():  # what is found need not be read: with no preemption it adds up
        read = sum(step.prefill_tokens for run in one.runs for step in run.steps)
        assert read + sum(m.cached for m in one.metrics) == sum(work.prompts)


@pytest.mark.parametrize("imbalance", [0, 2, 1000])
def test_hot_prefix_stays_together_as_far_as_imbalance_allows(imbalance: int, seed: int) -> None:
    n = 30
    work = Workload(recorded([0.0] * n), fixed(33, n), fixed(20, n), prefix=24, seed=seed)
    watched = Watched(PrefixAware(imbalance))
    told = route_requests(work, 3, server, COST, policy=watched)
    for loads, chosen in watched.seen:
        assert loads[chosen] <= min(loads) + imbalance
    spread = max(told.counts) - min(told.counts)  # all come at once: none ends in between
    assert spread == n if imbalance == 1000 else spread <= imbalance + 1


def test_what_the_router_remembers_is_bounded(seed: int) -> None:
    router = PrefixAware()
    work = Workload(bursts(50.0, 40, seed), fixed(61, 40), fixed(1, 40), seed=seed)
    route_requests(work, 2, server, COST, policy=router)
    remembered = [len(known) for known in router._known.values()]
    assert len(remembered) == 2 and max(remembered) == 96  # 15 blocks a prompt, about 300 sent
    last = work.requests()[-1].prompt
    dice = random.Random(seed)
    changed = (*last[:-5], *(dice.randrange(2000, 3000) for _ in range(5)))
    twin = Request(id="twin", prompt=changed, sampling=work.requests()[0].sampling)
    servers = [Simulator(server(), COST) for _ in range(2)]
    places = {router.choose(twin, order) for order in itertools.repeat(servers, 3)}
    assert len(places) == 1  # its first 14 blocks were sent there, and are remembered


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning(seed: int) -> None:
    work = Workload(recorded([0.0] * 2), fixed(25, 2), fixed(1, 2), seed=seed)
    one, two = work.requests()

    def small() -> Simulator:
        return Simulator(Scheduler(BlockPool(10, 4)), COST)

    servers, router = [small(), small()], PrefixAware()
    router.choose(one, servers[:1]), router.choose(two, servers[:1])  # 6 blocks each, 10 stay
    # Without a match it would be the other one, which was sent nothing.
    assert router.choose(one, servers) == 0


def test_what_cannot_be_routed_is_refused(seed: int) -> None:
    work = mixed(seed, n=3)
    with pytest.raises(ValueError, match="did you mean 'round_robin'"):
        route_requests(work, 2, server, COST, policy="roundrobin")
    with pytest.raises(ValueError, match="one for each of 2 replicas, got 3"):
        route_requests(work, 2, server, [COST] * 3)
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        route_requests(work, 0, server, COST)
    with pytest.raises(ValueError, match="imbalance must be a whole number, at least 0, got -1"):
        PrefixAware(-1)
