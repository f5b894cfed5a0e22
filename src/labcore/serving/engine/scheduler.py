"""Iteration-level scheduling: before each step, who reads how many tokens in which blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from labcore.checks import one_of, positive_int
from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes
from labcore.serving.engine.invariants import check_invariants
from labcore.serving.engine.plans import Chunk, Decode, StepPlan, StepResult, check_results
from labcore.serving.engine.policies import POLICIES, VICTIMS, Policy, choose_victim
from labcore.serving.engine.requests import Request, State

__all__ = ["Chunk", "Decode", "QueueFull", "Scheduler", "StepPlan", "StepResult"]


class QueueFull(RuntimeError):
    """The waiting queue is full: come back later, or ask another replica."""


class Scheduler:
    """Decides before each step who reads what; touches no tensor and asks no clock.

    A step deals out `budget` tokens and the blocks of `pool` in this order: one token for each
    request that decodes, the rest of the prompts that are under way, prompts of those that come
    in, and what is left then for drafted tokens. So no prompt, however long, keeps an output
    waiting (Agrawal et al., 2024, arXiv 2403.02310). Within each the senior goes first: by
    priority, arrival, order of adding. Nobody is admitted in a step that preempted.

    The queue is not skipped: a head that does not fit yet holds up all behind it, small ones that
    would fit too, or a large request would wait as long as small ones come. `Policy` says how long
    that can be. So where blocks are promised one huge max_tokens keeps others out, while it waits
    and while it runs: let `max_length` refuse it, or promise nothing ("max_utilization").
    A newcomer takes no block from those that run, whatever its priority, and nobody is preempted
    for one of lower priority, unless nobody else would free a block.

    pool: the blocks. policy: a name of `POLICIES`, or a `Policy`. slots: most requests that run
    at once. budget: most tokens a step, at least `slots`. chunk: most tokens a step of one prompt;
    None is the budget. max_waiting: most requests in the queue; preempted ones always come back.
    max_length: most tokens of a row of the cache; None is the whole pool. victim: a name of
    `VICTIMS`. share_prefixes: whether full blocks are found again by later requests with the same
    prefix. salt: of their digests, see `chain_hashes`.
    states: all requests that are not finished, by id. waiting and running: of them, in the order in
    which they are served.
    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: str | Policy = "guaranteed_no_evict",
        slots: int = 8,
        budget: int = 512,
        chunk: int | None = None,
        max_waiting: int = 1024,
        max_length: int | None = None,
        victim: str = "newest",
        share_prefixes: bool = True,
        salt: bytes = b"",
    ) -> None:
        if isinstance(policy, str):
            policy = POLICIES[one_of("policy", policy, POLICIES)]
        self.pool = pool
        self.policy = policy
        self.slots = positive_int("slots", slots)
        self.budget = positive_int("budget", budget)
        if budget < slots:
            raise ValueError(
                f"budget must be at least slots = {slots}, got {budget}; each running request "
                "takes a token a step"
            )
        self.chunk = positive_int("chunk", budget if chunk is None else chunk)
        self.max_waiting = positive_int("max_waiting", max_waiting)
        whole = pool.count * pool.page
        self.max_length = positive_int("max_length", whole if max_length is None else max_length)
        self.victim = one_of("victim", victim, VICTIMS)
        self.share_prefixes = share_prefixes
        self.salt = salt
        self.states: dict[str, State] = {}
        self._timed: dict[str, State] = {}  # of them, those that have a deadline
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
        """Those that hold a slot and are not finished, the seniors first."""
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self.states

    def refusal(self, request: Request) -> str:
        """The sentence why `request` can never run here, "" where it can."""
        whole = self.pool.count * self.pool.page
        most, what = whole, "what the whole pool holds"
        if self.max_length < whole:
            most, what = self.max_length, "what a row of the cache holds"
        if request.longest <= most:
            return ""
        return (
            f"prompt and max_tokens - 1 must be at most {most} tokens, {what}, got "
            f"{len(request.prompt)} + {request.sampling.max_tokens - 1}; ask for fewer tokens"
        )

    def add(self, request: Request, now: float) -> State:
        """Take in a request; its state from now on, finished already where it can never run.

        now: seconds on the engine's clock. Raises QueueFull where max_waiting requests wait, and
        ValueError where a request with this id is under way.
        """
        if request.id in self.states:
            raise ValueError(
                f"id must be unlike those under way, got {request.id!r} again; wait for its end"
            )
        state = State(request, order=self._added, added_at=now)
        self._added += 1
        reason = self.refusal(request)
        if reason:
            self._finish(state, "refused", reason, now)
        elif _expired(state, now):
            self._finish(state, "deadline", "the deadline had passed on arrival", now)
        elif len(self._waiting) >= self.max_waiting:
            raise QueueFull(
                f"at most {self.max_waiting} requests may wait, and so many do; try again later"
            )
        else:
            self.states[request.id] = state
            if request.deadline is not None:
                self._timed[request.id] = state
            insort(self._waiting, state, key=_place)
        return state

    def cancel(self, id: str, now: float) -> State | None:
        """End a request wherever it is; its state, None where no such request is under way.

        Its blocks are free at once, or after the commit of a step that is under way.
        """
        state = self.states.get(id)
        if state is not None:
            self._finish(state, "cancelled", "", now)
            self._settle()
        return state

    def schedule(self, now: float, drafts: Mapping[str, int] | None = None) -> StepPlan:
        """What the next step does; every plan with tokens must be committed before the next.

        now: seconds on the engine's clock. drafts: how many tokens were drafted behind a request's
        output; it reads as many of them as output, budget and blocks leave room for, and never
        costs another its blocks.
        Raises RuntimeError where a plan is open, ValueError for a draft of less than 0 tokens.
        """
        if self._open is not None:
            raise RuntimeError(f"commit must follow schedule, and step {self._open.step} is open")
        if drafts and min(drafts.values()) < 0:
            raise ValueError(f"a draft must have at least 0 tokens, got {min(drafts.values())}")
        expired = [state for state in self._timed.values() if _expired(state, now)]
        for state in expired:
            self._finish(state, "deadline", "the deadline passed", now)
        self._settle()
        preempted = self._preempt()
        decodes = [state for state in self._running if state.decoding]
        for state in decodes:
            self._grow(state, len(state.tokens))
        left = self.budget - len(decodes)
        chunks: list[Chunk] = []
        left = self._read(chunks, [s for s in self._running if not s.decoding], left)
        admitted: list[State] = []
        if not preempted and not (self.policy.batches and self._running):
            left = self._admit(chunks, admitted, left, now)
        drafted = self._draft(decodes, drafts or {}, left)
        ids = [*(chunk.id for chunk in chunks), *drafted]
        self._reading = {id: self.states[id] for id in ids}
        plan = StepPlan(
            step=self._steps,
            chunks=tuple(chunks),
            decodes=tuple(Decode(s.id, drafted[s.id], s.computed) for s in decodes),
            admitted=tuple(state.id for state in admitted),
            preempted=tuple(state.id for state in preempted),
            expired=tuple(state.id for state in expired),
            idle=tuple(state.id for state in self._leaving),
            blocks={id: tuple(state.blocks) for id, state in self._reading.items()},
            tokens=sum(c.count for c in chunks) + sum(k + 1 for k in drafted.values()),
        )
        self._steps += 1
        self._open = plan if plan.tokens else None
        return plan

    def commit(self, plan: StepPlan, results: Mapping[str, StepResult], now: float) -> list[State]:
        """Take in what a step brought; the requests that it finished.

        results: of every decode and every last chunk; other chunks may go without, and requests
        that were cancelled since the plan was made are passed over. An output that reaches
        max_tokens ends with "length" here. A request with the finish "error" keeps no token of the
        step, and nobody finds its blocks any more: an earlier step may have written what failed.
        Raises RuntimeError for a plan that is not open, ValueError, and changes nothing, for
        results that do not fit it.
        """
        if not plan.tokens:
            return []
        if plan is not self._open:
            raise RuntimeError(f"a plan must be committed once, in turn, got step {plan.step}")
        reading = {id: s for id, s in self._reading.items() if s.status == "running"}
        check_results(plan, results, self._reading.keys() - reading.keys())
        self._open, self._reading = None, {}
        reads = {chunk.id: (chunk.count, 0) for chunk in plan.chunks}
        reads.update({decode.id: (1, decode.drafted) for decode in plan.decodes})
        finished = []
        for id, state in reading.items():
            result = results.get(id, StepResult())
            if result.finish == "error":
                self.pool.forget(state.blocks)
            else:
                self._take(state, result, *reads[id], now)
            if result.finish or state.emitted == state.request.sampling.max_tokens:
                self._finish(state, result.finish or "length", result.reason, now)
                finished.append(state)
        self._settle()
        return finished

    def check(self) -> None:
        """Raise RuntimeError that names the first invariant that does not hold, the pool's first.

        Between steps: references are those of the requests, every request is in one place, no
        digest stands for a block that is not written, the promised blocks are there.
        """
        check_invariants(
            self, self._waiting, self._running, self._leaving, open=self._open is not None
        )

    def _preempt(self) -> list[State]:
        """Take blocks from victims until each decode can have the block that it needs."""
        preempted: list[State] = []
        while (lacking := self._lacking()) is not None:
            priority = lacking.request.priority
            victim = choose_victim(self.victim, self._running, self.pool, priority)
            if self.policy.promises or victim is None or len(self._running) == 1:
                raise RuntimeError(
                    f"the policy {self.policy.name!r} must leave blocks for those that run; "
                    "release no block behind the scheduler's back"
                )
            self._running.remove(victim)
            self.pool.release(victim.blocks)
            victim.blocks, victim.computed, victim.registered = [], 0, 0
            victim.status = "waiting"
            victim.preemptions += 1
            insort(self._waiting, victim, key=_place)
            preempted.append(victim)
        return preempted

    def _lacking(self) -> State | None:
        """The first whose next token has no block when all seniors have theirs."""
        left, page = self.pool.available, self.pool.page
        for state in self._running:
            if state.decoding:
                left -= max(blocks_for(len(state.tokens), page) - len(state.blocks), 0)
                if left < 0:
                    return state
        return None

    def _grow(self, state: State, tokens: int) -> None:
        lacking = blocks_for(tokens, self.pool.page) - len(state.blocks)
        state.blocks += self.pool.allocate(max(lacking, 0))

    def _read(self, chunks: list[Chunk], states: list[State], left: int) -> int:
        """Give each of `states` a chunk while the budget lasts; what is left of it."""
        for state in states:
            count = min(state.missing, self.chunk, left)
            if count:
                chunks.append(Chunk(state.id, state.computed, count, count == state.missing))
                left -= count
        return left

    def _admit(self, chunks: list[Chunk], admitted: list[State], left: int, now: float) -> int:
        """Let the head of the queue in, and the next; what is left of the budget.

        A batch is filled even when its prompts take several steps.
        """
        while self._waiting and len(self._running) < self.slots:
            state = self._waiting[0]
            shared = self._known(state)
            fits = self.policy.admits(state, shared, self._running, self.pool)
            if not fits or not (left or self.policy.batches):
                break
            self._waiting.pop(0)
            self.pool.share(shared)
            state.blocks = shared
            state.registered = len(shared)
            state.computed = len(shared) * self.pool.page
            if not state.preemptions:  # else they may be its own
                state.matched += state.computed
            self._grow(state, len(state.tokens))
            state.status = "running"
            if state.admitted_at is None:
                state.admitted_at = now
            insort(self._running, state, key=_seniority)
            admitted.append(state)
            left = self._read(chunks, [state], left)
        return left

    def _known(self, state: State) -> list[int]:
        """Blocks in the pool that hold its first tokens; never all, the last one must be read."""
        if not self.share_prefixes:
            return []
        page = self.pool.page
        state.digests = chain_hashes(state.tokens, page, self.salt, known=state.digests)
        return self.pool.peek(state.digests[: (len(state.tokens) - 1) // page])

    def _draft(self, decodes: list[State], drafts: Mapping[str, int], left: int) -> dict[str, int]:
        """How many drafted tokens each decode reads, out of what the others left."""
        page = self.pool.page
        taken = {}
        for state in decodes:
            asked = drafts.get(state.id, 0)
            # Behind the drafted tokens one more is drawn, and the last one is never read.
            output = state.request.longest - len(state.tokens)
            # What is promised to others stays: the output is all that was promised to this one.
            room = (len(state.blocks) + self.pool.available) * page - len(state.tokens)
            count = max(min(asked, output, left, room), 0)
            self._grow(state, len(state.tokens) + count)
            left -= count
            taken[state.id] = count
        return taken

    def _take(self, state: State, result: StepResult, count: int, drafted: int, now: float) -> None:
        """Count what was read, add the new tokens, trim and share the blocks.

        count: its own tokens that were read. Of `drafted` ones all but the last new token stand.
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
        page = self.pool.page
        needed = blocks_for(len(state.tokens), page)
        self.pool.release(state.blocks[needed:])
        del state.blocks[needed:]
        if self.share_prefixes:
            state.digests = chain_hashes(state.tokens, page, self.salt, known=state.digests)
            full = state.computed // page
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
        self._timed.pop(state.id, None)
        state.status, state.finished_at = "finished", now
        state.finish, state.reason = finish, reason

    def _settle(self) -> None:
        """Release the blocks of the finished, unless a step under way or a batch needs them."""
        if self._open is not None or (self.policy.batches and self._running):
            return
        for state in self._leaving:
            self.pool.release(state.blocks)
            state.blocks = []
        self._leaving.clear()


def _place(state: State) -> tuple[int, bool, float, int]:
    return state.place


def _seniority(state: State) -> tuple[int, float, int]:
    return state.seniority


def _expired(state: State, now: float) -> bool:
    deadline = state.request.deadline
    return deadline is not None and now >= deadline
