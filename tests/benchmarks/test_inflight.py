"""The cases run small: every quantity that a claim asks for is there, and counts are right."""

from __future__ import annotations

import json
import random
import statistics
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import inflight as cases
from benchmarks.inflight import FULL, SMALL
from benchmarks.runner import Measurement, cases_of
from labcore.serving.triton.client import Streamed
from tests.benchmarks.measurements import asked, by_quantity

NAMES = (
    "peers", "crowd", "load", "simulator", "pressure", "chunks", "speculation", "prefixes",
    "equal", "server", "transcript", "replicas",
)  # fmt: skip


def test_all_take_twenty_minutes_and_have_their_names() -> None:
    every = {one.name: one for one in cases_of("inflight")}
    assert set(every) == set(NAMES)
    assert sum(one.minutes for one in every.values()) <= 20
    assert {name for name, one in every.items() if one.needs == "any"} == {
        "equal", "transcript", "replicas",
    }  # fmt: skip
    behind = ("server", "transcript")
    assert all(every[name].lacks is cases.lacks_server for name in behind)
    assert all(one.lacks() == "" for name, one in every.items() if name not in behind)


def test_workload_is_chosen_beforehand_and_hides_its_lengths() -> None:
    given = cases.workload(FULL, 400, 0)
    assert given == cases.workload(FULL, 400, 0) != cases.workload(FULL, 400, 1)
    assert {one.sampling.max_tokens for one in given.requests()} == {256} == {FULL.most}
    assert {one.arrival for one in given.requests()} == {0.0}
    ordered = sorted(given.outputs)
    assert ordered[0] == 8 and ordered[-1] > 128
    # A long tail: the longest tenth of the outputs has near half of the tokens or more.
    assert statistics.median(ordered) < 20 < statistics.fmean(ordered)
    assert sum(ordered[-40:]) > 0.4 * sum(ordered)
    assert min(given.prompts) >= 16 and max(given.prompts) <= 96
    seeds = [
        *FULL.peer_seeds, *FULL.crowd_seeds, *FULL.load_seeds, *FULL.rate_seeds,
        *(seed for pair in FULL.simulated_rounds for seed in pair), *FULL.pressed_seeds,
        *FULL.shared_seeds, cases.EQUAL_SEED, *FULL.routed_seeds,
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    # Eight of the longest fit: no policy lacks blocks unless the case is about that.
    longest = FULL.longest + FULL.most
    assert FULL.slots * longest <= FULL.pages * FULL.page
    assert len(FULL.load_seeds) >= 3 and dict(cases.LOADS) == {
        "light": 0.3, "busy": 0.7, "saturated": 1.2,
    }  # fmt: skip


def needs(case: str, found: dict[str, Measurement], *names: str) -> None:
    assert asked("inflight", case) | set(names) <= set(found)


def test_every_system_serves_the_same_requests() -> None:
    found = by_quantity(cases.peers(SMALL))
    over = "tokens a second, guaranteed_no_evict over"
    wasted = "share of rows computed for requests that had ended"
    needs(
        "peers", found, f"{over} static", f"{over} max_utilization", f"{wasted}/static",
        f"{over} transformers continuous", f"{over} transformers static", f"{over} {cases.UNFUSED}",
    )  # fmt: skip
    speed = found["tokens a second"]
    assert set(speed.peers) == {
        "static", "max_utilization", cases.UNFUSED, cases.CONTINUOUS, cases.PADDED,
    }  # fmt: skip
    assert all(len(samples) == 2 for samples in (speed.samples, *speed.peers.values()))
    for peer, samples in speed.peers.items():
        pairs = zip(speed.samples, samples, strict=True)
        assert found[f"{over} {peer}"].samples == [ours / theirs for ours, theirs in pairs]
    assert 1 <= speed.details["most requests at once in transformers"] <= 3
    for audit in speed.details["audits"]:
        same = audit["identical to guaranteed_no_evict"]
        assert audit["requests"] == 7 and len(same) == 6
        assert audit["largest gap, nats"] <= cases.GAP
    for what in ("ttft", "tpot"):
        low, high = (found[f"{what} {at}"] for at in ("p50", "p99"))
        assert all(a <= b for a, b in zip(low.samples, high.samples, strict=True))
        for name in low.peers:
            assert min(low.peers[name]) > 0 and len(low.peers[name]) == 2
    # Counted here once more: prompts are read one after the other, so at least this is wasted.
    for seed, share in zip((3, 4), found[f"{wasted}/static"].samples, strict=True):
        lengths = cases.workload(SMALL, 7, seed).outputs
        batches = [lengths[at : at + 3] for at in (0, 3, 6)]
        rows = sum((max(batch) - 1) * len(batch) for batch in batches)
        assert 0 < share <= 1 - sum(length - 1 for length in lengths) / rows + 0.1
    assert found[f"{wasted}/guaranteed_no_evict"].samples == [0, 0]
    padding = found["share of padding in the prompts/transformers static"].samples
    for seed, share in zip((3, 4), padding, strict=True):
        given = cases.workload(SMALL, 7, seed).prompts
        wide = sum(max(given[at : at + 3]) * len(given[at : at + 3]) for at in (0, 3, 6))
        assert share == pytest.approx(1 - sum(given) / wide)


def test_a_crowd_is_served_at_once_with_uniform_lengths() -> None:
    found = by_quantity(cases.crowd(SMALL))
    speed = found["tokens a second"]
    over = found[f"tokens a second, {cases.OURS} over {cases.CONTINUOUS}"]
    theirs = speed.peers[cases.CONTINUOUS]
    assert over.samples == [ours / one for ours, one in zip(speed.samples, theirs, strict=True)]
    assert [audit["requests"] for audit in speed.details["audits"]] == [9, 9]
    assert max(audit["largest gap, nats"] for audit in speed.details["audits"]) <= cases.GAP
    for lengths in (*speed.details["prompt tokens"], *speed.details["output tokens"]):
        assert len(lengths) == 9 and min(lengths) >= 2 and max(lengths) <= 7


def test_an_output_that_is_not_the_models_is_not_timed() -> None:
    given = cases.workload(SMALL, 4, 0)
    right = cases.served_by(cases.engine(SMALL), given)
    wrong = [[*tokens] for tokens in right.outputs]
    assert cases.refuse_wrong({cases.OURS: right}, given)["requests"] == 4
    wrong[2][0] = (wrong[2][0] + 1) % 2048
    other = cases.Served(seconds=1, outputs=wrong, ttft=[], tpot=[], facts={})
    with pytest.raises(RuntimeError, match="greedy up to near ties"):
        cases.refuse_wrong({cases.OURS: right, "peer": other}, given)
    wrong[2] = [*right.outputs[2], 5]
    size = len(wrong[2])
    with pytest.raises(RuntimeError, match=f"peer must output {size - 1} tokens, got {size}"):
        cases.refuse_wrong({cases.OURS: right, "peer": other}, given)


def test_how_many_run_at_once_is_counted_at_every_beginning(seed: int) -> None:
    dice = random.Random(seed)
    spans = [(begin := dice.random(), begin + dice.random()) for _ in range(30)]
    most = max(sum(a <= begin < b for a, b in spans) for begin, _ in spans)
    assert cases.at_once(spans) == most
    assert cases.at_once([(0.0, 1.0), (1.0, 2.0)]) == 1


def test_arrivals_are_measured_under_every_load() -> None:
    found = by_quantity(cases.load(SMALL))
    over = "normalized latency p50, guaranteed_no_evict over static"
    raw = [f"{what} {at}" for what in cases.TIMES for at in ("p50", "p99")]
    needs("load", found, *(f"{what}/{load}" for what in (over, *raw) for load in cases.LOADS))
    rate = statistics.median(found["requests a second, all waiting/guaranteed_no_evict"].samples)
    for load, share in cases.LOADS.items():
        middle, near = (found[f"{what}/{load}"] for what in (over, "normalized latency p50"))
        assert middle.details["rate"] == pytest.approx(share * rate)
        for arrivals in middle.details["arrivals"]:
            assert len(arrivals) == 9 and all(a <= b for a, b in pairwise(arrivals))
        assert middle.samples == [
            a / b for a, b in zip(near.samples, near.peers["static"], strict=True)
        ]
        far, queue = (
            found[f"{what}/{load}"]
            for what in ("latency over its time alone p99", "queue over its time alone")
        )
        whole = far.peers[cases.WHOLE]
        assert len(whole) == 2 and min(far.samples) > 0
        assert all(a >= b for a, b in zip(whole, far.peers["static"], strict=True))
        ratio = found[f"latency over its time alone p99, {cases.WHOLE} over {cases.OURS}/{load}"]
        assert ratio.samples == [a / b for a, b in zip(whole, far.samples, strict=True)]
        name = f"queue and time alone over its time alone, static over guaranteed_no_evict/{load}"
        pairs = zip(queue.peers["static"], queue.samples, strict=True)
        assert found[name].samples == [(1 + a) / (1 + b) for a, b in pairs]


def test_a_batch_that_returns_whole_makes_all_wait_for_its_last() -> None:
    def one(arrival: float, queue: float, e2e: float) -> Any:
        return SimpleNamespace(arrival=arrival, queue=queue, e2e=e2e)

    # The first two run from 1 to 5 and 3; the other two are admitted at 5 and end at 6 and 9.
    run = SimpleNamespace(
        metrics=[one(0.0, 1.0, 5.0), one(1.0, 0.0, 2.0), one(2.0, 3.0, 4.0), one(4.0, 1.0, 5.0)]
    )
    assert cases.returned_whole(run) == [5.0, 4.0, 7.0, 5.0]  # type: ignore[arg-type]


def test_a_fitted_simulator_predicts_every_load_and_policy() -> None:
    found = by_quantity(cases.simulator(SMALL))
    ways = (cases.FORECAST, cases.CALIBRATED, cases.REPEATED)
    names = [
        f"{what} over measured/{way}, {policy}, {load}"
        for what in ("tokens a second", "ttft p50", "tpot p50", "e2e p50", "e2e p99")
        for way in ways
        for policy in cases.PREDICTED
        for load in cases.LOADS
    ]
    needs("simulator", found, *names)
    for way in ways:
        off = found[f"deviation of throughput and medians/{way}"]
        assert len(off.samples) == 2 * 3 * 2 * 4 and len(off.details["costs"]) == 2
        inside = found[f"throughput and medians within the bar/{way}"].samples[0]
        assert inside == statistics.fmean(sample <= 0.15 for sample in off.samples)
        for name in ("ttft", "tpot", "e2e"):
            share = found[f"{name} p99 inside the measured interval/{way}"]
            assert 0 <= share.samples[0] <= 1 and share.details["runs"] == 12


def test_a_small_pool_makes_max_utilization_read_again() -> None:
    found = by_quantity(cases.pressure(SMALL))
    pair = "max_utilization over guaranteed_no_evict"
    names = [f"{w}, {pair}/{k}" for w in ("tokens a second", "tpot p99") for k in cases.PRESSURES]
    needs("pressure", found, *names)
    again = {kind: found[f"recomputed tokens share/{kind}"] for kind in cases.PRESSURES}
    assert min(again[cases.PRESSURES[0]].samples) > 0
    assert again["off pressure"].samples == [0, 0]
    assert all(item.peers["guaranteed_no_evict"] == [0, 0] for item in again.values())
    for kind in cases.PRESSURES:
        counted = found[f"tokens a second, {pair}/{kind}"].details["preemptions"]
        assert all((n > 0) == (x > 0) for n, x in zip(counted, again[kind].samples, strict=True))


def test_a_long_prompt_is_read_beside_decoding_rows() -> None:
    found = by_quantity(cases.chunks(SMALL))
    names = [f"largest gap over the median gap/chunks of {size}" for size in (4, 60)]
    names += [f"ttft of the long prompt/chunks of {size}" for size in (4, 60)]
    needs("chunks", found, *names)
    for name in names:
        assert len(found[name].samples) == 2 and min(found[name].samples) > 0


def test_drafts_change_no_output() -> None:
    found = by_quantity(cases.speculation(SMALL))
    for rows in (1, 8):
        over = found[f"tokens a second, n-gram over none/code, {rows} rows"]
        assert over.details["outputs equal"] == over.details["requests"] == 3
        assert len(over.samples) == 2
        share = found[f"accepted share/code, {rows} rows"]
        assert 0 <= share.samples[0] <= 1 and share.details["drafted"] > 0
    needs("speculation", found)


def test_a_shared_prompt_is_read_less_often() -> None:
    found = by_quantity(cases.prefixes(SMALL))
    read = found["prompt tokens read, shared over each its own"]
    needs("prefixes", found, "ttft, shared over each its own")
    assert max(read.samples) < 1
    pairs = zip(read.details["tokens"], read.details["alone"], strict=True)
    assert all(less < whole for less, whole in pairs)


def test_every_output_is_counted_once() -> None:
    found = by_quantity(cases.equal(SMALL))
    labels = (
        "outputs equal to the request alone",
        "outputs that differ by a near tie",
        "outputs that differ otherwise",
    )
    for way in cases.equal_ways(SMALL.few_pages):
        assert sum(found[f"{label}/{way}"].samples[0] for label in labels) == 5
        assert found[f"outputs that differ otherwise/{way}"].samples == [0]
    needs("equal", found)


def test_routers_are_simulated_on_the_same_requests() -> None:
    found = by_quantity(cases.replicas(SMALL))
    assert {item.mode for item in found.values()} == {"simulated"}
    names = [f"{w}/{s:g} of the load" for w in ("ttft p99", "hit share") for s in (0.5, 0.9)]
    needs("replicas", found, *names)
    for share in (0.5, 0.9):
        hits = found[f"hit share/{share:g} of the load"]
        assert set(hits.peers) == {"round_robin", "least_loaded"} and len(hits.samples) == 2
        assert by_quantity(cases.replicas(SMALL))[f"hit share/{share:g} of the load"] == hits


def test_a_stream_is_timed_from_its_question_to_its_tokens() -> None:
    asked_for: list[str] = []
    lock = threading.Lock()

    def talk(text: str) -> Iterator[Any]:
        with lock:
            asked_for.append(text)
        yield Streamed(tokens=(1,))
        yield Streamed(text="held back")
        yield Streamed(tokens=(2, 3))
        yield Streamed(finish="length")

    first, between = cases.all_at_once(talk, 5)
    assert len(asked_for) == 5 and first > 0 and between >= 0
    with pytest.raises(RuntimeError, match="a stream must have .* tokens, got 0"):
        cases.all_at_once(lambda text: iter([Streamed(finish="error")]), 2)


def test_a_process_that_is_gone_is_said_to_be() -> None:
    one = SimpleNamespace(pids=lambda: {"stub": None})
    with pytest.raises(RuntimeError, match="the server's stub must be running"):
        cases.healthy_again(one, "stub")  # type: ignore[arg-type]


def test_the_transcript_is_what_the_page_tells_readers_to_type() -> None:
    if lack := cases.lacks_server():
        pytest.skip(lack)
    (told,) = cases.transcript(SMALL)
    command, lines = told.details["command"], told.details["lines"]
    assert command.startswith("curl -sN http://127.0.0.1:8000/v2/models/lm/generate_stream")
    assert told.samples == [3] and lines[-1] == "HTTP 200"
    assert lines[1::2] == [""] * 3 and command.endswith(r"-w 'HTTP %{http_code}\n'")
    assert "for i in range(" in command
    texts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1:2]]
    assert [one["finish_reason"] for one in texts] == ["", "", "length"]


def test_the_real_server_is_started_asked_and_killed() -> None:
    if lack := cases.lacks_server():
        pytest.skip(lack)
    found = by_quantity(cases.server(SMALL))
    needs(
        "server", found, "seconds to ready", "seconds until healthy/engine",
        "seconds until healthy/stub", "seconds that the server adds a token/2 streams",
        "seconds that the server adds a first token/2 streams",
    )  # fmt: skip
    assert all(min(item.samples) > 0 for name, item in found.items() if "adds" not in name)
    first = found["seconds a first token/2 streams"]
    assert len(first.samples) == len(first.peers["socket"]) == 2
