"""A replay tells what the engine did: the simulator's plans, the clients' waits, its own tokens."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from labcore.decoding import SamplingConfig
from labcore.models import Llama
from labcore.serving.clock import ManualClock
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.replay import Replay, replay
from labcore.serving.simulation.simulate import QUEUE_FULL, Run, simulate
from labcore.serving.simulation.workload import Workload, bursts, long_tail
from labcore.studies.inflight.gantt import timeline
from tests.serving.invariants import check
from tests.serving.tiny import TINY_POOL, tiny

# Fractions that binary has, so that no sum is rounded and no request comes just after a step.
COST = CostModel(base=2**-7, per_prefill_token=2**-10, per_decode_row=2**-9)


@pytest.fixture(scope="module")
def model() -> Llama:
    return tiny(5)


def workload(seed: int, n: int = 20, *, arrivals: Any = None, **more: Any) -> Workload:
    dice = random.Random(f"replay {seed}")
    return Workload(
        arrivals=(0.0,) * n if arrivals is None else arrivals,
        prompts=tuple(dice.randint(1, 40) for _ in range(n)),
        outputs=(40, *long_tail(1, n - 1, seed, most=40)),  # one ends with its last allowed token
        **{"max_tokens": 40, "vocabulary": 256, "seed": seed, **more},
    )


def made(model: Llama, **options: Any) -> Engine:
    return Engine(model, eos_token_ids=(), **{**TINY_POOL, **options})


def timed(model: Llama, cost: CostModel = COST, **options: Any) -> tuple[Engine, ManualClock]:
    """An engine whose steps take what the cost model says, on a clock that began long ago."""
    clock = ManualClock(1234.5)
    engine = made(model, clock=clock, **options)
    commit_at = engine.scheduler.commit

    def commit(plan: Any, results: Any, now: float) -> Any:
        clock.advance(cost.seconds(plan))
        return commit_at(plan, results, clock.now())

    engine.scheduler.commit = commit  # type: ignore[method-assign]
    return engine, clock


def scheduler(**options: Any) -> Scheduler:
    given = {**TINY_POOL, **options}
    return Scheduler(BlockPool(given.pop("num_blocks"), given.pop("block_size")), **given)


def plans(run: Run) -> list[tuple[Any, ...]]:
    return [
        (s.chunks, s.decodes, s.admitted, s.preempted, s.expired, s.running, s.held)
        for s in run.steps
    ]


def bars(run: Run) -> list[tuple[Any, ...]]:
    return sorted((s.id, s.kind, s.slot, s.tokens, s.begin, s.end) for s in timeline(run))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("patience", [None, 0.75])
def test_with_the_costs_of_the_simulator_it_is_the_simulated_run(
    model: Llama, policy: str, patience: float | None, seed: int
) -> None:
    arrivals = bursts(15.0, 20, seed, size=4, within=0.05)
    binary = tuple(round(at * 2**12) / 2**12 for at in arrivals)
    given = workload(seed, arrivals=binary, patience=patience)
    engine, clock = timed(model, policy=policy)
    run = replay(engine, given, sleep=clock.advance)
    expected = simulate(given, lambda: scheduler(policy=policy), COST)
    assert plans(run) == plans(expected)
    assert [step.at for step in run.steps] == [step.at for step in expected.steps]
    assert run.metrics == expected.metrics
    assert (run.begin, run.end) == (expected.begin, expected.end)
    assert [bar[:4] for bar in bars(run)] == [bar[:4] for bar in bars(expected)]
    assert (run.num_blocks, run.slots, run.blocks) == (15, 6, ())
    check(engine.scheduler)


def test_bars_end_where_the_next_step_begins(model: Llama, seed: int) -> None:
    engine, clock = timed(model, policy="max_utilization")
    run = replay(engine, workload(seed), sleep=clock.advance)
    expected = bars(simulate(workload(seed), lambda: scheduler(policy="max_utilization"), COST))
    last = run.steps[-1]
    found = [bar for bar in bars(run) if bar[5] <= last.at]
    assert found == [bar for bar in expected if bar[5] <= last.at]
    assert len(found) > 30


def test_outputs_have_imposed_lengths_and_the_streamed_tokens(model: Llama, seed: int) -> None:
    given = workload(seed)
    engine = made(model, policy="max_utilization")
    run = replay(engine, given)
    assert isinstance(run, Replay)
    assert {id: len(tokens) for id, tokens in run.outputs.items()} == given.lengths
    for one in given.requests():
        engine.submit(one.prompt, one.sampling, id=one.id, ends_after=given.lengths[one.id])
    drained = engine.drain()
    assert run.outputs == {id: drained[id].tokens for id in run.outputs}
    for told in run.metrics:
        moments = run.moments[told.id]
        assert len(moments) == told.output and list(moments) == sorted(moments)
        assert told.ttft is not None and told.e2e is not None
        assert told.ttft <= moments[0] and told.e2e <= moments[-1] <= told.e2e + run.seconds
        assert told.finish in ("eos", "length")


def test_request_that_comes_during_a_step_waits_from_then_on(model: Llama) -> None:
    cost = CostModel(base=2.0)
    engine, clock = timed(model, cost)
    sampling = SamplingConfig(max_tokens=3)
    first, late = Request("a", (1,), sampling), Request("b", (2,), sampling, arrival=0.5)
    run = replay(engine, [late, first], sleep=clock.advance)
    a, b = run.metrics
    assert (a.id, a.arrival, a.queue, a.ttft) == ("a", 0, 0, 2)
    assert (b.id, b.arrival, b.queue) == ("b", 0.5, 1.5)
    # Its chunk and the other's decode are one forward.
    assert b.ttft == 3.5 and b.e2e == pytest.approx(run.moments["b"][-1] - 0.5)
    assert run.moments["a"] == (2, 4, 6) and run.begin == 0


def test_it_sleeps_until_the_next_and_steps_no_more(model: Llama) -> None:
    engine, clock = timed(model)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    sampling = SamplingConfig(max_tokens=2)
    given = [Request(f"{n}", (n,), sampling, arrival=10.0 * n) for n in (1, 2, 3)]
    run = replay(engine, given, sleep=sleep)
    assert len(slept) == 3 and slept[0] == pytest.approx(10)
    assert len(run.steps) == 6 and run.begin == pytest.approx(10)
    assert all(one.queue == pytest.approx(0, abs=1e-9) for one in run.metrics)
    assert all(b.end - b.begin < 5 for b in timeline(run))
    # The next replay begins at its own second 0.
    again = replay(engine, given[:1], sleep=sleep)
    assert len(again.metrics) == 1 and again.metrics[0].arrival == pytest.approx(10)
    assert again.steps[0].at == pytest.approx(10)


def test_in_real_time_it_waits_for_the_arrivals(model: Llama, seed: int) -> None:
    given = workload(seed, 3, arrivals=(0.02, 0.06, 0.06))
    begin = time.monotonic()
    run = replay(made(model), given)
    assert time.monotonic() - begin >= 0.06
    assert [one.arrival for one in run.metrics] == pytest.approx([0.02, 0.06, 0.06])
    assert run.begin == pytest.approx(0.02) and run.seconds >= 0.04


def test_static_batch_computes_ended_rows_until_the_last_ends(model: Llama, seed: int) -> None:
    given = workload(seed, 17)
    roomy = {
        "num_blocks": 200,
        "block_size": 8,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 500,
        "chunk": None,
    }
    run = replay(made(model, policy="static", **roomy), given)
    batches = [given.outputs[first : first + 5] for first in range(0, 17, 5)]
    # All prompts are read in a batch's first step, which brings each its first token.
    rows = sum((max(batch) - 1) * len(batch) for batch in batches)
    useful = sum(length - 1 for length in given.outputs)
    assert run.wasted == pytest.approx(1 - useful / rows if rows else 0)
    kept = {(bar.id, bar.kind) for bar in timeline(run) if bar.kind == "idle"}
    assert len(kept) == sum(
        length < max(batch) for batch in batches for length in batch
    )  # fmt: skip
    for policy in set(POLICIES) - {"static"}:
        other = replay(made(model, policy=policy, **roomy), given)
        assert other.wasted == 0


def test_who_finds_the_queue_full_is_told_so(model: Llama, seed: int) -> None:
    given = workload(seed, 12)
    engine = made(model, max_waiting=2, max_num_seqs=2)
    run = replay(engine, given)
    away = [one for one in run.metrics if one.finish == QUEUE_FULL]
    assert away and all(one.output == 0 and one.ttft is None for one in away)
    assert len(run.metrics) == 12 and len(away) == 10
    assert {bar.id for bar in timeline(run)}.isdisjoint(one.id for one in away)
    assert run.summary()["e2e"]["n"] == 2


def test_replays_that_do_not_fit_are_refused_and_leave_nothing(model: Llama) -> None:
    engine = made(model)
    sampling = SamplingConfig(max_tokens=3)
    good = Request("good", (1, 2), sampling)
    with pytest.raises(ValueError, match="ids must be unique"):
        replay(engine, [good, good])
    with pytest.raises(ValueError, match="prompt and max_tokens"):
        replay(engine, [good, Request("bad", (1,) * 500, sampling)])
    assert engine.idle and engine.pool.held == 0
    engine.submit((1, 2), sampling)
    with pytest.raises(ValueError, match="must be idle"):
        replay(engine, [good])
    engine.drain()
    with pytest.raises(ValueError, match="larger keep"):
        replay(made(model, keep=2), [good])
    nothing = replay(engine, [])
    assert nothing.metrics == () and nothing.wasted == 0 and nothing.seconds == 0
