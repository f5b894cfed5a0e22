"""The small stages schedule what the engine's scheduler does with everything else switched off."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.plan import StepResult
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.studies.inflight.stages import Job, in_flight, static

Reads = list[dict[str, int]]
LONGEST = 20 + 30 - 1
Stage = Callable[[deque[Job]], Iterator[dict[str, int]]]


def random_jobs(chance: random.Random) -> dict[int, list[Job]]:
    """Jobs by the step before which they arrive."""
    jobs: dict[int, list[Job]] = {}
    for number in range(chance.randint(1, 25)):
        most = chance.randint(1, 30)
        output = chance.choice([most, chance.randint(1, most)])
        job = Job(str(number), chance.randint(1, 20), output, most)
        jobs.setdefault(chance.choice([0, chance.randrange(60)]), []).append(job)
    return jobs


def by_stage(jobs: dict[int, list[Job]], stage: Stage) -> Reads:
    queue: deque[Job] = deque()
    steps, reads = stage(queue), []
    for step in range(max(jobs) + 1):
        queue.extend(jobs.get(step, ()))
        if (read := next(steps, None)) is None:  # nobody was there, and perhaps nobody came
            steps = stage(queue)
            read = next(steps, {})
        reads.append(read)
    return [*reads, *steps]


def by_scheduler(jobs: dict[int, list[Job]], scheduler: Scheduler) -> Reads:
    known, reads = {job.id: job for group in jobs.values() for job in group}, []
    while len(reads) <= max(jobs) or scheduler.states:
        for job in jobs.get(len(reads), ()):
            asked = Request(job.id, (1,) * job.prompt, SamplingConfig(max_tokens=job.most))
            scheduler.add(asked, now=0.0)
        plan = scheduler.schedule(now=0.0)
        read = {one.id: one.count for one in (*plan.chunks, *plan.decodes)}
        reads.append(read)
        states = [scheduler.states[id] for id in read]
        ends = {s.id: "eos" if s.emitted + 1 == known[s.id].output else "" for s in states}
        scheduler.commit(plan, {id: StepResult((7,), end) for id, end in ends.items()}, now=0.0)
    return reads


def scheduler(policy: str, pool: BlockPool, rows: int) -> Scheduler:
    return Scheduler(
        pool,
        policy=policy,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * LONGEST,
        enable_prefix_caching=False,
    )


def test_static_is_the_scheduler_s_static_policy(seed: int) -> None:
    for turn in range(60):
        chance = random.Random(seed + turn)
        jobs, rows = random_jobs(chance), chance.randint(1, 6)
        pool = BlockPool(rows * LONGEST, 1)
        found = by_stage(jobs, lambda queue, rows=rows: static(queue, rows))
        assert found == by_scheduler(jobs, scheduler("static", pool, rows))


def test_in_flight_is_the_scheduler_s_no_evict_policy(seed: int) -> None:
    waits = 0
    for turn in range(60):
        chance = random.Random(seed + turn)
        jobs, rows, size = random_jobs(chance), chance.randint(1, 6), chance.randint(1, 5)
        blocks = blocks_for(LONGEST, size) + chance.choice([0, chance.randrange(200)])
        found = by_stage(jobs, lambda queue, a=(rows, blocks, size): in_flight(queue, *a))
        pool = BlockPool(blocks, size)
        assert found == by_scheduler(jobs, scheduler("guaranteed_no_evict", pool, rows))
        ample = by_stage(jobs, lambda queue, a=(rows, 999, size): in_flight(queue, *a))
        waits += found != ample
    assert 0 < waits < 60  # sometimes the pool decides who waits, sometimes the rows


def test_both_stages_serve_a_batch_written_by_hand() -> None:
    jobs = [Job("a", 3, 4, 4), Job("b", 2, 2, 2), Job("c", 1, 2, 2)]
    first, second = {"a": 3, "b": 2}, {"a": 1, "b": 1}
    assert list(static(deque(jobs), 2)) == [
        first, second, {"a": 1}, {"a": 1}, {"c": 1}, {"c": 1}
    ]  # fmt: skip
    assert list(in_flight(deque(jobs), 2, 5, 2)) == [
        first,
        second,
        {"a": 1, "c": 1},
        {"a": 1, "c": 1},
    ]
    # In 4 blocks, the longest outputs of a and b don't fit beside each other.
    tight = [{"a": 3}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 2, "c": 1}, {"b": 1, "c": 1}]
    assert list(in_flight(deque(jobs), 2, 4, 2)) == tight


def test_what_would_never_run_is_refused() -> None:
    queue = deque([Job("a", 3, 1, 3)])
    with pytest.raises(ValueError, match="at most the pool's 2 blocks, got 3 for 'a'"):
        list(in_flight(queue, 2, 2, 2))
    for steps in (static(queue, 0), in_flight(queue, 0, 9, 2)):
        with pytest.raises(ValueError, match="rows must be at least 1"):
            next(steps)
