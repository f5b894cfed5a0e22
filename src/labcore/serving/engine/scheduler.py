"""Iteration-level scheduling: before each step, who reads how many tokens in which blocks.

Three policies say who gets blocks; their names and promises are those of TensorRT-LLM's capacity
schedulers. "static" admits a batch when nothing runs, and its slots are free again when its last
request ends. "guaranteed_no_evict" admits a request if its prompt and its longest possible output
fit beside everything promised to the running, so nobody is ever preempted. "max_utilization" admits
a request if its tokens so far fit; when the pool is full, the most junior request loses its blocks
and later reads again what is no longer cached (Kwon et al., 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from labcore.checks import one_of, positive_int
from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes
from labcore.serving.engine.request import Request, State

__all__ = [
    "POLICIES",
    "Chunk",
    "Decode",
    "Policy",
    "QueueFull",
    "Scheduler",
    "StepPlan",
    "StepResult",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to read, of a prompt or again after a preemption: `count` tokens from `start` on.

    last: whether the request then has no token left to read, so that a new one is drawn.
    """

    id: str
    start: int
    count: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """The newest token of an output to read, and `drafted` tokens after it to verify.

    start: tokens read so far, the place of the newest.
    """

    id: str
    drafted: int = 0
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What one step does.

    step: counts from 0. chunks and decodes: what is read, the seniors first. admitted, preempted,
    expired: the ids of those that came in, lost their blocks, or met their deadline. idle: finished
    requests whose slot a static batch keeps until its last one ends. blocks: all blocks of each
    request that reads, in order. tokens: read in all, including drafted ones.
    """

    step: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def rests(self) -> int:
        """Rows of ended requests that are computed: a static batch's, beside its decodes."""
        return len(self.idle) if self.decodes else 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought one request.

    tokens: the new tokens that stand: for a decode, the accepted drafted ones and the one after
    them; for a last chunk one; for another chunk none. finish: "" or why it ends: "eos", "stop",
    "length" or "error"; reason: a sentence for the client.
    """

    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a scheduler deals out the blocks of its pool.

    promises: a request is admitted with blocks for its longest output, so it's never preempted.
    batches: requests are admitted only when nothing runs, and finished ones keep slot and blocks
    until the last one of the batch ends.
    """

    promises: bool
    batches: bool = False

    def wants(self, state: State, block_size: int) -> int:
        """Return how many blocks `state` needs in all to be admitted."""
        return blocks_for(state.request.longest if self.promises else len(state.tokens), block_size)

    def promised(self, running: Iterable[State], block_size: int) -> int:
        """Return how many blocks the running may still ask for that are promised to them."""
        if not self.promises:
            return 0
        return sum(self.wants(state, block_size) - len(state.blocks) for state in running)


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

    The queue is not skipped: a head that doesn't fit yet holds up everyone behind it, or a large
    request would wait as long as small ones come. So with promises, one huge max_tokens keeps
    others out: let `max_length` refuse it, or promise nothing.

    pool: the blocks. policy: a name of `POLICIES`. max_num_seqs: the most requests that run at
    once. max_num_batched_tokens: the most tokens per step, at least max_num_seqs. chunk: the most
    tokens of one prompt per step; None means max_num_batched_tokens. max_waiting: the most requests
    in the queue; preempted ones always come back. max_length: the most tokens of a request, without
    the last of its output; None means the whole pool. enable_prefix_caching: whether later requests
    with the same prefix find its full blocks.
    states: all requests that haven't finished, by id.
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
        if self.max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs = {max_num_seqs}, got "
                f"{self.max_num_batched_tokens}; each running request takes a token per step"
            )
        self.chunk = positive_int("chunk", self.max_num_batched_tokens if chunk is None else chunk)
        self.max_waiting = positive_int("max_waiting", max_waiting)
        whole = pool.num_blocks * pool.block_size
        self.max_length = positive_int("max_length", whole if max_length is None else max_length)
        self.enable_prefix_caching = enable_prefix_caching
        self.states: dict[str, State] = {}
        self._waiting: list[State] = []
        self._running: list[State] = []
        self._leaving: list[State] = []  # finished, and still holding blocks
        self._open: StepPlan | None = None  # scheduled and not committed
        self._reading: dict[str, State] = {}  # those that take part in it
        self._steps = 0
        self._added = 0

    @property
    def waiting(self) -> tuple[State, ...]:
        """The queue, its head first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[State, ...]:
        """Those that hold a slot and haven't finished, the seniors first."""
        return tuple(self._running)

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
        state = State(request, order=self._added)
        self._added += 1
        whole = self.pool.num_blocks * self.pool.block_size
        most, what = whole, "what the whole pool holds"
        if self.max_length < whole:
            most, what = self.max_length, "max_length"
        if request.longest > most:
            reason = (
                f"prompt and max_tokens - 1 must be at most {most} tokens, {what}, got "
                f"{len(request.prompt)} + {request.sampling.max_tokens - 1}; ask for fewer tokens"
            )
            self._finish(state, "refused", reason, now)
        elif _expired(state, now):
            self._finish(state, "deadline", "the deadline had passed on arrival", now)
        elif len(self._waiting) >= self.max_waiting:
            raise QueueFull(
                f"at most {self.max_waiting} requests may wait, and so many do; try again later"
            )
        else:
            self.states[request.id] = state
            insort(self._waiting, state, key=_place)
        return state

    def cancel(self, id: str, now: float) -> State | None:
        """End a request wherever it is; return its state, or None if it isn't under way.

        Its blocks are free at once, or after the commit of an open step, or the end of a batch.
        """
        state = self.states.get(id)
        if state is not None:
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
        expired = [state for state in self.states.values() if _expired(state, now)]
        for state in expired:
            self._finish(state, "deadline", "the deadline passed", now)
        self._release_leaving()
        preempted = self._preempt()
        decodes = [state for state in self._running if state.decoding]
        for state in decodes:
            self._grow(state, len(state.tokens))
        left = self.max_num_batched_tokens - len(decodes)
        chunks: list[Chunk] = []
        for state in self._running:
            if not state.decoding:
                left -= self._read(chunks, state, left)
        admitted: list[str] = []
        # A batch is filled even if its prompts take several steps.
        while not preempted and (left > 0 or self.policy.batches):
            head = self._next(began=bool(admitted))
            if head is None:
                break
            self._admit(head, now)
            admitted.append(head.id)
            left -= self._read(chunks, head, left)
        drafted = self._draft(decodes, drafts or {}, left)
        self._reading = {id: self.states[id] for id in [*(chunk.id for chunk in chunks), *drafted]}
        plan = StepPlan(
            step=self._steps,
            chunks=tuple(chunks),
            decodes=tuple(Decode(s.id, drafted[s.id], s.computed) for s in decodes),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            expired=tuple(state.id for state in expired),
            idle=tuple(state.id for state in self._leaving),
            blocks={id: tuple(state.blocks) for id, state in self._reading.items()},
            tokens=sum(c.count for c in chunks) + sum(k + 1 for k in drafted.values()),
        )
        self._steps += 1
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
        drafted = {decode.id: decode.drafted for decode in plan.decodes}
        reads = dict.fromkeys(drafted, 1) | {chunk.id: chunk.count for chunk in plan.chunks}
        draws = {id: count + 1 for id, count in drafted.items()}
        draws |= {chunk.id: int(chunk.last) for chunk in plan.chunks}
        reading = {id: s for id, s in self._reading.items() if s.status == "running"}
        _check_results(results, draws, reading)
        self._open, self._reading = None, {}
        finished = []
        for id, state in reading.items():
            result = results.get(id, StepResult())
            if result.finish == "error":
                self.pool.forget(state.blocks)
            else:
                self._take(state, result, reads[id], drafted.get(id, 0), now)
            if result.finish or state.emitted == state.request.sampling.max_tokens:
                self._finish(state, result.finish or "length", result.reason, now)
                finished.append(state)
        self._release_leaving()
        return finished

    def _preempt(self) -> list[str]:
        """Take blocks from the most junior until each decode can have the block that it needs."""
        preempted = []
        while self._lacking() > self.pool.available:
            # One whose blocks are all shared would free nothing.
            victim = next((s for s in reversed(self._running) if self._frees(s)), None)
            if self.policy.promises or victim is None or len(self._running) == 1:
                raise RuntimeError(
                    f"the policy {self.policy_name!r} must leave blocks for those that run; "
                    "release no block behind the scheduler's back"
                )
            self._running.remove(victim)
            self.pool.release(victim.blocks)
            victim.blocks, victim.computed, victim.registered = [], 0, 0
            victim.status = "waiting"
            victim.preemptions += 1
            insort(self._waiting, victim, key=_place)
            preempted.append(victim.id)
        return preempted

    def _lacking(self) -> int:
        """Return how many new blocks the next tokens of those that decode need."""
        return sum(
            max(blocks_for(len(state.tokens), self.pool.block_size) - len(state.blocks), 0)
            for state in self._running
            if state.decoding
        )

    def _frees(self, state: State) -> bool:
        return any(self.pool.references(block) == 1 for block in state.blocks)

    def _grow(self, state: State, tokens: int) -> None:
        lacking = blocks_for(tokens, self.pool.block_size) - len(state.blocks)
        state.blocks += self.pool.allocate(max(lacking, 0))

    def _read(self, chunks: list[Chunk], state: State, left: int) -> int:
        """Give a request its next chunk within what is left of the budget; return its tokens."""
        count = min(state.missing, self.chunk, left)
        if count:
            chunks.append(Chunk(state.id, state.computed, count, count == state.missing))
        return count

    def _next(self, began: bool) -> State | None:
        """Return the head of the queue if it may come in now; began: others came in this step."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return None
        if self.policy.batches and self._running and not began:
            return None
        state, size = self._waiting[0], self.pool.block_size
        shared = self._known(state)
        revived = sum(not self.pool.references(block) for block in shared)
        needed = self.policy.wants(state, size) - len(shared)
        fits = self.policy.promised(self._running, size) + needed <= self.pool.available - revived
        return state if fits else None

    def _admit(self, state: State, now: float) -> None:
        self._waiting.remove(state)
        state.blocks = self._known(state)
        self.pool.share(state.blocks)
        state.registered = len(state.blocks)
        state.computed = len(state.blocks) * self.pool.block_size
        if not state.preemptions:  # else the blocks may be its own
            state.matched += state.computed
        self._grow(state, len(state.tokens))
        state.status = "running"
        if state.admitted_at is None:
            state.admitted_at = now
        insort(self._running, state, key=_seniority)

    def _known(self, state: State) -> list[int]:
        """Return blocks that hold its first tokens; never all, because the last must be read."""
        if not self.enable_prefix_caching:
            return []
        size = self.pool.block_size
        state.digests = chain_hashes(state.tokens, size, known=state.digests)
        return self.pool.peek(state.digests[: (len(state.tokens) - 1) // size])

    def _draft(self, decodes: list[State], drafts: Mapping[str, int], left: int) -> dict[str, int]:
        """Return how many drafted tokens each decode reads, out of what the others left."""
        taken = {}
        for state in decodes:
            # After the drafted tokens one more is drawn, and the last one is never read.
            output = state.request.longest - len(state.tokens)
            # What is promised to others stays: the output is all that was promised to this one.
            room = (len(state.blocks) + self.pool.available) * self.pool.block_size
            asked = drafts.get(state.id, 0)
            count = min(asked, output, left, room - len(state.tokens))
            self._grow(state, len(state.tokens) + count)
            left -= count
            taken[state.id] = count
        return taken

    def _take(self, state: State, result: StepResult, count: int, drafted: int, now: float) -> None:
        """Count what was read, add the new tokens, and trim and share the blocks.

        count: its own tokens that were read. All but the last new token are accepted drafts.
        """
        accepted = max(len(result.tokens) - 1, 0)
        before = state.computed
        state.computed += count + accepted
        state.wasted += drafted - accepted
        state.recomputed += max(min(state.computed, state.peak) - before, 0)
        state.peak = max(state.peak, state.computed)
        state.tokens += result.tokens
        if result.tokens and state.first_token_at is None:
            state.first_token_at = now
        size = self.pool.block_size
        needed = blocks_for(len(state.tokens), size)
        self.pool.release(state.blocks[needed:])
        del state.blocks[needed:]
        if self.enable_prefix_caching:
            state.digests = chain_hashes(state.tokens, size, known=state.digests)
            full = state.computed // size
            for place in range(state.registered, full):
                self.pool.register(state.blocks[place], state.digests[place])
            state.registered = full

    def _finish(self, state: State, finish: str, reason: str, now: float) -> None:
        if state.status == "running":
            self._running.remove(state)
            self._leaving.append(state)
        elif state.id in self.states:
            self._waiting.remove(state)
        self.states.pop(state.id, None)
        state.status, state.finished_at = "finished", now
        state.finish, state.reason = finish, reason

    def _release_leaving(self) -> None:
        """Release the blocks of the finished, unless an open step or a batch needs them."""
        if self._open is not None or (self.policy.batches and self._running):
            return
        for state in self._leaving:
            self.pool.release(state.blocks)
            state.blocks = []
        self._leaving.clear()


_place, _seniority = attrgetter("place"), attrgetter("seniority")


def _expired(state: State, now: float) -> bool:
    deadline = state.request.deadline
    return deadline is not None and now >= deadline


def _check_results(
    results: Mapping[str, StepResult], draws: Mapping[str, int], reading: Mapping[str, State]
) -> None:
    """Raise ValueError unless each request that reads has the tokens that its plan asks for."""
    if unknown := sorted(set(results) - set(draws)):
        raise ValueError(f"results must be of the plan's requests, got one of {unknown[0]!r}")
    for id in reading:
        most, result = draws[id], results.get(id, StepResult())
        one_of("finish", result.finish, ("", "eos", "stop", "length", "error"))
        few = most > 0 and not result.tokens and not result.finish
        if few or len(result.tokens) > most:
            raise ValueError(
                f"the step must bring {id!r} {min(most, 1)} to {most} tokens, got "
                f"{len(result.tokens)}; give a finish where there are none"
            )
