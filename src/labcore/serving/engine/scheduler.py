"""Iteration-level scheduling: before each step, who reads how many tokens in which blocks.

The policies have the names and promises of TensorRT-LLM's capacity schedulers. "static" admits a
batch when nothing runs, and its slots are free again when its last request ends.
"guaranteed_no_evict" admits a request if its prompt and its longest possible output fit beside
everything promised to the running, so nobody is ever preempted. "max_utilization" admits a request
if its tokens so far fit; when the pool is full, the most junior request loses its blocks and later
reads again what is no longer cached (Kwon et al., 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from labcore.checks import one_of, positive_int
from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes
from labcore.serving.engine.plan import Chunk, Decode, StepPlan, StepResult
from labcore.serving.engine.request import Request, State

__all__ = ["POLICIES", "Policy", "QueueFull", "Scheduler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a scheduler deals out slots and blocks.

    promises: a request is admitted if its longest output fits, so it's never preempted. batches:
    finished requests keep slot and blocks until the last one of their batch ends.
    """

    promises: bool
    batches: bool = False

    def wants(self, state: State, block_size: int) -> int:
        """Return how many blocks `state` needs in all to be admitted."""
        return blocks_for(state.request.longest if self.promises else len(state.tokens), block_size)

    def promised(self, running: Iterable[State], block_size: int) -> int:
        """Return how many blocks the running may still ask for that are promised to them."""
        lacking = (self.wants(state, block_size) - len(state.blocks) for state in running)
        return sum(lacking) if self.promises else 0


POLICIES = {
    "static": Policy(promises=True, batches=True),
    "guaranteed_no_evict": Policy(promises=True),
    "max_utilization": Policy(promises=False),
}


class QueueFull(RuntimeError):
    """The waiting queue is full: come back later, or ask another replica."""


class Scheduler:
    """Decides before each step who reads what; touches no tensor and asks no clock.

    A step deals out `max_num_batched_tokens` tokens and the blocks of `pool` in this order: one
    token for each request that decodes, the rest of the prompts under way, prompts of those that
    come in, and then drafted tokens. So no prompt, however long, keeps an output waiting (Agrawal
    et al., 2024, arXiv 2403.02310). Within each, the senior goes first: by priority, arrival, order
    of adding. Nobody is admitted in a step that preempted.

    The queue is not skipped: a head that doesn't fit yet holds up everyone after it, or a large
    request would wait as long as small ones come. So with promises, one huge max_tokens keeps
    others out: let `max_length` refuse it, or promise nothing.

    pool: the blocks. policy: a name of `POLICIES`. max_num_seqs: the most requests that run at
    once. max_num_batched_tokens: the most tokens per step, at least max_num_seqs. chunk: the most
    tokens of one prompt per step; None means max_num_batched_tokens. max_waiting: the most requests
    in the queue; preempted ones always come back. max_length: the most tokens of a request, without
    the last of its output; None means the whole pool. enable_prefix_caching: whether later requests
    with the same prefix find its full blocks.
    states: all requests that haven't finished, by id. waiting: the queue, its head first. running:
    those that hold a slot and haven't finished, the seniors first.
    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: str = "guaranteed_no_evict",
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        chunk: int | None = None,
        max_waiting: int = 1024,
        max_length: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.policy_name = one_of("policy", policy, POLICIES)
        self.policy = POLICIES[policy]
        self.max_num_seqs = positive_int("max_num_seqs", max_num_seqs)
        self.max_num_batched_tokens = positive_int("max_num_batched_tokens", max_num_batched_tokens)
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs = {max_num_seqs}, got "
                f"{max_num_batched_tokens}; each running request takes a token per step"
            )
        self.chunk = positive_int("chunk", max_num_batched_tokens if chunk is None else chunk)
        self.max_waiting = positive_int("max_waiting", max_waiting)
        self._whole = pool.num_blocks * pool.block_size
        most = self._whole if max_length is None else max_length
        self.max_length = positive_int("max_length", most)
        self.enable_prefix_caching = enable_prefix_caching
        self.states: dict[str, State] = {}
        self.waiting: list[State] = []
        self.running: list[State] = []
        self._leaving: list[State] = []  # finished, and still holding blocks
        self._open: StepPlan | None = None  # scheduled and not committed
        self._reading: list[tuple[Chunk | Decode, State]] = []  # what the open plan reads
        self._steps, self._orders = count(), count()

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self.states

    def add(self, request: Request, now: float) -> State:
        """Take in a request and return its state, finished already if it can never run.

        now: seconds on the engine's clock. Raises QueueFull if max_waiting requests wait, and
        ValueError if a request with this id is under way.
        """
        if request.id in self.states:
            raise ValueError(
                f"id must be unlike those under way, got {request.id!r} again; wait for its end"
            )
        state = State(request, order=next(self._orders))
        most = min(self.max_length, self._whole)
        if request.longest > most:
            what = "max_length" if most < self._whole else "what the whole pool holds"
            reason = (
                f"prompt and max_tokens - 1 must be at most {most} tokens, {what}, got "
                f"{len(request.prompt)} + {request.sampling.max_tokens - 1}; ask for fewer tokens"
            )
            self._finish(state, "refused", reason, now)
        elif request.expired(now):
            self._finish(state, "deadline", "the deadline had passed on arrival", now)
        elif len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"at most {self.max_waiting} requests may wait; try again later")
        else:
            self.states[request.id] = state
            insort(self.waiting, state, key=attrgetter("place"))
        return state

    def cancel(self, id: str, now: float) -> State | None:
        """End a request wherever it is; return its state, or None if it isn't under way.

        Its blocks are free at once, or after the commit of an open step, or the end of a batch.
        """
        if state := self.states.get(id):
            self._finish(state, "cancelled", "", now)
            self._release_leaving()
        return state

    def schedule(self, now: float, drafts: Mapping[str, int] | None = None) -> StepPlan:
        """Return what the next step does; a plan with tokens must be committed before the next.

        now: seconds on the engine's clock. drafts: how many tokens were drafted after a request's
        output. It reads as many of them as output, budget and blocks leave room for, and never
        costs another its blocks.
        Raises RuntimeError while a plan is open.
        """
        if self._open is not None:
            raise RuntimeError(f"commit must follow schedule, and step {self._open.step} is open")
        expired = [state for state in self.states.values() if state.request.expired(now)]
        for state in expired:
            self._finish(state, "deadline", "the deadline passed", now)
        self._release_leaving()
        preempted = self._preempt()
        decoding = [state for state in self.running if state.decoding]
        for state in decoding:
            state.blocks += self.pool.allocate(self._lacking(state))
        left = self.max_num_batched_tokens - len(decoding)
        chunks: list[Chunk] = []
        for state in self.running:
            if not state.decoding:
                left -= self._read(state, left, chunks)
        admitted, batches = [], self.policy.batches
        if not preempted and not (batches and self.running):
            # A batch is filled even if its prompts take several steps.
            while (left or batches) and (head := self._admit(now)):
                left -= self._read(head, left, chunks)
                admitted.append(head.id)
        decodes = self._draft(decoding, drafts or {}, left)
        reads: list[Chunk | Decode] = [*chunks, *decodes]
        self._reading = [(one, self.states[one.id]) for one in reads]
        plan = StepPlan(
            step=next(self._steps),
            chunks=tuple(chunks),
            decodes=tuple(decodes),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            expired=tuple(state.id for state in expired),
            idle=tuple(state.id for state in self._leaving),
            blocks={state.id: tuple(state.blocks) for _, state in self._reading},
        )
        self._open = plan if plan.tokens else None
        return plan

    def commit(self, plan: StepPlan, results: Mapping[str, StepResult], now: float) -> list[State]:
        """Take in what a step brought; return the requests that it finished.

        results: for every decode and every last chunk; requests that were cancelled since the plan
        was made are passed over. An output that reaches max_tokens ends with "length" here. A
        request with the finish "error" keeps no token of the step, and nobody finds its blocks any
        more: an earlier step may have written what failed.
        Raises RuntimeError for a plan that isn't open, and ValueError, changing nothing, for
        results that don't fit it.
        """
        if not plan.tokens:
            return []
        if plan is not self._open:
            raise RuntimeError(f"a plan must be committed once, in turn, got step {plan.step}")
        reading = [(one, state) for one, state in self._reading if state.status == "running"]
        plan.check(results, [one.id for one, _ in reading])
        self._open, self._reading = None, []
        for one, state in reading:
            result = results.get(one.id, StepResult())
            if result.finish == "error":
                self.pool.forget(state.blocks)
            else:
                self._take(state, one, result, now)
            if result.finish or state.emitted == state.request.sampling.max_tokens:
                self._finish(state, result.finish or "length", result.reason, now)
        self._release_leaving()
        return [state for _, state in reading if state.status == "finished"]

    def _preempt(self) -> list[str]:
        """Take blocks from the most junior until the next token of each decode has its block."""
        preempted = []
        while sum(map(self._lacking, self.running)) > self.pool.available:
            # One whose blocks are all shared would free nothing.
            useful = [s for s in self.running if 1 in map(self.pool.references, s.blocks)]
            if self.policy.promises or not useful or len(self.running) == 1:
                raise RuntimeError(
                    f"the policy {self.policy_name!r} must leave blocks for those that run; "
                    "release and allocate no block without the scheduler"
                )
            victim = useful[-1]
            self.running.remove(victim)
            self.pool.release(victim.blocks)
            victim.blocks, victim.computed, victim.status = [], 0, "waiting"
            victim.preemptions += 1
            insort(self.waiting, victim, key=attrgetter("place"))
            preempted.append(victim.id)
        return preempted

    def _lacking(self, state: State, drafted: int = 0) -> int:
        """Return how many more blocks a request needs for its tokens and the drafted ones."""
        return blocks_for(len(state.tokens) + drafted, self.pool.block_size) - len(state.blocks)

    def _read(self, state: State, left: int, chunks: list[Chunk]) -> int:
        """Give a request its next chunk within what is left of the budget; return its tokens."""
        tokens = min(state.missing, self.chunk, left)
        if tokens:
            chunks.append(Chunk(state.id, state.computed, tokens, tokens == state.missing))
        return tokens

    def _admit(self, now: float) -> State | None:
        """Admit the head of the queue if a slot is free and it fits beside what is promised."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        state, size = self.waiting[0], self.pool.block_size
        shared = []
        if self.enable_prefix_caching:
            state.digests = chain_hashes(state.tokens, size, known=state.digests)
            # Never all of its blocks, because the last token must be read.
            shared = self.pool.peek(state.digests[: (len(state.tokens) - 1) // size])
        revived = sum(not self.pool.references(block) for block in shared)
        needed = self.policy.wants(state, size) - len(shared)
        if self.policy.promised(self.running, size) + needed > self.pool.available - revived:
            return None
        del self.waiting[0]
        self.pool.share(shared)
        state.blocks = shared + self.pool.allocate(self._lacking(state) - len(shared))
        state.computed, state.status = len(shared) * size, "running"
        if not state.preemptions:  # else it was admitted before, and the blocks may be its own
            state.matched, state.admitted_at = state.computed, now
        insort(self.running, state, key=attrgetter("seniority"))
        return state

    def _draft(self, decoding: list[State], drafts: Mapping[str, int], left: int) -> list[Decode]:
        """Return the decodes, with the drafted tokens that fit in what the others left."""
        decodes = []
        for state in decoding:
            # After the drafted tokens one more is drawn, and the last one is never read.
            output = state.request.longest - len(state.tokens)
            # What is promised to others stays: the output is all that was promised to this one.
            slots = (len(state.blocks) + self.pool.available) * self.pool.block_size
            drafted = min(drafts.get(state.id, 0), output, left, slots - len(state.tokens))
            state.blocks += self.pool.allocate(self._lacking(state, drafted))
            left -= drafted
            decodes.append(Decode(state.id, drafted, state.computed))
        return decodes

    def _take(self, state: State, read: Chunk | Decode, result: StepResult, now: float) -> None:
        """Take in what was read and the new tokens, and trim and share the blocks."""
        before, size = state.computed, self.pool.block_size
        state.advance(read.count, read.drafted, result.tokens, now)
        while self._lacking(state) < 0:
            self.pool.release([state.blocks.pop()])
        if self.enable_prefix_caching:
            state.digests = chain_hashes(state.tokens, size, known=state.digests)
            for place in range(before // size, state.computed // size):
                self.pool.register(state.blocks[place], state.digests[place])

    def _finish(self, state: State, finish: str, reason: str, now: float) -> None:
        if state.status == "running":
            self.running.remove(state)
            self._leaving.append(state)
        elif state.id in self.states:
            self.waiting.remove(state)
        self.states.pop(state.id, None)
        state.status, state.finished_at = "finished", now
        state.finish, state.reason = finish, reason

    def _release_leaving(self) -> None:
        """Release the blocks of the finished, unless an open step or a batch needs them."""
        if self._open is None and not (self.policy.batches and self.running):
            for state in self._leaving:
                self.pool.release(state.blocks)
                state.blocks = []
            self._leaving.clear()
