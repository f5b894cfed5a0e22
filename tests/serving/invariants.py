"""What must hold of a pool and a scheduler at any time; tests ask after each step."""

from __future__ import annotations

from collections import Counter

from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes
from labcore.serving.engine.request import State
from labcore.serving.engine.scheduler import Scheduler


def check_pool(pool: BlockPool) -> None:
    """Raise RuntimeError with the first invariant of a pool that doesn't hold."""
    free, cached = set(pool._free), set(pool._cached)
    held = {block for block, count in enumerate(pool._references) if count > 0}
    blocks = set(range(pool.num_blocks))
    _raise(
        {
            "no block is twice in the free list": len(free) == len(pool._free),
            "no block has a negative reference count": min(pool._references) >= 0,
            "no block is both free and cached": not free & cached,
            "a held block is neither free nor cached": not held & (free | cached),
            "free + held + cached is the pool": free | held | cached == blocks,
            "a cached block has a digest": cached <= set(pool._digest),
            "a free block has no digest": not free & set(pool._digest),
            "a digest and its block refer to each other": (
                {digest: block for block, digest in pool._digest.items()} == pool._block
                and len(pool._digest) == len(pool._block)
            ),
        }
    )


def check(scheduler: Scheduler) -> None:
    """Raise RuntimeError with the first invariant that doesn't hold, the pool's first.

    During a step, a request may hold more blocks than its tokens need.
    """
    check_pool(scheduler.pool)
    pool, size = scheduler.pool, scheduler.pool.block_size
    waiting, running = scheduler.waiting, scheduler.running
    holding = [*running, *scheduler._leaving]
    held = Counter(block for state in holding for block in state.blocks)
    _raise(
        {
            "references are those of the requests": all(
                pool.references(block) == held[block] for block in range(pool.num_blocks)
            ),
            "each request is in one place": (
                Counter(state.id for state in (*waiting, *running))
                == Counter(scheduler.states.keys())
            ),
            "those that wait hold nothing": not any(state.blocks for state in waiting),
            "at most max_num_seqs requests run": len(running) <= scheduler.max_num_seqs,
            "the queue is in order": [s.place for s in waiting] == sorted(s.place for s in waiting),
            "what is computed has blocks": all(
                state.computed <= len(state.blocks) * size for state in running
            ),
            "nobody holds more than its tokens need": scheduler._open is not None
            or all(len(state.blocks) <= blocks_for(len(state.tokens), size) for state in running),
            "a digest stands for tokens that are written": all(
                _written(pool, state) for state in holding
            ),
            "what is promised is there": (
                scheduler.policy.promised(running, size) <= pool.available
            ),
        }
    )


def _written(pool: BlockPool, state: State) -> bool:
    chain = chain_hashes(state.tokens, pool.block_size)
    for place, block in enumerate(state.blocks):
        digest = pool.digest(block)
        full = (place + 1) * pool.block_size <= state.computed
        if digest is not None and not (full and digest == chain[place]):
            return False
    return True


def _raise(rules: dict[str, bool]) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise RuntimeError(f"an invariant is broken: {rule}")
