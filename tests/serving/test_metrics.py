"""Times of requests, their summary, and what counters say of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import fields

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.request import Request, State
from labcore.serving.metrics import EngineCounters, RequestMetrics, summary
from tests.serving.tiny import BYTES, TINY_POOL, mixed, run, tiny


def ended(**changed) -> RequestMetrics:
    state = State(Request("r", (1, 2, 3), SamplingConfig(), arrival=10.0))
    state.tokens += [4, 5, 6]
    state.finish, state.admitted_at = "length", 12.0
    state.first_token_at, state.finished_at = 15.0, 25.0
    state.preemptions, state.recomputed, state.wasted, state.matched = 1, 2, 3, 4
    for name, value in changed.items():
        setattr(state, name, value)
    return RequestMetrics.of(state)


def test_the_times_of_a_request() -> None:
    told = ended()
    assert (told.prompt, told.output, told.finish) == (3, 3, "length")
    assert (told.queue, told.ttft, told.tpot, told.e2e) == (2.0, 5.0, 5.0, 15.0)
    assert (told.preemptions, told.recomputed, told.wasted, told.cached) == (1, 2, 3, 4)


def test_what_did_not_happen_has_no_time() -> None:
    one = ended(tokens=[1, 2, 3, 4], finished_at=15.0)
    assert (one.ttft, one.tpot) == (5.0, None)
    none = ended(tokens=[1, 2, 3], first_token_at=None, admitted_at=None, finish="cancelled")
    assert (none.queue, none.ttft, none.tpot, none.e2e) == (None, None, None, 15.0)
    told = summary([one, none])
    assert told["ttft"] == {"n": 1.0, "mean": 5.0, "p50": 5.0, "p99": 5.0}
    assert told["tpot"]["n"] == 0 and math.isnan(told["tpot"]["p50"])
    assert told["e2e"]["n"] == 2


def test_the_summary_interpolates(seed: int) -> None:
    chance = random.Random(seed)
    ends = [10 + chance.expovariate(1.0) for _ in range(chance.randint(2, 300))]
    told = summary(ended(finished_at=end) for end in ends)["e2e"]
    lengths = sorted(end - 10 for end in ends)
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        place = q * (len(lengths) - 1)
        low, high = lengths[math.floor(place)], lengths[math.ceil(place)]
        assert told[name] == pytest.approx(low + (place % 1) * (high - low))
    assert told["mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_counters_only_grow_and_add_up_to_the_requests(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    engine = Engine(model, BYTES, policy="max_utilization", proposer="ngram", **TINY_POOL)
    for one in mixed(random.Random(seed), 36):
        engine.submit(*one)
    before = engine.stats()
    while not engine.idle:
        engine.step()
        told = engine.stats()
        assert told.free + told.held + told.cached == told.num_blocks == 15
        for one in fields(EngineCounters):
            if one.name != "finished":
                assert getattr(told, one.name) >= getattr(before, one.name), one.name
        assert Counter(told.finished) >= Counter(before.finished)
        before = told
    metrics = engine.metrics
    assert told.waiting == told.running == 0 and told.finished == {"length": 36}
    assert told.output_tokens == sum(one.output for one in metrics)
    assert told.cached_tokens == sum(one.cached for one in metrics)
    for name in ("wasted", "preemptions", "recomputed"):
        assert getattr(told, name) == sum(getattr(one, name) for one in metrics) > 0


def test_only_the_last_records_are_kept(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), keep=3)
    for n in range(5):
        engine.submit([n], SamplingConfig(max_tokens=n + 1), id=str(n))
    run(engine)
    assert [one.id for one in engine.metrics] == ["2", "3", "4"]
    assert len(engine.trace) == 3 and engine.stats().steps == 5
    assert engine.stats().finished == {"length": 5}
