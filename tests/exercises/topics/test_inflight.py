"""The exercises on in-flight batching, by other ways to the same answers, and their notebook."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from labcore.decoding import SamplingConfig
from labcore.exercises import Exercise
from labcore.exercises.drawing import separating
from labcore.exercises.topics.inflight import ADMIT, CANCEL, CHUNK, LATENCY, POLICY
from labcore.exercises.topics.inflight.admission import some_queue
from labcore.exercises.topics.inflight.chunking import some_prompts
from labcore.exercises.topics.inflight.freeing import some_pool
from labcore.exercises.topics.inflight.latency import some_replicas
from labcore.exercises.topics.inflight.timelines import NAMES, some_timeline
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.plan import StepResult
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import summary
from tests.exercises.draws import check_variants
from tests.exercises.notebook import check_changed_rule, solved

SLUG = "inflight"
FUNCTIONS = (ADMIT, CANCEL, CHUNK, LATENCY, POLICY)
OWN = (ADMIT, CHUNK, LATENCY)


def both(exercise: Exercise, name: str) -> list[Callable[..., Any]]:
    """The reference, and the notebook's answer."""
    return [exercise.reference, solved(SLUG)[name]]


def test_students_have_their_own_numbers(seed: int) -> None:
    for exercise in OWN:
        check_variants(exercise, 4, seed)


# Admission ---------------------------------------------------------------------------------------


def at_their_longest(case: Mapping[str, Any], taken: list[int]) -> int:
    """Blocks when everybody has become as long as it may."""
    page = case["page"]
    rows = [(prompt, most) for prompt, most, *_ in case["running"]]
    rows += [case["waiting"][place][:2] for place in taken]
    return sum(blocks_for(prompt + most - 1, page) for prompt, most in rows)


def test_admitted_requests_fit_at_their_longest_but_no_more_do(seed: int) -> None:
    chance = random.Random(seed)
    for answer in both(ADMIT, "admit"):
        for _ in range(60):
            case, spare = some_queue(chance), chance.randint(0, 6)
            pool = case["free"] + sum(held for _, _, held, _ in case["running"])
            taken = answer(**case, spare=spare)
            assert taken == [*range(len(taken))]
            rows = len(case["running"]) + len(taken)
            assert rows <= case["slots"]
            lone = not case["running"] and len(taken) == 1
            assert at_their_longest(case, taken) <= pool - (0 if lone or not taken else spare)
            if len(taken) < len(case["waiting"]) and rows < case["slots"]:
                more = at_their_longest(case, [*taken, len(taken)])
                assert more > pool - (spare if rows else 0)


def test_without_spare_blocks_admission_is_the_scheduler_s(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        case = some_queue(chance, rows=0)
        scheduler = Scheduler(
            BlockPool(case["free"] + 1, case["page"]), max_num_seqs=case["slots"],
            max_num_batched_tokens=10**6, enable_prefix_caching=False,
        )  # fmt: skip
        case["free"] += 1
        waiting = [one for one in case["waiting"] if at_their_longest(
            {**case, "running": [(*one[:2], 0, "")]}, []) <= case["free"]]  # fmt: skip
        for n, (prompt, most, _) in enumerate(waiting):
            config = SamplingConfig(max_tokens=most)
            scheduler.add(Request(f"r{n}", tuple(range(prompt)), config, arrival=float(n)), 0.0)
        plan = scheduler.schedule(0.0)
        told = ADMIT.reference(**{**case, "waiting": waiting}, spare=0)
        assert plan.admitted == tuple(f"r{place}" for place in told)


def test_the_text_s_example_of_admission() -> None:
    mine = solved(SLUG)["admit"]
    running = [(20, 29, 2, "a")]
    for last, right in (((30, 4, "a"), [0]), ((30, 3, "a"), [0, 1])):
        waiting = [(33, 16, "a"), last]
        for answer in (ADMIT.reference, mine):
            assert answer(waiting, running, 8, 9, 16, None, spare=2) == right
    # A block less for each: so two more blocks may be promised elsewhere.
    waiting = [(33, 16, "a"), (30, 4, "a")]
    assert mine(waiting, running, 7, 9, 16, {"a": 24}, spare=2) == [0, 1]
    assert mine(waiting, running, 6, 9, 16, {"a": 24}, spare=2) == [0]


# Cancelling --------------------------------------------------------------------------------------


def test_the_pool_adds_up_afterwards(seed: int) -> None:
    chance = random.Random(seed)
    for answer in both(CANCEL, "cancel"):
        for _ in range(60):
            pool = some_pool(chance)
            before = copy.deepcopy(pool)
            tables, references, digests, free, cached = answer(**pool)
            assert pool == before
            assert tables == {k: v for k, v in pool["tables"].items() if k not in pool["ids"]}
            held = Counter(block for blocks in tables.values() for block in blocks)
            blocks = range(len(references))
            assert references == [held[block] for block in blocks]
            assert sorted([*held, *free, *cached]) == [*blocks] and free == sorted(free)
            assert all(digests[block] for block in cached)
            assert not any(digests[block] for block in free)
            assert cached[: len(pool["cached"])] == pool["cached"]


def test_one_at_a_time_is_all_at_once(seed: int) -> None:
    chance = random.Random(seed)
    for answer in both(CANCEL, "cancel"):
        for _ in range(20):
            pool = some_pool(chance)
            names = ("tables", "references", "digests", "free", "cached")
            step = dict(pool)
            for name in pool["ids"]:
                step |= dict(zip(names, answer(**{**step, "ids": [name]}), strict=True))
            assert answer(**pool) == tuple(step[name] for name in names)


def test_cancelling_is_the_pool_s_release(seed: int) -> None:
    """Where every written block and no other has a digest, as in `BlockPool`."""
    chance = random.Random(seed)
    for _ in range(30):
        pool = BlockPool(20, 4)
        first = pool.allocate(chance.randint(1, 5))
        shared = first[: chance.randint(0, len(first) - 1)]
        pool.share(shared)
        tables = {"a": first, "b": [*shared, *pool.allocate(chance.randint(1, 5))]}
        computed = {name: 4 * len(blocks) - chance.randint(1, 4) for name, blocks in tables.items()}
        digests = [""] * 20
        for name, blocks in tables.items():
            for block in blocks[: computed[name] // 4]:
                digests[block] = f"d{block}"
                pool.register(block, digests[block].encode())
        case: dict[str, Any] = {"tables": tables, "computed": computed, "digests": digests}
        case["references"] = [pool.references(block) for block in range(20)]
        case["free"] = [n for n in range(20) if not case["references"][n]]
        ids = chance.sample("ab", chance.randint(1, 2))
        _, references, after, _, cached = CANCEL.reference(
            ids=ids, cached=[], page=4, limit=None, **case
        )
        for name in ids:
            pool.release(tables[name])
        assert references == [pool.references(block) for block in range(20)]
        assert after == [(pool.digest(block) or b"").decode() for block in range(20)]
        assert cached == list(pool._cached)


def test_the_text_s_example_of_cancelling() -> None:
    case: dict[str, Any] = {
        "tables": {"a": [5, 2, 7], "b": [5, 3]}, "computed": {"a": 6, "b": 6},
        "references": [0, 0, 1, 1, 0, 2, 0, 1], "digests": ["", "", "y", "", "", "x", "", ""],
        "free": [0, 1, 4, 6], "cached": [], "page": 4, "limit": None,
    }  # fmt: skip
    for answer in both(CANCEL, "cancel"):
        _, references, digests, free, cached = answer(ids=["a"], **case)
        assert (free, cached) == ([0, 1, 2, 4, 6, 7], []) and references[5] == 1
        assert digests[2] == "" and digests[5] == "x"
        *_, free, cached = answer(ids=["a", "b"], **case)
        assert (free, cached) == ([0, 1, 2, 3, 4, 6, 7], [5])
    case["limit"] = 0
    *_, free, cached = solved(SLUG)["cancel"](ids=["a", "b"], **case)
    assert (free, cached) == ([*range(8)], [])


# Chunks ------------------------------------------------------------------------------------------


def by_scheduler(requests: list[tuple[int, int, int]], steps: int, budget: int, chunk: int) -> Any:
    """What labcore's scheduler does, which knows no least length."""
    scheduler = Scheduler(
        BlockPool(4000, 16), max_num_seqs=64, max_num_batched_tokens=max(budget, 64), chunk=chunk,
        enable_prefix_caching=False,
    )  # fmt: skip
    scheduler.max_num_batched_tokens = budget
    trace, first = [], [-1] * len(requests)
    for step in range(steps):
        for n, (arrival, prompt, output) in enumerate(requests):
            if arrival == step:
                config = SamplingConfig(max_tokens=output)
                request = Request(f"r{n}", tuple(range(prompt)), config, arrival=float(n))
                scheduler.add(request, 0.0)
        plan = scheduler.schedule(float(step))
        reads = {one.id: one.count for one in plan.chunks} | {one.id: 1 for one in plan.decodes}
        drawn = [one.id for one in plan.decodes] + [one.id for one in plan.chunks if one.last]
        for n in range(len(requests)):
            if f"r{n}" in drawn and first[n] < 0:
                first[n] = step
        scheduler.commit(plan, {id: StepResult(tokens=(7,)) for id in drawn}, 0.0)
        trace.append([reads.get(f"r{n}", 0) for n in range(len(requests))])
    return trace, first


def test_without_a_least_length_the_trace_is_the_scheduler_s(seed: int) -> None:
    chance = random.Random(seed)
    for answer in both(CHUNK, "in_chunks"):
        for _ in range(10):
            case, chunk = some_prompts(chance) | {"least": 1}, chance.randint(100, 500)
            wanted = by_scheduler(case["requests"], case["steps"], case["budget"], chunk)
            assert answer(**case, chunk=chunk) == wanted


def test_every_token_is_read_once_and_no_step_reads_too_many(seed: int) -> None:
    chance = random.Random(seed)
    mine = solved(SLUG)["in_chunks"]
    for answer, equal in ((CHUNK.reference, False), (mine, False), (mine, True)):
        for _ in range(20):
            case, chunk = some_prompts(chance, equal), chance.randint(200, 500)
            trace, first = answer(**case | {"steps": 80}, chunk=chunk)
            totals = [sum(column) for column in zip(*trace, strict=True)]
            assert totals == [prompt + output - 1 for _, prompt, output in case["requests"]]
            assert max(map(sum, trace)) <= case["budget"] and max(map(max, trace)) <= chunk
            for n, (arrival, prompt, _) in enumerate(case["requests"]):
                assert sum(row[n] for row in trace[: first[n] + 1]) == prompt
                assert not any(row[n] for row in trace[:arrival])


def test_the_golden_trace() -> None:
    golden = ([400, 400, 224], [400, 400, 224], [1, 1, 352])
    for answer in both(CHUNK, "in_chunks"):
        trace, first = answer([(0, 800, 4)] * 3, 3, 1024, 64, False, chunk=400)
        assert (tuple(trace), first) == (golden, [1, 1, 2])
    trace, _ = solved(SLUG)["in_chunks"]([(0, 800, 4)] * 3, 1, 1024, 64, True, chunk=400)
    assert trace == [[384, 320, 320]]


# Latencies ---------------------------------------------------------------------------------------


def test_percentiles_lie_where_they_must(seed: int) -> None:
    """One replica at a time gives each request's times; all together lie between them."""
    chance = random.Random(seed)
    for answer in both(LATENCY, "latencies"):
        for _ in range(8):
            case = some_replicas(chance)
            lowest, highest = (answer(**case, percent=percent) for percent in (1, 100))
            middle = answer(**case, percent=50)
            assert all(a <= b <= c for a, b, c in zip(lowest, middle, highest, strict=True))
            alone = [answer([one], None, percent=100) for one in case["replicas"]]
            assert highest == tuple(map(max, zip(*alone, strict=True)))
            moved = [
                (
                    {name: time + 8 for name, time in arrivals.items()},
                    [(begin + 8, end + 8, *rest) for begin, end, *rest in steps],
                )
                for arrivals, steps in case["replicas"]
            ]
            assert answer(moved, None, percent=50) == pytest.approx(middle)


def test_the_median_of_an_odd_number_is_labcore_s(seed: int) -> None:
    chance = random.Random(seed)
    times = [chance.uniform(0, 9) for _ in range(2 * chance.randint(1, 30) + 1)]
    arrivals = {f"r{n}": time for n, time in enumerate(times)}
    steps: list[Any] = [(10.0, 11.0, list(arrivals), dict.fromkeys(arrivals, 1))]
    steps.append((11.0, 12.5, [], dict.fromkeys(arrivals, 3)))
    assert not summary([])["ttft"]["n"]
    for answer in both(LATENCY, "latencies"):
        found = answer([(arrivals, steps)], None, percent=50)
        assert found == pytest.approx(
            (11 - statistics.median(times), 0.5, 10 - statistics.median(times))
        )


def test_the_text_s_example_of_latencies() -> None:
    said: list[Any] = [(2.5, 3.0, [], {"r": 1}), (3.0, 4.0, [], {"r": 2}), (5.0, 6.0, [], {"r": 1})]
    steps: list[Any] = [(1.0, 2.0, ["r"], {}), *said]
    for answer in both(LATENCY, "latencies"):
        assert answer([({"r": 0.0}, steps)], None, percent=90) == (3.0, 1.0, 1.0)
        five = {str(n): 10.0 - n for n in range(1, 6)}
        one: list[Any] = [(10.0, 10.0, [*five], dict.fromkeys(five, 1)), (10.0, 11.0, [], {"1": 1})]
        for percent, right in ((60, 3.0), (61, 4.0)):
            assert answer([(five, one)], None, percent=percent)[2] == right
    *_, goodput = solved(SLUG)["latencies"]([({"r": 0.0}, steps)], (3.0, 1.0), percent=90)
    assert goodput == pytest.approx(1 / 6)


# Timelines ---------------------------------------------------------------------------------------


def test_a_policy_is_never_named_for_what_it_does_not_do(seed: int) -> None:
    """Quiet timelines show less; they are never taken for one of the others."""
    chance = random.Random(seed)
    quiet = {"static": 0, "no evict": 1, "prefill first": 2, "max utilization": 3}
    for answer in both(POLICY, "policy_of"):
        for policy in NAMES * 8:
            case = some_timeline(chance, policy)
            found = answer(**case)
            assert quiet[found] <= quiet[policy] or {found, policy} <= {"no evict", "static"}
            if policy == "static":
                assert found == "static"
            if policy in ("static", "no evict"):
                assert found in ("static", "no evict")


def test_the_text_s_example_of_a_timeline() -> None:
    prompts = {"r0": 3, "r1": 2}
    reads: list[dict[str, int]] = [{"r0": 3}, {"r0": 1}, {"r0": 1, "r1": 2}, {"r0": 1, "r1": 1}]
    reads += [{"r0": 1, "r1": 1}, {"r0": 1}]
    admitted: list[list[str]] = [["r0"], [], ["r1"], [], [], []]
    ended: list[list[str]] = [[], [], [], [], ["r1"], ["r0"]]
    stalled = [reads[0], reads[1], {"r1": 2}, {"r1": 1}, *reads[4:]]
    again = [["r0"], [], ["r1"], [], ["r0"], []]
    for answer in both(POLICY, "policy_of"):
        for names, row, right in (
            (admitted, reads, "no evict"),
            (admitted, stalled, "prefill first"),
            (again, stalled, "max utilization"),
        ):
            timeline = [*zip(names, row, ended, strict=True)]
            assert answer(timeline, prompts, 2, False) == right
    assert solved(SLUG)["policy_of"]([*zip(admitted, reads, ended)], prompts, 2, True) == (  # noqa: B905
        "half batch"
    )


# The notebook's own rules ------------------------------------------------------------------------


RULES: dict[str, tuple[str, Exercise, str]] = {
    "families-test": ("admit", ADMIT, "whatever `families` is"),
    "limit-test": ("cancel", CANCEL, "whatever `limit` is"),
    "equal-test": ("in_chunks", CHUNK, "whatever `equal` is"),
    "goal-test": ("latencies", LATENCY, "whatever `goal` is"),
    "half-test": ("policy_of", POLICY, "whatever `half` is"),
}


@pytest.mark.parametrize("cell", RULES)
def test_a_rule_that_labcore_does_not_know_is_graded(cell: str, seed: int) -> None:
    function, exercise, words = RULES[cell]
    check_changed_rule(SLUG, cell, function, exercise, words, seed)


# What students may also write: no hint that leads away -------------------------------------------


OTHERS: list[tuple[Exercise, Callable[..., Any], str]] = [
    (ADMIT, lambda waiting, **_: [*range(len(waiting))], "the result must have length"),
    (CANCEL, lambda **case: tuple(case[n] for n in (
        "tables", "references", "digests", "free", "cached")), "the returned tables"),
    (CHUNK, lambda requests, steps, **_: ([[1] * len(requests)] * steps, [0] * len(requests)),
     "the returned tokens read"),
    (LATENCY, lambda **_: (math.pi, 0.0, 0.0), "the returned TTFT"),
    (POLICY, lambda **_: "no evict", "the result is 'no evict', expected '"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise", "answer", "words"), OTHERS, ids=[one.id for one in FUNCTIONS])
def test_an_unknown_mistake_is_told_by_its_numbers(
    exercise: Exercise, answer: Callable[..., Any], words: str, seed: int
) -> None:
    given = [answer(**case) for case in exercise.numbered_cases(seed)]
    outcome = exercise.judge(given, seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message, outcome


# Cases that tell answers apart -------------------------------------------------------------------


def test_cases_are_drawn_until_they_tell_all_answers_apart(seed: int) -> None:
    chance = random.Random(seed)

    def rare(x: int, bound: int) -> int:
        return x if x > bound else 0

    def one() -> dict[str, Any]:
        return {"x": chance.randrange(200)}

    variants = [{"bound": 3}, {"bound": 190}]
    cases = separating(one, [rare, lambda x, bound: 0 * bound * x], variants, least=2)
    assert 2 <= len(cases) <= 4 and any(case["x"] > 190 for case in cases)
    with pytest.raises(RuntimeError, match="agree"):
        separating(one, [rare, lambda x, bound: x if x > bound else 0], variants)
