"""What each capacity policy promises, and what people complain about in schedulers."""

import random
from collections.abc import Sequence

import pytest

from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.scheduler import POLICIES, Scheduler
from tests.serving.toy import Server, request, server


class WatchedPool(BlockPool):
    """Notes what each release makes available."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.releases: list[tuple[tuple[int, ...], int]] = []

    def release(self, blocks: Sequence[int]) -> None:
        before = self.available
        super().release(blocks)
        self.releases.append((tuple(blocks), self.available - before))


def watched(one: Server) -> WatchedPool:
    """Put a watched pool in the place of a fresh server's."""
    pool = WatchedPool(one.scheduler.pool.num_blocks, one.scheduler.pool.block_size)
    one.scheduler.pool = pool
    return pool


def bound(scheduler: Scheduler) -> int:
    """Steps after which the last of the queue runs, when nobody senior comes in.

    With promises each step reads a token of those before it, so at most as many steps as these may
    read. Without, they may read some again, but every preemption makes room for a new token and
    nobody loses one.
    """
    states = scheduler.states.values()
    longest = [state.request.longest for state in states]
    if scheduler.policy.promises:
        return sum(longest)
    emit = sum(s.request.sampling.max_tokens - s.emitted for s in states)
    return (emit + 1) * (scheduler.max_num_seqs * max(longest) + 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_waiting_request_runs_within_the_bound(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(12):
        block_size = rng.randrange(1, 4)
        one = server(
            seed + turn,
            block_size=block_size,
            num_blocks=blocks_for(20, block_size) + rng.randrange(3),
            policy=policy,
            max_num_seqs=4,
            max_num_batched_tokens=rng.choice([4, 5, 30]),
            chunk=rng.choice([None, 2]),
            enable_prefix_caching=rng.random() < 0.5,
            toy={"ends": False},
        )
        latest: dict[str, int] = {}
        crowd = turn % 2  # all at once, so that seniors by priority are among those before it
        for number in range(10):
            id, priority = str(number), rng.randrange(3) * crowd
            one.add(request(id, rng.randrange(1, 11), rng.randrange(1, 11), priority=priority))
            latest[id] = len(one.plans) + bound(one.scheduler)
            for _ in range(0 if crowd else rng.randrange(3)):
                one.step()
        if crowd:
            latest = dict.fromkeys(latest, bound(one.scheduler))
        one.drain()
        first = {id: p.step for p in reversed(one.plans) for id in p.admitted}
        assert all(first[id] <= latest[id] for id in latest)


def test_the_bound_is_reached_by_a_queue_of_one_slot() -> None:
    """So it cannot be stated smaller: each step reads one token."""
    one = server(1, max_num_seqs=1, max_num_batched_tokens=1, chunk=1, toy={"ends": False})
    for id in "abc":
        one.add(request(id, 4, 5))
    most = sum(one.states[id].request.longest for id in "ab")
    one.drain()
    assert next(p.step for p in one.plans if "c" in p.admitted) == most == 16


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict"])
def test_a_promise_is_kept(policy: str, seed: int) -> None:
    """Nobody is preempted, though drafts and shared prefixes come and go."""
    rng = random.Random(seed)
    one = server(
        seed, block_size=2, num_blocks=16, policy=policy, max_num_seqs=5, max_num_batched_tokens=9
    )
    for number in range(40):
        prompt = [1, 2, 3, 4, 5, 6, 1, 2][: rng.randrange(1, 9)]
        one.add(request(str(number), prompt, rng.randrange(1, 20)))
        one.step({str(n): rng.randrange(5) for n in range(40)})
    one.drain()
    assert not any(p.preempted for p in one.plans)
    assert {s.preemptions for s in one.states.values()} == {0}


def test_a_static_batch_admits_nobody_until_its_last_one_ends() -> None:
    one = server(1, policy="static", max_num_seqs=3, toy={"ends": False})
    for id, output in (("short", 2), ("long", 9), ("mid", 5), ("next", 1)):
        one.add(request(id, 3, output))
    one.drain()
    assert [p.admitted for p in one.plans if p.admitted] == [("short", "long", "mid"), ("next",)]
    assert one.plans[9].admitted == ("next",)
    # Idle rows: what a finished request leaves unused.
    assert sum(len(p.idle) for p in one.plans) == (9 - 2) + (9 - 5)
    inflight = server(1, max_num_seqs=3, toy={"ends": False})
    for id, output in (("short", 2), ("long", 9), ("mid", 5), ("next", 1)):
        inflight.add(request(id, 3, output))
    inflight.drain()
    assert inflight.plans[2].admitted == ("next",) and not any(p.idle for p in inflight.plans)


def test_static_batch_fills_though_prompts_take_several_steps() -> None:
    one = server(1, policy="static", max_num_seqs=3, max_num_batched_tokens=10, toy={"ends": False})
    for id in "abcd":
        one.add(request(id, 9, 2))
    assert one.step().admitted == ("a", "b", "c")
    one.drain()


def test_what_a_static_row_held_is_free_when_the_batch_ends() -> None:
    one = server(
        1,
        policy="static",
        max_num_seqs=2,
        block_size=2,
        enable_prefix_caching=False,
        toy={"ends": False},
    )
    one.add(request("short", 3, 2))
    one.add(request("long", 3, 6))
    while not one.scheduler.idle:
        held = one.scheduler.pool.held
        assert held >= len(one.states["short"].blocks)
        assert one.states["short"].blocks or not one.plans
        one.step()
    assert one.scheduler.pool.free == one.scheduler.pool.num_blocks


def test_every_preemption_frees_something(seed: int) -> None:
    """Most blocks are shared here: equal prompts, of which the first ones are read already."""
    rng = random.Random(seed)
    preempted = 0
    for turn in range(10):
        one = server(
            seed + turn,
            block_size=2,
            num_blocks=12,
            policy="max_utilization",
            max_num_seqs=6,
            max_num_batched_tokens=20,
            toy={"ends": False},
        )
        pool = watched(one)
        common = [rng.randrange(1, 7) for _ in range(8)]
        for number in range(12):
            one.add(request(str(number), common, rng.randrange(1, 14)))
        while not one.scheduler.idle:
            blocks = {s.id: tuple(s.blocks) for s in one.scheduler.running}
            pool.releases.clear()
            plan = one.step()
            for id in plan.preempted:
                assert dict(pool.releases)[blocks[id]] > 0
            preempted += len(plan.preempted)
        one.check_end()
    assert preempted > 0


def test_a_victim_that_would_free_nothing_is_passed_over() -> None:
    """The most junior, whose blocks are all shared, stays; one of higher priority goes."""
    one = server(
        1, block_size=2, num_blocks=5, policy="max_utilization", max_num_seqs=3, toy={"ends": False}
    )
    one.add(request("a", [1, 2, 3], 4))
    one.step()
    one.add(request("b", [4, 5, 6], 4, priority=3))
    one.step()
    one.step()
    a, b = one.states["a"], one.states["b"]
    assert (a.computed, b.computed, one.scheduler.pool.available) == (5, 4, 0)
    # b needs a third block. Others hold its two full ones, as rows with its prefix do.
    one.scheduler.pool.share(b.blocks)
    one.scheduler.pool.share(a.blocks)
    with pytest.raises(RuntimeError, match="'max_utilization' must leave blocks"):
        one.scheduler.schedule(9.0)
    one.scheduler.pool.release(a.blocks)
    assert one.scheduler.schedule(9.0).preempted == ("a",)
    assert (a.preemptions, b.preemptions, len(b.blocks)) == (1, 0, 3)


def test_preemption_never_goes_round_in_circles(seed: int) -> None:
    """Each step brings a new token or reads a prompt on: two that do not fit end all the same."""
    for chunk in (1, 2, None):
        one = server(
            seed,
            block_size=1,
            num_blocks=16,
            policy="max_utilization",
            max_num_seqs=2,
            max_num_batched_tokens=4,
            chunk=chunk,
            enable_prefix_caching=False,
            toy={"ends": False},
        )
        for id in "ab":
            one.add(request(id, 5, 12))
        dry = 0
        while not one.scheduler.idle:
            before = sum(state.emitted for state in one.states.values())
            one.step()
            after = sum(state.emitted for state in one.states.values())
            dry = 0 if after > before else dry + 1
            assert dry <= 2 * 16 + 2
        assert sum(state.preemptions for state in one.states.values()) > 0
        assert sum(s.recomputed for s in one.states.values()) > 0
        one.check_end()


def test_recomputed_tokens_are_those_that_were_read_before(seed: int) -> None:
    for share in (False, True):
        one = server(
            seed,
            block_size=2,
            num_blocks=9,
            policy="max_utilization",
            max_num_seqs=3,
            enable_prefix_caching=share,
            toy={"ends": False},
        )
        for id in "abc":
            one.add(request(id, 4, 12))
        one.drain()
        states = one.states.values()
        recomputed = sum(state.recomputed for state in states)
        # Every token but an output's last is read once, and those again that were lost.
        assert one.toy.read == sum(s.request.longest for s in states) + recomputed
        assert recomputed > 0 and all(s.preemptions or not s.recomputed for s in states)


def test_what_a_victim_wrote_may_be_found_again() -> None:
    """With shared prefixes the blocks of a victim stay cached until somebody needs them."""
    recomputed = {}
    for share in (False, True):
        one = server(
            1,
            block_size=2,
            num_blocks=9,
            policy="max_utilization",
            max_num_seqs=3,
            enable_prefix_caching=share,
            toy={"ends": False},
        )
        for id in "abc":
            one.add(request(id, 4, 12))
        one.drain()
        recomputed[share] = sum(state.recomputed for state in one.states.values())
    assert recomputed[True] < recomputed[False]


# --- complaints about schedulers elsewhere -----------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_larger_than_the_pool_does_not_hang(policy: str) -> None:
    one = server(1, num_blocks=4, block_size=4, policy=policy, toy={"ends": False})
    assert one.add(request("large", 17, 1)).finish == "refused"
    assert one.add(request("largest", 10, 7)).finish == ""
    assert one.drain() == 7


@pytest.mark.parametrize("policy", POLICIES)
def test_no_block_leaks_however_requests_end(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    one = server(
        seed,
        num_blocks=12,
        block_size=3,
        policy=policy,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        enable_prefix_caching=False,
    )
    for number in range(60):
        deadline = one.clock.now() + rng.randrange(9) if rng.random() < 0.3 else None
        one.add(request(str(number), rng.randrange(1, 12), rng.randrange(1, 14), deadline=deadline))
        if one.scheduler.states and rng.random() < 0.2:
            one.scheduler.cancel(rng.choice([*one.scheduler.states]), one.clock.now())
        running = [state.id for state in one.scheduler.running]
        trouble = rng.choices(running, k=2) if running else ["nobody"]
        one.step(
            {id: rng.randrange(4) for id in running},
            cancel=trouble[:1] if rng.random() < 0.2 else (),
            fail=trouble[1:] if rng.random() < 0.2 else (),
        )
    one.drain()
    assert one.scheduler.pool.free == 12
    finishes = {state.finish for state in one.states.values()}
    assert finishes >= {"length", "cancelled", "error"}


def test_huge_max_tokens_blocks_others_only_if_room_is_promised() -> None:
    """Under no-evict the others wait until it ends; under max-utilization they run beside it."""
    admitted = {}
    for policy in ("guaranteed_no_evict", "max_utilization"):
        one = server(
            1, num_blocks=16, block_size=4, policy=policy, max_num_seqs=4, toy={"ends": False}
        )
        one.add(request("huge", 4, 60))
        for id in "abc":
            one.add(request(id, 4, 4))
        one.step()
        admitted[policy] = [state.id for state in one.scheduler.running]
        one.drain()
        assert one.states["a"].finished_at == (64.0 if policy == "guaranteed_no_evict" else 4.0)
    assert admitted == {"guaranteed_no_evict": ["huge"], "max_utilization": ["huge", "a", "b", "c"]}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_long_prompt_starves_nobody(policy: str) -> None:
    """With chunks below the budget a short one comes in beside it, and outputs go on."""
    one = server(
        1,
        num_blocks=300,
        block_size=4,
        policy=policy,
        max_num_batched_tokens=20,
        chunk=10,
        max_num_seqs=3,
        toy={"ends": False},
    )
    one.add(request("talks", 2, 40))
    one.step()
    one.add(request("long", 500, 2))
    one.step()
    one.add(request("short", 5, 3))
    for _ in range(3):
        one.step()
    talks, long, short = (one.states[id] for id in ("talks", "long", "short"))
    assert (short.finish, talks.emitted, long.computed) == ("length", 5, 40)
    one.drain()
    # Whole-prompt reading: the same short one waits for all of the long one.
    whole = server(
        1,
        num_blocks=300,
        block_size=4,
        policy=policy,
        max_num_batched_tokens=20,
        max_num_seqs=3,
        toy={"ends": False},
    )
    whole.add(request("long", 500, 2))
    whole.step()
    whole.add(request("short", 5, 3))
    whole.drain()
    assert whole.states["short"].first_token_at >= 500 / 20


def test_blocks_taken_behind_the_schedulers_back_are_told() -> None:
    one = server(1, num_blocks=4, block_size=2, toy={"ends": False})
    one.add(request("a", 2, 6))
    one.step()
    one.scheduler.pool.allocate(3)
    with pytest.raises(RuntimeError, match="'guaranteed_no_evict' must leave blocks"):
        one.scheduler.schedule(1.0)
