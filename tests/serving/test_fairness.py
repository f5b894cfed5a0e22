"""Who goes first, who holds up whom, and who has to leave: priorities, queues and full pools."""

import random

import pytest

from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.policies import VICTIMS, choose_victim
from labcore.serving.engine.requests import State
from tests.serving.toy import Server, request, server

NEVER_ENDS = {"ends": False}


def full(victim: str = "newest", *, priority: int = 0, deadline: float | None = None) -> Server:
    """Two requests that decode in a pool of 4 blocks of 2 tokens, all held.

    "first", of this priority, lacks a block for its next token; "second" does not, is newer, has
    read less and may have this deadline.
    """
    one = server(
        1, count=4, page=2, policy="max_utilization", slots=3, victim=victim, toy=NEVER_ENDS
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
    one = server(1, count=16, page=4, slots=8, toy=NEVER_ENDS)
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
    one = server(1, count=16, page=4, slots=8, toy=NEVER_ENDS)
    one.add(request("runs", 4, 9))
    one.step()
    one.add(request("huge", 4, 57))
    for number in range(30):
        one.add(request(str(number), 2, 3))
        one.step()
    assert next(p.step for p in one.plans if "huge" in p.admitted) == 9


def test_a_senior_that_comes_in_later_reads_first_from_then_on() -> None:
    """Not in the step in which it comes in: those that run have their tokens by then."""
    one = server(1, count=40, page=4, slots=3, budget=10, chunk=6, toy=NEVER_ENDS)
    one.add(request("low", 30, 2, priority=1))
    one.step()
    one.add(request("urgent", 30, 2))
    reads = [[(chunk.id, chunk.count) for chunk in one.step().chunks] for _ in range(2)]
    assert reads == [[("low", 6), ("urgent", 4)], [("urgent", 6), ("low", 4)]]
    one.drain()


def test_length_limit_refuses_the_huge_one_and_nobody_waits() -> None:
    one = server(1, count=16, page=4, slots=8, max_length=20, toy=NEVER_ENDS)
    one.add(request("runs", 4, 9))
    assert one.add(request("huge", 4, 57)).finish == "refused"
    for id in "abc":
        one.add(request(id, 2, 3))
    assert one.step().admitted == ("runs", "a", "b", "c")
    one.drain()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_newcomer_takes_no_block_from_those_that_run(victim: str) -> None:
    """However urgent it is; it comes in before all that wait."""
    one = full(victim)
    one.scheduler.cancel("first", one.clock.now())
    one.add(request("waits", 1, 1))
    one.add(request("urgent", 6, 1, priority=-9, arrival=9.0))
    while not one.states["urgent"].finish:
        plan = one.step()
        assert not plan.preempted
    assert one.states["second"].finish == "length"
    assert one.states["waits"].admitted_at == one.states["urgent"].admitted_at == 6.0
    one.drain()


@pytest.mark.parametrize("victim", VICTIMS)
def test_nobody_is_preempted_for_one_of_lower_priority(victim: str) -> None:
    """Every rule names the second one; but if the first one has the lower priority, it goes."""
    assert full(victim).step().preempted == ("second",)
    assert full(victim, priority=-1).step().preempted == ("second",)
    one = full(victim, priority=1)
    assert one.step().preempted == ("first",)
    one.drain()
    assert one.states["second"].preemptions == 0


def test_where_only_a_higher_priority_frees_a_block_it_goes() -> None:
    pool = BlockPool(4, 2)
    states = []
    for order, priority in enumerate((0, 3)):
        state = State(request(str(order), 4, 4, priority=priority), order=order)
        state.blocks = pool.allocate(2)
        states.append(state)
    assert choose_victim("newest", states, pool, 3) is states[1]
    pool.share(states[1].blocks)
    assert choose_victim("newest", states, pool, 3) is states[0]


@pytest.mark.parametrize("victim", VICTIMS)
def test_priorities_hold_in_every_preemption(victim: str, seed: int) -> None:
    """Random crowds, blocks of their own: no victim is above all those that lack a block."""
    rng = random.Random(seed)
    preempted = 0
    for turn in range(12):
        page = rng.randrange(1, 4)
        one = server(
            seed + turn,
            page=page,
            count=blocks_for(30, page) + rng.randrange(3),
            policy="max_utilization",
            slots=5,
            budget=rng.choice([5, 12]),
            victim=victim,
            share_prefixes=False,
            toy=NEVER_ENDS,
        )
        for number in range(12):
            fields = {"priority": rng.randrange(3), "arrival": one.clock.now()}
            one.add(request(str(number), rng.randrange(1, 9), rng.randrange(1, 22), **fields))
            if rng.random() < 0.5:
                preempted += _step_by_priority(one)
        while not one.scheduler.idle:
            preempted += _step_by_priority(one)
        one.check_end()
    assert preempted > 0


def _step_by_priority(one: Server) -> int:
    """A step; each victim is judged by whom it made room for: the first that lacks a block."""
    page, available = one.scheduler.pool.page, one.scheduler.pool.available
    running = {state.id: (state, len(state.blocks)) for state in one.scheduler.running}
    needs = {id: s.decoding * (len(s.tokens) > held * page) for id, (s, held) in running.items()}
    plan = one.step()
    for victim in plan.preempted:
        left = available
        for lacking in running:
            left -= needs[lacking]
            if left < 0:
                break
        assert left < 0, "somebody was preempted for nothing"
        least = running[lacking][0].request.priority
        assert running[victim][0].request.priority >= least
        available += running.pop(victim)[1]
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
    one.scheduler.check()
    assert state.finish == how and state.emitted == 2 and not one.scheduler.waiting
    one.drain()
    one.add(request("second", 2, 2))
    one.drain()


def test_blocks_of_the_expired_are_free_in_the_same_step() -> None:
    """For the head of the queue, for one that would else be preempted, and for nobody."""
    one = server(1, count=4, page=2, slots=2, toy=NEVER_ENDS)
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
    one = server(1, count=4, page=2, slots=1, toy=NEVER_ENDS)
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
    assert len(set(plan.blocks["again"])) == 4 and pool.evicted == 2
    one.drain()
    # Where the whole pool is needed beside the match and the match counts as room, it must wait.
    one.add(request("holds", [9, 9, 9], 4))
    one.step()
    waits = one.add(request("waits", [*old, 6, 1], 2))
    assert one.step().admitted == () and waits.status == "waiting"
    one.drain()


@pytest.mark.parametrize("page", [1, 2, 4, 8])
def test_a_prompt_that_is_all_known_still_reads_its_last_token(page: int) -> None:
    """What follows it is in no block; its last block is written anew, not into the shared one."""
    one = server(1, count=40, page=page, slots=2, toy=NEVER_ENDS)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    first = one.add(request("first", prompt, 9))
    one.step()
    blocks = list(first.blocks)
    again = one.add(request("again", prompt, 9))
    plan = one.step()
    assert again.matched == 8 - page and plan.chunks[0].count == page and plan.chunks[0].last
    shared = (8 - page) // page
    assert list(plan.blocks["again"])[:shared] == blocks[:shared]
    assert plan.blocks["again"][shared] not in blocks
    one.drain()
