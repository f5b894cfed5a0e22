"""Who goes first, who holds up whom, and who has to leave: priorities, queues and full pools."""

import random

import pytest

from labcore.serving.engine.blocks import blocks_for
from tests.serving.invariants import check
from tests.serving.toy import Server, request, server

NEVER_ENDS = {"ends": False}


def full(*, priority: int = 0, deadline: float | None = None) -> Server:
    """Two requests that decode in a pool of 4 blocks of 2 tokens, all held.

    "first", of this priority, lacks a block for its next token; "second" does not, is newer, has
    read less and may have this deadline.
    """
    one = server(
        1,
        num_blocks=4,
        block_size=2,
        policy="max_utilization",
        max_num_seqs=3,
        toy=NEVER_ENDS,
    )
    one.add(request("first", 3, 4, priority=priority))
    one.add(request("second", 2, 6, arrival=1.0, deadline=deadline))
    one.step()
    one.step()
    a, b = one.states["first"], one.states["second"]
    assert (len(a.tokens), len(a.blocks), len(b.tokens), len(b.blocks)) == (5, 2, 4, 2)
    return one


def test_the_queue_is_not_skipped_and_its_head_comes_in_at_last() -> None:
    """Small ones that would fit wait behind a large one, that does not, and come in with it."""
    one = server(1, num_blocks=16, block_size=4, max_num_seqs=8, toy=NEVER_ENDS)
    one.add(request("runs", 4, 9))
    one.step()
    one.add(request("huge", 4, 57))
    for id in "abc":
        one.add(request(id, 2, 3))
    one.drain()
    admitted = [(p.step, p.admitted) for p in one.plans if p.admitted]
    # "huge" needs 15 of 16 blocks, so one of the small ones at a time fits beside it.
    assert admitted == [(0, ("runs",)), (9, ("huge", "a")), (12, ("b",)), (15, ("c",))]
    # Were small ones let past, it would wait as long as they come.
    one = server(1, num_blocks=16, block_size=4, max_num_seqs=8, toy=NEVER_ENDS)
    one.add(request("runs", 4, 9))
    one.step()
    one.add(request("huge", 4, 57))
    for number in range(30):
        one.add(request(str(number), 2, 3))
        one.step()
    assert next(p.step for p in one.plans if "huge" in p.admitted) == 9


def test_a_senior_that_comes_in_later_reads_first_from_then_on() -> None:
    """Not in the step in which it comes in: those that run have their tokens by then."""
    one = server(
        1,
        num_blocks=40,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=10,
        chunk=6,
        toy=NEVER_ENDS,
    )
    one.add(request("low", 30, 2, priority=1))
    one.step()
    one.add(request("urgent", 30, 2))
    reads = [[(chunk.id, chunk.count) for chunk in one.step().chunks] for _ in range(2)]
    assert reads == [[("low", 6), ("urgent", 4)], [("urgent", 6), ("low", 4)]]
    one.drain()


def test_length_limit_refuses_the_huge_one_and_nobody_waits() -> None:
    one = server(1, num_blocks=16, block_size=4, max_num_seqs=8, max_length=20, toy=NEVER_ENDS)
    one.add(request("runs", 4, 9))
    assert one.add(request("huge", 4, 57)).finish == "refused"
    for id in "abc":
        one.add(request(id, 2, 3))
    assert one.step().admitted == ("runs", "a", "b", "c")
    one.drain()


def test_a_newcomer_takes_no_block_from_those_that_run() -> None:
    """However urgent it is; it comes in before all that wait."""
    one = full()
    one.scheduler.cancel("first", one.clock.now())
    one.add(request("waits", 1, 1))
    one.add(request("urgent", 6, 1, priority=-9, arrival=9.0))
    while not one.states["urgent"].finish:
        plan = one.step()
        assert not plan.preempted
    assert one.states["second"].finish == "length"
    assert one.states["waits"].admitted_at == one.states["urgent"].admitted_at == 6.0
    one.drain()


def test_nobody_is_preempted_for_one_of_lower_priority() -> None:
    """The newer one goes; but if the other one has the lower priority, it goes itself."""
    assert full().step().preempted == ("second",)
    assert full(priority=-1).step().preempted == ("second",)
    one = full(priority=1)
    assert one.step().preempted == ("first",)
    one.drain()
    assert one.states["second"].preemptions == 0


def test_the_most_junior_goes_in_every_preemption(seed: int) -> None:
    """Random crowds, blocks of their own; so nobody goes for one of lower priority."""
    rng = random.Random(seed)
    preempted = 0
    for turn in range(12):
        block_size = rng.randrange(1, 4)
        one = server(
            seed + turn,
            block_size=block_size,
            num_blocks=blocks_for(30, block_size) + rng.randrange(3),
            policy="max_utilization",
            max_num_seqs=5,
            max_num_batched_tokens=rng.choice([5, 12]),
            enable_prefix_caching=False,
            toy=NEVER_ENDS,
        )
        for number in range(12):
            fields = {"priority": rng.randrange(3), "arrival": one.clock.now()}
            one.add(request(str(number), rng.randrange(1, 9), rng.randrange(1, 22), **fields))
            if rng.random() < 0.5:
                preempted += _step_by_seniority(one)
        while not one.scheduler.idle:
            preempted += _step_by_seniority(one)
        one.check_end()
    assert preempted > 0


def _step_by_seniority(one: Server) -> int:
    """A step; each victim is the most junior by then, and without it a token has no block."""
    size, available = one.scheduler.pool.block_size, one.scheduler.pool.available
    states = sorted(one.scheduler.running, key=lambda state: state.seniority)
    running = [(s.id, len(s.blocks), s.decoding * blocks_for(len(s.tokens), size)) for s in states]
    plan = one.step()
    for victim in plan.preempted:
        lacking = sum(max(needed - held, 0) for _, held, needed in running)
        assert lacking > available, "somebody was preempted for nothing"
        id, held, _ = running.pop()
        assert id == victim
        available += held
    return len(plan.preempted)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_preempted_request_can_leave_the_queue(how: str) -> None:
    """It holds nothing by then, keeps what it said, and its name is free again."""
    one = full(deadline=3.0 if how == "deadline" else None)
    state = one.states["second"]
    assert one.step().preempted == ("second",)
    assert state.status == "waiting" and not state.blocks and state.emitted == 2
    held = one.scheduler.pool.held
    if how == "cancelled":
        one.scheduler.cancel("second", one.clock.now())
        assert one.scheduler.pool.held == held
    else:
        assert one.step().expired == ("second",)
    check(one.scheduler)
    assert state.finish == how and state.emitted == 2 and not one.scheduler.waiting
    one.drain()
    one.add(request("second", 2, 2))
    one.drain()


def test_blocks_of_the_expired_are_free_in_the_same_step() -> None:
    """For the head of the queue, for one that would else be preempted, and for nobody."""
    one = server(1, num_blocks=4, block_size=2, max_num_seqs=2, toy=NEVER_ENDS)
    one.add(request("a", 4, 5, deadline=2.0))
    one.add(request("b", 4, 5))
    while not one.states["b"].admitted_at:
        one.step()
    assert (one.plans[-1].expired, one.plans[-1].admitted) == (("a",), ("b",))
    full_pool = full(deadline=2.0)
    assert full_pool.step().expired == ("second",)
    assert full_pool.states["first"].preemptions == 0 and full_pool.plans[-1].tokens == 1
    one.drain()
    one.add(request("c", 4, 5, deadline=one.clock.now() + 1))
    one.step()
    assert one.step().expired == ("c",) and one.scheduler.pool.held == 0


def test_a_preempted_request_was_admitted_when_it_first_was() -> None:
    one = full()
    one.drain()
    second = one.states["second"]
    assert second.preemptions == 1 and second.admitted_at == 0.0 and second.first_token_at == 1.0
    assert sum("second" in plan.admitted for plan in one.plans) == 2


def test_a_matched_block_is_not_evicted_for_those_behind_it() -> None:
    """All blocks are cached; the longest unused ones are those that the newcomer matches."""
    one = server(1, num_blocks=4, block_size=2, max_num_seqs=1, toy=NEVER_ENDS)
    old = [1, 2, 3, 4, 5]
    one.add(request("old", old[:4], 1))
    one.drain()
    one.add(request("new", [6, 6, 6, 6], 1))
    one.drain()
    pool = one.scheduler.pool
    assert (pool.free, pool.cached) == (0, 4)
    known = pool.peek(one.states["old"].digests)
    state = one.add(request("again", [*old, 6, 1], 2))
    plan = one.step()
    assert state.matched == 4 and list(plan.blocks["again"][:2]) == known
    assert len(set(plan.blocks["again"])) == 4 and not pool.peek(one.states["new"].digests)
    one.drain()
    # Where the whole pool is needed beside the match and the match counts as room, it must wait.
    one.add(request("holds", [9, 9, 9], 4))
    one.step()
    waits = one.add(request("waits", [*old, 6, 1], 2))
    assert one.step().admitted == () and waits.status == "waiting"
    one.drain()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_a_prompt_that_is_all_known_still_reads_its_last_token(block_size: int) -> None:
    """What follows it is in no block; its last block is written anew, not into the shared one."""
    one = server(1, num_blocks=40, block_size=block_size, max_num_seqs=2, toy=NEVER_ENDS)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    first = one.add(request("first", prompt, 9))
    one.step()
    blocks = list(first.blocks)
    again = one.add(request("again", prompt, 9))
    plan = one.step()
    assert (
        again.matched == 8 - block_size
        and plan.chunks[0].count == block_size
        and plan.chunks[0].last
    )
    shared = (8 - block_size) // block_size
    assert list(plan.blocks["again"])[:shared] == blocks[:shared]
    assert plan.blocks["again"][shared] not in blocks
    one.drain()
