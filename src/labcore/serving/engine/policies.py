"""Capacity policies: who is admitted into the pool, and who leaves it when it is full.

"static": a batch comes in when nothing runs, and its slots are given anew when its last one ends.
"guaranteed_no_evict": a request comes in when its prompt and the longest output that it may have
fit beside all that is promised to the running; nobody is ever preempted.
"max_utilization": a request comes in when its tokens so far fit; when the pool is full, a victim
loses its blocks and reads its tokens again later.
Source: the names and what they promise are those of TensorRT-LLM's capacity schedulers; preemption
by recomputation is Kwon et al., 2023, arXiv 2309.06180; admission at every step is Orca's (Yu et
al., 2022, OSDI).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from labcore.checks import one_of
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.requests import State

__all__ = ["POLICIES", "VICTIMS", "Policy", "choose_victim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a scheduler deals out the blocks of its pool.

    name: by which it is asked for. promises: whether a request is admitted with blocks for its
    longest output, so that it is never preempted. batches: whether requests are admitted only when
    nothing runs, and finished ones keep slot and blocks until the last one of the batch ends.
    Raises ValueError for a batch without promises: its finished ones would hold what others lack.

    How long the head of the queue waits, when nobody senior comes in: with promises each step reads
    a token of those before it, so at most as many steps as these may read, the sum of
    `Request.longest`. Without, they may read some again, but every preemption makes room for a new
    token and nobody loses one: at most (T + 1) (slots L + 2) steps, T the tokens that they may yet
    emit in all, L the longest of them.
    """

    name: str
    promises: bool
    batches: bool = False

    def __post_init__(self) -> None:
        if self.batches and not self.promises:
            raise ValueError(
                "a policy that batches must promise, got promises=False; finished requests would "
                "hold blocks that the running lack"
            )

    def wants(self, state: State, page: int) -> int:
        """Blocks, of `page` tokens, that `state` needs in all to be admitted."""
        if self.promises:
            return blocks_for(state.request.longest, page)
        return blocks_for(len(state.tokens), page)

    def promised(self, running: Iterable[State], page: int) -> int:
        """Blocks that the running may still ask for and that are theirs already."""
        if not self.promises:
            return 0
        return sum(self.wants(state, page) - len(state.blocks) for state in running)

    def admits(
        self, state: State, shared: Sequence[int], running: Iterable[State], pool: BlockPool
    ) -> bool:
        """Whether `state` fits beside the running when it finds the blocks `shared` in the pool."""
        revived = sum(not pool.references(block) for block in shared)
        needed = self.wants(state, pool.page) - len(shared)
        return self.promised(running, pool.page) + needed <= pool.available - revived


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="static", promises=True, batches=True),
        Policy(name="guaranteed_no_evict", promises=True),
        Policy(name="max_utilization", promises=False),
    )
}
"""The capacity policies by name."""


def _newest(state: State) -> tuple[float, ...]:
    return state.request.arrival, state.order


def _lowest_priority(state: State) -> tuple[float, ...]:
    return state.seniority


def _fewest_computed(state: State) -> tuple[float, ...]:
    return -state.computed, state.request.arrival, state.order


VICTIMS: dict[str, Callable[[State], tuple[float, ...]]] = {
    "newest": _newest,
    "lowest_priority": _lowest_priority,
    "fewest_computed": _fewest_computed,
}
"""Who is preempted: of those that free something, the one with the largest key."""


def choose_victim(
    rule: str, running: Iterable[State], pool: BlockPool, priority: int | None = None
) -> State | None:
    """Who of the running is preempted by `rule`, a name of `VICTIMS`; None where nobody would do.

    Only one that frees a block is chosen: blocks that others hold too stay where they are.
    priority: of the request that lacks a block; of those with a higher one (a smaller number) a
    victim is taken only where nobody else frees any. None: all are alike.
    """
    key = VICTIMS[one_of("victim", rule, VICTIMS)]
    useful = [
        state for state in running if any(pool.references(block) == 1 for block in state.blocks)
    ]
    if priority is not None:
        useful = [state for state in useful if state.request.priority >= priority] or useful
    return max(useful, key=key, default=None)
