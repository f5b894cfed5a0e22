"""What must hold of a scheduler at any time; tests ask after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labcore.serving.engine.blocks import blocks_for, chain_hashes
from labcore.serving.engine.requests import State

if TYPE_CHECKING:
    from labcore.serving.engine.scheduler import Scheduler

__all__ = ["check_invariants"]


def check_invariants(
    scheduler: Scheduler,
    waiting: Sequence[State],
    running: Sequence[State],
    leaving: Sequence[State],
    *,
    open: bool,
) -> None:
    """Raise RuntimeError that names the first invariant that does not hold, the pool's first.

    leaving: finished requests that still hold blocks. open: whether a step is under way, for which
    a request may hold more blocks than its tokens need.
    """
    scheduler.pool.check()
    pool, page = scheduler.pool, scheduler.pool.page
    holding = [*running, *leaving]
    held = Counter(block for state in holding for block in state.blocks)
    broken = {
        "references are those of the requests": all(
            pool.references(block) == held[block] for block in range(pool.count)
        ),
        "each request is in one place": (
            Counter(state.id for state in (*waiting, *running)) == Counter(scheduler.states.keys())
        ),
        "those that wait hold nothing": not any(state.blocks for state in waiting),
        "at most `slots` requests run": len(running) <= scheduler.slots,
        "the queue is in order": [s.place for s in waiting] == sorted(s.place for s in waiting),
        "what is computed has blocks": all(
            state.computed <= len(state.blocks) * page for state in running
        ),
        "nobody holds more than its tokens need": open
        or all(len(state.blocks) <= blocks_for(len(state.tokens), page) for state in running),
        "a digest stands for tokens that are written": all(
            _written(scheduler, state) for state in holding
        ),
        "what is promised is there": (scheduler.policy.promised(running, page) <= pool.available),
    }
    for rule, holds in broken.items():
        if not holds:
            raise RuntimeError(f"the scheduler's invariant must hold, and does not: {rule}")


def _written(scheduler: Scheduler, state: State) -> bool:
    pool, page = scheduler.pool, scheduler.pool.page
    chain = chain_hashes(state.tokens, page, scheduler.salt)
    for place, block in enumerate(state.blocks):
        digest = pool.digest(block)
        full = (place + 1) * page <= state.computed
        if digest is not None and not (full and digest == chain[place]):
            return False
    return True
