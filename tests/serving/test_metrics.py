"""Times of requests, their summary, and what Prometheus reads."""

from __future__ import annotations

import math
import random
import re

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.clock import ManualClock
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.metrics import Histogram, RequestMetrics, exposition, summary
from labcore.serving.engine.requests import Request, State
from tests.serving.tiny import BYTES, mixed, run, tiny


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


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((0.5, 1.0, 4.0))
    for value in (0.1, 0.5, 0.50001, 1.0, 3.9, 4.0, 4.1, 100.0):
        histogram.add(value)
    assert histogram.buckets() == [(0.5, 2), (1.0, 4), (4.0, 6), (math.inf, 8)]
    assert histogram.count == 8
    assert histogram.total == pytest.approx(0.1 + 0.5 + 0.50001 + 1 + 3.9 + 4 + 4.1 + 100)
    for bounds in ((1.0, 1.0), (2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="bound"):
            Histogram(bounds)


LINE = re.compile(r'(labcore_[a-z0-9_]+?)((?:_bucket|_sum|_count)?)(\{[a-z]+="[^"]*"\})? (\S+)')


def parsed(text: str) -> dict[str, float]:
    """The samples; raises where a line is not in the format, or not behind its family's head."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    heads: dict[str, str] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in heads
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == family and kind in ("gauge", "counter", "histogram")
            heads[name] = kind
        else:
            name = line.split("{")[0].split()[0]
            if heads[family] == "histogram":
                name = re.sub("_(bucket|sum|count)$", "", name)
            assert name == family and LINE.fullmatch(line), line
            assert (heads[family] == "counter") == family.endswith("_total")
            label, value = line.rsplit(" ", 1)
            assert label not in samples
            samples[label] = float(value)
    return samples


def test_the_exposition_is_the_engines_state(seed: int) -> None:
    clock = ManualClock(3.0)
    engine = Engine(
        tiny(seed, eos_token_ids=()),
        BYTES,
        clock=clock,
        policy="max_utilization",
        pages=15,
        page=8,
        budget=24,
        proposer="ngram",
        max_length=104,
    )
    before = parsed(exposition(engine))
    for one in mixed(random.Random(seed), 36):
        engine.submit(*one)
    while not engine.idle:
        engine.step()
        clock.advance(0.375)
        after = parsed(exposition(engine))
        for label, value in before.items():  # counters and buckets only grow
            if not label.startswith(("labcore_requests_w", "labcore_requests_r", "labcore_blocks")):
                assert after[label] >= value, label
        blocks = [after[f'labcore_blocks{{state="{s}"}}'] for s in ("free", "held", "cached")]
        assert sum(blocks) == 15
        before = after
    told, metrics = engine.stats(), engine.metrics
    assert before["labcore_requests_waiting"] == before["labcore_requests_running"] == 0
    assert before['labcore_tokens_total{kind="output"}'] == sum(one.output for one in metrics)
    assert before['labcore_tokens_total{kind="wasted"}'] == sum(one.wasted for one in metrics) > 0
    assert before['labcore_tokens_total{kind="accepted"}'] == told.accepted
    assert before["labcore_preemptions_total"] == sum(one.preemptions for one in metrics) > 0
    finished = {
        re.search('"(.*)"', label)[1]: value
        for label, value in before.items()
        if label.startswith("labcore_requests_total")
    }
    assert finished == told.finished and sum(finished.values()) == 36
    for name in ("queue", "ttft", "tpot", "e2e"):
        values = [value for one in metrics if (value := getattr(one, name)) is not None]
        full = f"labcore_request_{name}_seconds"
        assert before[f"{full}_count"] == before[f'{full}_bucket{{le="+Inf"}}'] == len(values)
        assert before[f"{full}_sum"] == pytest.approx(sum(values))
        below = sum(value <= 1.0 for value in values)
        assert before[f'{full}_bucket{{le="1"}}'] == below


def test_only_the_last_records_are_kept(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), keep=3)
    for n in range(5):
        engine.submit([n], SamplingConfig(max_tokens=n + 1), id=str(n))
    run(engine)
    assert [one.id for one in engine.metrics] == ["2", "3", "4"]
    assert len(engine.trace) == 3 and engine.stats().steps == 5
    assert engine.stats().finished == {"length": 5}
