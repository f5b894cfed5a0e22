"""One budget for all, the seniors first, and nothing that is not written is shared."""

import random

import pytest

from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.plan import StepPlan, StepResult
from labcore.serving.engine.scheduler import POLICIES, QueueFull, Scheduler
from tests.serving.invariants import check
from tests.serving.toy import request, server


@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests_are_served_as_if_alone(policy: str, seed: int) -> None:
    """Random sizes, shared prompts, drafts, a pool that is often full; see what `Server` checks."""
    rng = random.Random(seed)
    preempted = 0
    for turn in range(25):
        block_size, slots = rng.randrange(1, 6), rng.randrange(1, 6)
        one = server(
            seed + turn,
            block_size=block_size,
            num_blocks=blocks_for(24, block_size) + rng.randrange(4),
            policy=policy,
            max_num_seqs=slots,
            max_num_batched_tokens=slots + rng.randrange(20),
            chunk=rng.choice([None, 1, 5]),
            enable_prefix_caching=rng.random() < 0.7,
            toy={"ends": rng.random() < 0.5},
        )
        common = [rng.randrange(1, 7) for _ in range(12)]
        for number in range(rng.randrange(1, 12)):
            prompt = [*common[: rng.randrange(12)], rng.randrange(1, 7)]
            one.add(request(str(number), prompt, rng.randrange(1, 12), arrival=one.clock.now()))
            for _ in range(rng.randrange(4)):
                one.step({str(n): rng.randrange(4) for n in range(12)})
        one.drain()
        assert all(state.finish in ("eos", "length") for state in one.states.values())
        preempted += sum(state.preemptions for state in one.states.values())
    assert (preempted > 0) == (policy == "max_utilization")


def test_what_can_never_run_is_refused_at_once() -> None:
    """The last token of an output is never read, so that one needs no room."""
    one = server(1, num_blocks=5, block_size=4, max_length=18, toy={"ends": False})
    assert one.add(request("fits", 10, 9)).status == "waiting"
    for id, prompt, output, most in (("long", 10, 10, 18), ("huge", 4, 10**9, 18)):
        state = one.add(request(id, prompt, output))
        assert (state.status, state.finish, state.finished_at) == ("finished", "refused", 0.0)
        assert state.reason == (
            f"prompt and max_tokens - 1 must be at most {most} tokens, max_length, "
            f"got {prompt} + {output - 1}; ask for fewer tokens"
        )
    small = server(1, num_blocks=2, block_size=4)
    assert "at most 8 tokens, what the whole pool holds" in small.add(request("a", 9, 1)).reason
    assert small.add(request("b", 8, 1)).finish == ""
    assert (one.drain(), small.drain()) == (9, 1)


def test_a_full_queue_pushes_back_and_opens_again() -> None:
    one = server(1, max_num_seqs=1, max_waiting=2)
    for id in "ab":
        one.add(request(id, 3, 2))
    with pytest.raises(QueueFull, match="at most 2 requests may wait"):
        one.scheduler.add(request("c", 3, 2), 0.0)
    assert "c" not in one.scheduler.states
    assert one.add(request("refused anyway", 999, 2)).finish == "refused"
    one.step()
    assert one.add(request("c", 3, 2)).status == "waiting"
    one.drain()


def test_an_id_is_one_request_at_a_time() -> None:
    one = server(1)
    one.add(request("a", 3, 2))
    with pytest.raises(ValueError, match="id must be unlike those under way, got 'a' again"):
        one.scheduler.add(request("a", 3, 2), 0.0)
    one.drain()
    assert one.add(request("a", 5, 2)).status == "waiting"
    one.drain()


def test_queue_goes_by_priority_then_arrival_then_order() -> None:
    one = server(1, max_num_seqs=1)
    for id, priority, arrival in (
        ("late", 0, 2.0),
        ("early", 0, 1.0),
        ("second", 0, 1.0),
        ("urgent", -3, 9.0),
        ("low", 1, 0.0),
    ):
        one.add(request(id, 3, 1, priority=priority, arrival=arrival))
    assert [state.id for state in one.scheduler.waiting] == [
        "urgent",
        "early",
        "second",
        "late",
        "low",
    ]
    one.drain()
    assert [id for plan in one.plans for id in plan.admitted] == [
        "urgent",
        "early",
        "second",
        "late",
        "low",
    ]


def test_preempted_request_returns_first_in_its_priority() -> None:
    """Also before one that arrived earlier and has not run yet."""
    one = server(
        1,
        num_blocks=4,
        block_size=2,
        policy="max_utilization",
        max_num_seqs=2,
        enable_prefix_caching=False,
        toy={"ends": False},
    )
    one.add(request("a", 3, 5, arrival=1.0))
    one.add(request("b", 3, 4, arrival=2.0))
    while not one.plans or not one.plans[-1].preempted:
        one.step()
    assert one.plans[-1].preempted == ("b",) and one.states["b"].preemptions == 1
    one.add(request("earlier", 3, 2, arrival=0.0))
    one.add(request("urgent", 3, 2, priority=-1, arrival=9.0))
    assert [s.id for s in one.scheduler.waiting] == ["urgent", "b", "earlier"]
    one.drain()


def test_a_deadline_ends_a_request_that_waits_or_runs() -> None:
    one = server(1, max_num_seqs=1, toy={"ends": False})
    one.add(request("runs", 3, 50, deadline=4.0))
    one.add(request("waits", 3, 50, deadline=2.0))
    one.add(request("after", 3, 2))
    late = one.add(request("late", 3, 2, deadline=0.0))
    assert (late.finish, late.reason) == ("deadline", "the deadline had passed on arrival")
    one.drain()
    assert [(p.step, p.expired) for p in one.plans if p.expired] == [
        (2, ("waits",)),
        (4, ("runs",)),
    ]
    states = one.states
    assert [(states[id].finish, states[id].emitted) for id in ("runs", "waits", "after")] == [
        ("deadline", 4),
        ("deadline", 0),
        ("length", 2),
    ]
    assert states["runs"].finished_at == 4.0 and one.plans[4].admitted == ("after",)


def test_times_are_those_of_the_clock() -> None:
    one = server(1, max_num_seqs=1, toy={"ends": False})
    one.clock.advance(5.0)
    one.add(request("a", 3, 3))
    one.add(request("b", 3, 1))
    one.drain()
    a, b = one.states["a"], one.states["b"]
    assert (a.admitted_at, a.first_token_at, a.finished_at) == (5.0, 6.0, 8.0)
    assert (b.admitted_at, b.first_token_at, b.finished_at) == (8.0, 9.0, 9.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelling_frees_the_blocks_wherever_the_request_is(policy: str) -> None:
    one = server(
        1, max_num_seqs=2, policy=policy, chunk=2, enable_prefix_caching=False, toy={"ends": False}
    )
    assert one.scheduler.cancel("nobody", 0.0) is None
    for id in ("decodes", "reads", "waits", "flies"):
        one.add(request(id, 2 if id == "decodes" else 9, 20))
    one.step()
    pool = one.scheduler.pool
    held = pool.held
    assert one.scheduler.cancel("waits", 1.0).finish == "cancelled" and pool.held == held
    assert one.scheduler.cancel("waits", 1.0) is None  # a second time is no error
    reading = len(one.states["reads"].blocks)
    one.scheduler.cancel("reads", 1.0)
    # A static batch keeps the row until its last one ends.
    assert pool.held == held - (0 if policy == "static" else reading)
    check(one.scheduler)
    one.scheduler.cancel("decodes", 1.0)
    assert pool.held == 0 and not one.states["decodes"].blocks
    # While a step is under way its blocks stay: the step writes into them.
    plan = one.scheduler.schedule(2.0)
    assert plan.admitted == ("flies",)
    one.scheduler.cancel("flies", 2.0)
    assert pool.held > 0 and one.scheduler.idle
    check(one.scheduler)
    again = one.add(request("flies", 3, 2))
    assert one.scheduler.commit(plan, {"flies": StepResult((5,))}, 3.0) == []
    assert pool.held == 0 and (again.computed, again.output) == (0, [])
    one.drain()


def test_a_block_is_shared_only_after_it_is_written() -> None:
    """Two equal prompts in one step share nothing; one step later they share all full blocks."""
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    one = server(
        1, block_size=2, chunk=3, max_num_batched_tokens=12, max_num_seqs=4, toy={"ends": False}
    )
    one.add(request("a", prompt, 4))
    one.add(request("b", prompt, 4))
    plan = one.scheduler.schedule(0.0)
    assert not set(plan.blocks["a"]) & set(plan.blocks["b"])
    assert not any(one.scheduler.pool.digest(block) for block in plan.blocks["a"])
    results = one.toy.step(plan, one.scheduler)
    one.scheduler.commit(plan, results, 1.0)
    a = one.states["a"]
    # 3 of 8 tokens are written: one full block.
    assert [one.scheduler.pool.digest(b) is not None for b in a.blocks] == [
        True,
        False,
        False,
        False,
    ]
    one.add(request("c", prompt, 4))
    one.step()
    assert one.states["c"].matched == 2 and one.states["c"].blocks[0] == a.blocks[0]
    while a.emitted < 1:
        one.step()
    # The last token of a prompt is always read: what follows it is not known.
    d = one.add(request("d", prompt, 4))
    one.step()
    assert d.matched == 6 and d.blocks[:3] == a.blocks[:3] and d.blocks[3] != a.blocks[3]
    one.drain()
    longer = one.add(request("e", [*prompt, *a.output], 4))
    one.step()
    assert longer.matched == 10  # of 12, of which the last was never read by anybody
    one.drain()


def test_rejected_tokens_are_neither_shared_nor_kept(seed: int) -> None:
    one = server(
        seed,
        block_size=1,
        max_num_seqs=1,
        max_num_batched_tokens=9,
        toy={"ends": False, "luck": 0.0},
    )
    state = one.add(request("a", 4, 12))
    one.step()
    while not one.scheduler.idle:
        before, wasted = state.emitted, state.wasted
        left = 12 - before - 1
        plan = one.step({"a": 5})
        assert plan.decodes[0].drafted == min(5, left)  # never past the end of the output
        assert (state.emitted, state.wasted - wasted) == (before + 1, min(5, left))
        assert len(state.blocks) in (0, len(state.tokens))
    assert one.scheduler.pool.cached == 4 + 12 - 1
    one.check_end()


def test_accepted_tokens_count_once(seed: int) -> None:
    one = server(seed, block_size=3, max_num_seqs=2, toy={"ends": False, "luck": 1.0})
    for id in "ab":
        one.add(request(id, 4, 13))
    one.step()
    steps = 0
    while not one.scheduler.idle:
        one.step({"a": 3})
        steps += 1
    a, b = one.states["a"], one.states["b"]
    assert (a.wasted, b.wasted, a.recomputed) == (0, 0, 0)
    assert (a.finished_at, b.finished_at) == (1.0 + 12 / 4, 1.0 + 12) and steps == 12
    one.check_end()


def test_a_failed_step_ends_its_requests_and_leaks_nothing() -> None:
    one = server(1, block_size=2, max_num_seqs=3, chunk=3, toy={"ends": False})
    for id, length in (("decodes", 2), ("reads", 9), ("lives", 2)):
        one.add(request(id, length, 9))
    one.step()
    one.step(fail=["decodes", "reads"])
    states = one.states
    assert [states[id].finish for id in ("decodes", "reads", "lives")] == ["error", "error", ""]
    assert states["decodes"].reason == "it was planted" and states["decodes"].emitted == 1
    # Nothing of it is trusted any more: an earlier chunk may have written what failed.
    again = one.add(request("again", list(states["reads"].request.prompt), 2))
    one.step()
    assert again.matched == 0
    one.drain()


def test_plans_are_committed_once_and_in_turn() -> None:
    one = server(1)
    scheduler = one.scheduler
    empty = scheduler.schedule(0.0)
    assert empty == StepPlan(step=0) and scheduler.commit(empty, {}, 0.0) == []
    one.add(request("a", 3, 3))
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="commit must follow schedule, and step 1 is open"):
        scheduler.schedule(0.0)
    before = (one.states["a"].computed, list(one.states["a"].tokens))
    for results, said in (
        ({}, "must bring 'a' 1 to 1 tokens, got 0"),
        ({"a": StepResult()}, "must bring 'a' 1 to 1 tokens, got 0"),
        ({"a": StepResult((1, 2))}, "must bring 'a' 1 to 1 tokens, got 2"),
        ({"a": StepResult((1,), "done")}, "finish must be one of"),
        ({"a": StepResult((1,)), "b": StepResult((1,))}, "the plan's requests, got one of 'b'"),
    ):
        with pytest.raises(ValueError, match=said):
            scheduler.commit(plan, results, 1.0)
        assert before == (one.states["a"].computed, one.states["a"].tokens)
    scheduler.commit(plan, {"a": StepResult((1,))}, 1.0)
    with pytest.raises(RuntimeError, match="must be committed once, in turn, got step 1"):
        scheduler.commit(plan, {"a": StepResult((1,))}, 1.0)
    check(scheduler)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"policy": "no_evict"},
            ValueError,
            "policy must be one of 'static', 'guaranteed_no_evict'",
        ),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 7}, ValueError, "must be at least max_num_seqs = 8, got 7"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"max_waiting": 0}, ValueError, "max_waiting must be at least 1"),
        ({"max_length": 1.5}, TypeError, "max_length must be a whole number"),
    ],
)
def test_settings_are_checked(options, error, said: str) -> None:
    with pytest.raises(error, match=said):
        Scheduler(BlockPool(4, 4), **options)


def _leak(scheduler: Scheduler) -> None:
    scheduler.pool.allocate(1)


def _forgotten(scheduler: Scheduler) -> None:
    scheduler.states.pop("a")


def _unwritten(scheduler: Scheduler) -> None:
    scheduler.pool.register(scheduler.states["a"].blocks[-1], b"x")


def _more_than_needed(scheduler: Scheduler) -> None:
    scheduler.states["a"].blocks += scheduler.pool.allocate(1)


def _more_than_promised(scheduler: Scheduler) -> None:
    state = scheduler.states.pop("waits")
    scheduler.waiting.remove(state)
    scheduler._leaving.append(state)
    state.blocks = scheduler.pool.allocate(scheduler.pool.available)


def _disorder(scheduler: Scheduler) -> None:
    scheduler.waiting.reverse()


def _too_many(scheduler: Scheduler) -> None:
    scheduler.max_num_seqs = 0


def _beyond(scheduler: Scheduler) -> None:
    scheduler.states["a"].computed = 99


def _waits_and_holds(scheduler: Scheduler) -> None:
    scheduler.states["waits"].blocks = [0]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_leak, "references are those of the requests"),
        (_forgotten, "each request is in one place"),
        (_unwritten, "a digest stands for tokens that are written"),
        (_more_than_needed, "nobody holds more than its tokens need"),
        (_more_than_promised, "what is promised is there"),
        (_disorder, "the queue is in order"),
        (_too_many, "at most max_num_seqs requests run"),
        (_beyond, "what is computed has blocks"),
        (_waits_and_holds, "those that wait hold nothing"),
    ],
)
def test_each_broken_invariant_is_named(harm, said: str) -> None:
    one = server(1, block_size=2, max_num_seqs=1, toy={"ends": False})
    one.add(request("a", 3, 9))
    one.step()
    one.add(request("waits", 3, 9))
    one.add(request("too", 3, 9))
    check(one.scheduler)
    harm(one.scheduler)
    with pytest.raises(RuntimeError, match=said):
        check(one.scheduler)
