"""A simulated server keeps the laws of queues, loses no token, and tells the policies apart."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.plan import StepPlan
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import (
    CACHED,
    FREE,
    QUEUE_FULL,
    SHARED,
    Run,
    Simulator,
    bootstrap,
    simulate,
)
from labcore.serving.simulation.workload import (
    Workload,
    bursts,
    fixed,
    lognormal,
    long_tail,
    poisson,
    recorded,
)
from labcore.studies.inflight.gantt import KINDS, Span, busy, timeline
from tests.serving.invariants import check

COST = CostModel(base=0.01, per_prefill_token=1e-4, per_decode_row=5e-4, per_context_token=1e-6)


class Made:
    """A factory of schedulers that keeps the last one, to look at afterwards."""

    def __init__(self, num_blocks: int = 60, block_size: int = 4, **options: object) -> None:
        self.num_blocks, self.block_size, self.options = num_blocks, block_size, options
        self.last: Scheduler | None = None

    def __call__(self) -> Scheduler:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 24, **self.options}
        self.last = Scheduler(BlockPool(self.num_blocks, self.block_size), **options)  # type: ignore[arg-type]
        return self.last

    def check_all_is_back(self) -> None:
        assert self.last is not None
        check(self.last)
        assert self.last.pool.held == 0 and not self.last.states


def mixed(seed: int, n: int = 40, rate: float = 12.0, **options: object) -> Workload:
    prompts = lognormal(14, n, seed, most=60)
    outputs = long_tail(2, n, seed + 1, most=70)
    return Workload(poisson(rate, n, seed), prompts, outputs, seed=seed, **options)  # type: ignore[arg-type]


def by_request(run: Run) -> dict[str, list[Span]]:
    bars: dict[str, list[Span]] = defaultdict(list)
    for span in timeline(run):
        bars[span.id].append(span)
    return bars


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [False, True])
def test_no_token_is_lost_or_made_up(policy: str, share: bool, seed: int) -> None:
    work = mixed(seed, prefix=9, groups=2, max_tokens=80)
    made = Made(num_blocks=38, policy=policy, enable_prefix_caching=share)
    run = simulate(work, made, COST)
    made.check_all_is_back()
    assert {one.id: one.output for one in run.metrics} == work.lengths
    assert [one.prompt for one in run.metrics] == list(work.prompts)
    assert run.output_tokens == sum(work.outputs) == sum(step.emitted for step in run.steps)
    read: dict[str, int] = defaultdict(int)
    for step in run.steps:
        for chunk in step.chunks:
            read[chunk.id] += chunk.count
        for decode in step.decodes:
            read[decode.id] += 1
        assert step.tokens == sum(c.count for c in step.chunks) + len(step.decodes)
        assert step.free + step.held + step.cached == run.num_blocks == 38
    for one in run.metrics:
        assert one.finish == ("length" if one.output == 80 else "eos")
        needed = one.prompt + one.output - 1  # the last token is never read
        if not share:
            assert one.cached == 0 and read[one.id] == needed + one.recomputed
        elif not one.preemptions:
            assert read[one.id] == needed - one.cached
        assert bool(one.recomputed) <= bool(one.preemptions)
    assert read == {id: sum(bar.tokens for bar in bars) for id, bars in by_request(run).items()}
    if POLICIES[policy].promises:
        assert not any(one.preemptions for one in run.metrics)


def test_a_small_pool_preempts_and_a_shared_prefix_is_found(seed: int) -> None:
    """Otherwise the law above would say nothing about either."""
    n = 24
    work = Workload(fixed(1, n), fixed(17, n), fixed(40, n), prefix=13, seed=seed)
    work = Workload(recorded([0.0] * n), work.prompts, work.outputs, prefix=13, seed=seed)
    run = simulate(work, Made(num_blocks=32, policy="max_utilization"), COST)
    assert sum(one.preemptions for one in run.metrics) > 0
    assert sum(one.recomputed for one in run.metrics) > 0
    assert sum(one.cached for one in run.metrics) > 0
    assert {span.kind for span in timeline(run)} >= {"waiting", "prefill", "recompute", "decode"}


def test_preempted_requests_own_cached_blocks_are_not_counted(seed: int) -> None:
    n = 24
    work = Workload(recorded([0.0] * n), fixed(17, n), fixed(40, n), seed=seed)
    run = simulate(work, Made(num_blocks=32, policy="max_utilization"), COST)
    assert sum(one.preemptions for one in run.metrics) > 0
    assert not any(one.cached for one in run.metrics)  # no two prompts begin alike


def test_the_same_arguments_give_the_same_run(seed: int) -> None:
    work = mixed(seed, prefix=5)
    noise = {"residuals": (-0.3, 0.0, 0.4), "blocks": True}
    runs = [
        simulate(work, Made(num_blocks=40), COST, seed=s, **noise) for s in (seed, seed, seed + 1)
    ]  # type: ignore[arg-type]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_bars_fill_a_requests_time_and_never_overlap_in_a_slot(policy: str, seed: int) -> None:
    work = mixed(seed, rate=40.0, patience=1.0)
    run = simulate(work, Made(num_blocks=34, policy=policy), COST)
    bars = by_request(run)
    for one in run.metrics:
        assert one.e2e is not None
        own = [bar for bar in bars[one.id] if bar.kind != "idle"]
        assert own[0].begin == one.arrival
        assert own[-1].end == pytest.approx(one.arrival + one.e2e, abs=1e-9)
        assert all(a.end == b.begin for a, b in pairwise(own))
        assert all(bar.kind in KINDS and bar.begin < bar.end for bar in own)
        assert all((bar.slot == -1) == (bar.kind == "waiting") for bar in own)
    rows: dict[int, list[Span]] = defaultdict(list)
    for span in timeline(run):
        if span.slot >= 0:
            rows[span.slot].append(span)
    assert set(rows) == set(range(run.slots))
    for row in rows.values():
        assert all(a.end <= b.begin for a, b in pairwise(row))
    assert ("idle" in {span.kind for span in timeline(run)}) == (policy == "static")
    assert 0 < busy(run) <= 1


def test_a_static_batch_waits_for_its_slowest(seed: int) -> None:
    work = mixed(seed, rate=1000.0)
    run = simulate(work, Made(num_blocks=200, policy="static"), COST)
    batches = [step.admitted for step in run.steps if step.admitted]
    ends = {one.id: one.arrival + one.e2e for one in run.metrics if one.e2e is not None}
    begins = {one.id: one.arrival + one.queue for one in run.metrics if one.queue is not None}
    assert len(batches) >= 10 and sum(map(len, batches)) == len(work)
    for before, after in pairwise(batches):
        assert min(begins[id] for id in after) >= max(ends[id] for id in before) - 1e-9
    # A row that ended keeps its slot, idle, until the last of its batch has ended.
    idle = {span.id: span for span in timeline(run) if span.kind == "idle"}
    for batch in batches:
        last = max(ends[id] for id in batch)
        for id in batch:
            if ends[id] < last - 1e-9:
                assert idle[id].begin == pytest.approx(ends[id])
                assert idle[id].end == pytest.approx(last)
            else:
                assert id not in idle


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_in_flight_admits_while_others_run_and_ends_sooner(policy: str, seed: int) -> None:
    work = mixed(seed, rate=1000.0)
    static = simulate(work, Made(num_blocks=200, policy="static"), COST)
    flight = simulate(work, Made(num_blocks=200, policy=policy), COST)
    joined = [
        step
        for step in flight.steps
        if step.admitted and len(step.decodes) + len(step.chunks) > len(step.admitted)
    ]
    assert joined
    assert flight.seconds < static.seconds and busy(flight) > busy(static)
    assert flight.tokens_per_second > static.tokens_per_second
    assert flight.requests_per_second == pytest.approx(len(work) / flight.seconds)
    assert flight.summary()["queue"]["mean"] < static.summary()["queue"]["mean"]


@pytest.mark.parametrize("policy", POLICIES)
def test_littles_law_holds(policy: str, seed: int) -> None:
    """Requests inside = arrival rate x time inside: counted by steps, and by requests."""
    run = simulate(mixed(seed, n=60, rate=20.0), Made(policy=policy), COST)
    ends: dict[float, int] = defaultdict(int)
    for one in run.metrics:
        assert one.e2e is not None
        ends[round(one.arrival + one.e2e, 9)] += 1
    inside = math.fsum(
        (step.waiting + step.running + ends[round(step.at + step.seconds, 9)]) * step.seconds
        for step in run.steps
    )
    stayed = math.fsum(one.e2e for one in run.metrics if one.e2e is not None)
    # A request counts from the first step behind its arrival on.
    longest = max(step.seconds for step in run.steps)
    assert 0 <= stayed - inside + 1e-6 <= len(run.metrics) * longest


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_slot_is_the_queue_with_one_server(load: float, seed: int) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services (Pollaczek and Khinchine, 1930)."""
    n, service = 12_000, 0.25
    work = Workload(poisson(load / service, n, seed), fixed(1, n), fixed(1, n), seed=seed)
    made = Made(num_blocks=4, max_num_seqs=1, max_waiting=n)
    run = simulate(work, made, CostModel(base=service))
    waits = [one.queue for one in run.metrics if one.queue is not None]
    assert len(run.steps) == n and all(one.e2e is not None for one in run.metrics)
    wanted = service * load / (2 * (1 - load))
    # Neighbors wait alike, so the error is that of means of long stretches.
    means = [statistics.fmean(waits[at : at + 400]) for at in range(0, n, 400)]
    error = statistics.stdev(means) / math.sqrt(len(means))
    # The error comes from few means, and is too small where their own mean is.
    assert abs(statistics.fmean(means) - wanted) < 8 * error


def test_a_request_is_read_by_no_step_that_began_before_it_came(seed: int) -> None:
    work = mixed(seed)
    run = simulate(work, Made(), COST)
    arrivals = {one.id: one.arrival for one in run.metrics}
    assert all(one.queue is not None and one.queue >= 0 for one in run.metrics)
    for step in run.steps:
        assert all(arrivals[chunk.id] <= step.at for chunk in step.chunks)
    for one, two in pairwise(run.steps):
        assert two.at >= one.at + one.seconds - 1e-9
        began = [one.at + one.seconds, *arrivals.values()]  # at once, or when somebody came
        assert min(abs(two.at - time) for time in began) < 1e-9
    assert run.begin == work.arrivals[0]


def test_waiting_for_a_moment_reaches_it(seed: int) -> None:
    """A sum of floats may fall short of it: a request would then be read before it came."""
    dice = random.Random(seed)
    for _ in range(500):
        idle = Simulator(Made()(), COST)
        for time in (0.1 * dice.random(), dice.uniform(0.2, 1)):
            idle.until(time)
            assert time <= idle.now <= math.nextafter(time, math.inf)


def test_time_is_what_the_cost_model_says(seed: int) -> None:
    dice = random.Random(seed)
    n, prompt, output = 3, 10, dice.randrange(2, 9)
    work = Workload(recorded([0.0] * n), fixed(prompt, n), fixed(output, n), seed=seed)
    run = simulate(work, Made(max_num_seqs=4, max_num_batched_tokens=64), COST)
    first = COST.base + n * prompt * (COST.per_prefill_token + COST.per_context_token)
    later = sum(
        COST.base + n * (COST.per_decode_row + (prompt + done) * COST.per_context_token)
        for done in range(1, output)
    )
    assert run.seconds == pytest.approx(first + later)
    for one in run.metrics:
        assert one.queue == 0 and one.ttft == pytest.approx(first)
        assert one.tpot == pytest.approx(later / (output - 1))
    slower = simulate(work, Made(max_num_seqs=4, max_num_batched_tokens=64), COST, residuals=(0.5,))
    assert slower.seconds == pytest.approx(1.5 * run.seconds)


def test_rejected_and_late_requests_are_told_and_leak_nothing(seed: int) -> None:
    n = 60
    made = Made(num_blocks=30, max_num_seqs=3, max_waiting=5)
    work = Workload(
        bursts(30.0, n, seed, size=20),
        lognormal(14, n, seed, most=60),
        (60, *long_tail(4, n - 1, seed, most=60)),  # the first needs over 0.6 s
        max_tokens=60,
        patience=0.4,
        seed=seed,
    )
    huge = Request(id="huge", prompt=(1,) * 119, sampling=SamplingConfig(max_tokens=3))
    run = simulate([*work.requests(), huge], made, COST, lengths=work.lengths, blocks=True)
    made.check_all_is_back()
    told = {one.id: one for one in run.metrics}
    assert len(told) == n + 1 and told["huge"].finish == "refused"
    finishes = {one.finish for one in told.values()}
    assert (
        {QUEUE_FULL, "deadline"} <= finishes <= {QUEUE_FULL, "deadline", "eos", "length", "refused"}
    )
    for id, one in told.items():
        if one.finish in ("eos", "length"):
            assert one.output == work.lengths[id]
        if one.finish == "deadline":
            assert one.e2e is not None and one.e2e >= 0.4 - 1e-9
            assert one.output < work.lengths[id]
        if one.finish == QUEUE_FULL:
            assert one.output == 0 and one.queue is None and one.e2e is None
    counts = [one.finish in ("eos", "length") for one in told.values()]
    assert run.requests_per_second == pytest.approx(sum(counts) / run.seconds)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_block_map_shows_who_holds_what(policy: str, seed: int) -> None:
    work = mixed(seed, rate=50.0)
    made = Made(num_blocks=36, policy=policy, enable_prefix_caching=False)
    run = simulate(work, made, COST, blocks=True)
    assert len(run.blocks) == len(run.steps)
    numbers = {one.id: number for number, one in enumerate(run.metrics)}
    for step, blocks in zip(run.steps, run.blocks, strict=True):
        assert len(blocks) == 36 and not {CACHED, SHARED} & set(blocks)
        reads = {c.id: c.count for c in step.chunks} | {d.id: 1 for d in step.decodes}
        for id, count in reads.items():
            held = sum(owner == numbers[id] for owner in blocks)
            assert held >= blocks_for(step.contexts[id] + count, made.block_size)
    assert any(FREE in blocks for blocks in run.blocks)
    assert len(run.promised) == len(run.steps)
    for blocks, promised in zip(run.blocks, run.promised, strict=True):
        assert 0 <= promised <= blocks.count(FREE)  # a promise is a block that is there
    assert any(run.promised) == POLICIES[policy].promises
    plain = simulate(work, made, COST)
    assert plain.blocks == () and plain.promised == ()


def test_the_block_map_shows_what_is_shared_and_what_is_kept(seed: int) -> None:
    n = 12
    work = Workload(recorded([0.0] * n), fixed(22, n), fixed(6, n), prefix=17, seed=seed)
    run = simulate(work, Made(num_blocks=64), COST, blocks=True)
    seen = {owner for blocks in run.blocks for owner in blocks}
    assert {CACHED, FREE, SHARED} <= seen
    shared = max(sum(owner == SHARED for owner in blocks) for blocks in run.blocks)
    assert shared == 17 // 4


class Hanging(Scheduler):
    def schedule(self, now: float, drafts: object = None) -> StepPlan:
        return StepPlan(step=0)


def test_a_scheduler_that_hangs_is_named() -> None:
    work = Workload((0.0,), (3,), (2,))
    with pytest.raises(RuntimeError, match="must plan work .* got 3 plans without work for 1"):
        simulate(work, lambda: Hanging(BlockPool(8, 4)), COST)


def test_what_is_no_simulation_is_refused() -> None:
    def server(**options: object) -> Simulator:
        return Simulator(Made()(), COST, **options)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="lengths must be at least 1, got 0"):
        server(lengths={"a": 0})
    with pytest.raises(ValueError, match="residuals above -1"):
        server(residuals=(-1.0,))
    one = Request(id="a", prompt=(1, 2), sampling=SamplingConfig(max_tokens=2))
    twice = server()
    assert twice.submit(one)
    with pytest.raises(ValueError, match="ids .* got 'a' again"):
        twice.submit(one)
    empty = server().run()
    assert empty.metrics == () and math.isnan(empty.tokens_per_second)


def test_bootstrap_narrows_with_values_and_widens_with_level(seed: int) -> None:
    dice = random.Random(seed)
    values = [dice.expovariate(1.0) for _ in range(3000)]
    draw: Callable[..., tuple[float, float]] = bootstrap
    low, high = draw(values, 0.5, seed=seed)
    assert min(values) < low < statistics.median(values) < high < max(values)
    # The median of n exponentials has deviation 1 / sqrt(n): 4 of them are the 95 % interval.
    assert 2 / math.sqrt(3000) < high - low < 8 / math.sqrt(3000)
    few = draw(values[:60], 0.5, seed=seed)
    sure = draw(values, 0.5, seed=seed, level=0.999)
    assert few[1] - few[0] > high - low and sure[0] < low and sure[1] > high
    assert draw(values, 0.5, seed=seed) == (low, high)
    assert draw([2.5], 0.99) == (2.5, 2.5)
    with pytest.raises(ValueError, match="at least one number"):
        bootstrap([], 0.5)
