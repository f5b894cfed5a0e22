"""Whatever comes in whatever order: arrivals, cancels, deadlines, failures, drafts, tiny pools.

5,000 steps of the scheduler; LABCORE_SOAK=1: 100,000.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import ClassVar

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from labcore.serving.engine.blocks import blocks_for
from labcore.serving.engine.scheduler import POLICIES, QueueFull
from tests.serving.invariants import check
from tests.serving.toy import Server, request, server

STEPS = 100_000 if os.environ.get("LABCORE_SOAK") == "1" else 5_000
SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SMALL = st.integers(1, 6)
ASKED = st.tuples(
    st.lists(st.integers(1, 2), min_size=1, max_size=6),  # prompt: many have the same beginning
    st.integers(1, 9),  # most tokens of the output
    st.integers(0, 2),  # priority
    st.none() | st.none() | st.none() | st.integers(1, 9),  # seconds to the deadline
    st.integers(0, 3),  # seconds since its arrival
)
WHO = st.lists(st.integers(0, 5), max_size=2)  # by their place among those under way


class Serving(RuleBasedStateMachine):
    """`Server.step` checks every invariant after each half of a step, `check_end` the outputs."""

    seen: ClassVar[Counter[str]] = Counter()
    one: Server

    @initialize(
        seed=st.integers(0, 2**31),
        policy=st.sampled_from([*POLICIES, "max_utilization"]),
        size=st.integers(1, 4),
        spare=st.integers(0, 3),
        slots=st.integers(1, 5),
        more=st.integers(0, 12),
        chunk=st.none() | SMALL,
        share=st.booleans(),
        luck=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def begin(self, seed, policy, size, spare, slots, more, chunk, share, luck) -> None:
        self.one = server(
            seed,
            block_size=size,
            num_blocks=blocks_for(10, size) + spare,
            policy=policy,
            max_num_seqs=slots,
            max_num_batched_tokens=slots + more,
            chunk=chunk,
            enable_prefix_caching=share,
            max_waiting=6,
            toy={"luck": luck, "ends": seed % 2 == 0},
        )
        self.number = 0

    @rule(crowd=st.lists(ASKED, min_size=1, max_size=4))
    def add(self, crowd) -> None:
        scheduler, now = self.one.scheduler, self.one.clock.now()
        whole = scheduler.pool.num_blocks * scheduler.pool.block_size
        for prompt, output, priority, patience, age in crowd:
            asked = request(
                str(self.number),
                prompt,
                output,
                priority=priority,
                arrival=now - age,
                deadline=None if patience is None else now + patience,
            )
            full = len(scheduler.waiting) >= 6
            try:
                state = self.one.add(asked)
            except QueueFull:
                assert full
                self.seen["full"] += 1
                continue
            self.number += 1
            assert (state.finish == "refused") == (asked.longest > whole)
            assert state.finish in ("", "refused", "deadline")
            check(scheduler)

    @rule(who=WHO)
    def cancel(self, who) -> None:
        scheduler = self.one.scheduler
        for id in [*self._names(who), "nobody"]:
            state = scheduler.cancel(id, self.one.clock.now())
            assert (state is None) == (id == "nobody")
            assert state is None or state.finish == "cancelled"
            check(scheduler)

    def _names(self, who) -> list[str]:
        ids = list(self.one.scheduler.states)
        return [id for place, id in enumerate(ids) if place in who]

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds) -> None:
        self.one.clock.advance(seconds)

    @rule(drafts=st.lists(st.integers(0, 5), max_size=5))
    def step(self, drafts) -> None:
        self._step(drafts)

    @rule(count=st.integers(1, 9), drafts=st.lists(st.integers(0, 5), max_size=5))
    def steps_in_a_row(self, count, drafts) -> None:
        for _ in range(count):
            self._step(drafts)

    @rule(cancel=WHO, fail=WHO)
    def troubled_step(self, cancel, fail) -> None:
        self._step([], cancel=self._names(cancel), fail=self._names(fail))

    def _step(self, drafts, *, cancel=(), fail=()) -> None:
        ids = [state.id for state in self.one.scheduler.running]
        plan = self.one.step(dict(zip(ids, drafts, strict=False)), cancel=cancel, fail=fail)
        self.seen["cancelled in a step"] += len(set(cancel) & set(plan.blocks))
        self.seen["drafted"] += sum(decode.drafted for decode in plan.decodes)

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        self.one.drain(2000)
        plans, states = self.one.plans, self.one.states.values()
        self.seen["steps"] += sum(plan.tokens > 0 for plan in plans)
        for kind in ("preempted", "expired", "idle"):
            self.seen[kind] += sum(len(getattr(plan, kind)) for plan in plans)
        for count in ("recomputed", "wasted", "matched"):
            self.seen[count] += sum(getattr(state, count) for state in states)
        self.seen.update(state.finish for state in states)


def test_nothing_breaks_whatever_comes(seed: int) -> None:
    Serving.seen = Counter()
    turn = 0
    while Serving.seen["steps"] < STEPS:
        run_state_machine_as_test(hypothesis.seed(seed + turn)(Serving), settings=SETTINGS)
        turn += 1
    print(dict(Serving.seen))
    kinds = ["full", "cancelled in a step", "drafted", "preempted", "expired", "idle", "recomputed"]
    kinds += ["wasted", "matched", "eos", "length", "cancelled", "deadline", "refused", "error"]
    assert all(Serving.seen[kind] for kind in kinds)
