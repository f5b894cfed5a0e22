"""Model a server in whole numbers: a scheduler, a pool, and a memory that stores tokens.

A step is the unit of time. Each slot of a block keeps the token that was written into it, and the
server computes the next token of an output from the contents of the request's blocks. So a request
that reads an unfilled block outputs a different token.
"""

from __future__ import annotations

import zlib
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes

__all__ = ["POLICIES", "Engine", "Job", "Server", "Step", "alone", "run"]

POLICIES = ("static", "half batch", "no evict", "max utilization", "prefill first")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a request.

    arrival, deadline: steps. output: its length in tokens. most: its largest allowed length.
    """

    id: str
    arrival: int
    prompt: tuple[int, ...]
    output: int
    most: int
    deadline: int = 10**9


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Configure how a server treats requests; the last five fields are faults.

    policy: one of POLICIES; "prefill first" and "half batch" reserve blocks as "no evict" does.
    leaky: an ended request loses one block. early: the pool registers the digests of a prompt's
    blocks when it allocates them. clinging: a preempted request keeps its blocks. batched: ended
    requests hold their slots until all have ended. undated: the queue ignores deadlines.
    """

    policy: str = "max utilization"
    slots: int = 8
    pages: int = 28
    page: int = 8
    budget: int = 40
    chunk: int = 16
    sharing: bool = True
    leaky: bool = False
    early: bool = False
    clinging: bool = False
    batched: bool = False
    undated: bool = False

    @property
    def promises(self) -> bool:
        """Return whether admission needs room for a request's longest output."""
        return self.policy != "max utilization"


@dataclass(eq=False, slots=True)
class _Row:
    job: Job
    order: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    known: int = 0  # registered blocks
    preempted: bool = False

    @property
    def priority(self) -> tuple[int, int]:
        return self.job.arrival, self.order

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.missing == 1 and len(self.tokens) > len(self.job.prompt)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.job.prompt) :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Record what one step did.

    reads: tokens by id. expired: requests cut off by their deadline. spare: free and cached blocks.
    running, waiting: counts after planning.
    """

    admitted: tuple[str, ...]
    reads: dict[str, int]
    ended: tuple[str, ...]
    preempted: tuple[str, ...]
    expired: tuple[str, ...]
    spare: int
    running: int
    waiting: int


def _next(memory: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(memory)).encode()) % 997 + 1


def alone(job: Job) -> tuple[int, ...]:
    """Return the job's output on a server of its own."""
    tokens = list(job.prompt)
    for _ in range(job.output):
        tokens.append(_next(tokens))
    return tuple(tokens[len(job.prompt) :])


class Server:
    """Run jobs through an engine, one step at a time. outputs: those of ended requests."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self.engine = engine
        self.pool = BlockPool(engine.pages, engine.page)
        self.memory = [0] * (engine.pages * engine.page)
        self.waiting: list[_Row] = []
        self.running: list[_Row] = []
        self.held: list[_Row] = []  # ended requests that still hold their slots
        self.outputs: dict[str, tuple[int, ...]] = {}
        self._coming = sorted(jobs, key=lambda job: job.arrival)[::-1]
        self._now = self._added = 0

    @property
    def busy(self) -> bool:
        """Return whether a job is unfinished."""
        return bool(self._coming or self.waiting or self.running)

    def step(self) -> Step:
        """Plan a step, read its tokens, and record the results."""
        while self._coming and self._coming[-1].arrival <= self._now:
            job = self._coming.pop()
            self._added += 1
            self._queue(_Row(job, self._added, list(job.prompt)))
        expired = self._expire()
        self._settle()
        preempted = self._preempt()
        shares = self._decodes()
        decodes = set(shares)
        left = self.engine.budget - len(decodes)
        left = self._chunks([row for row in self.running if not row.decoding], shares, left)
        admitted = [] if preempted else self._admit(shares, left)
        if self.engine.policy == "prefill first" and len(shares) > len(decodes):
            shares = {row: count for row, count in shares.items() if row not in decodes}
        running, waiting = len(self.running), len(self.waiting)
        prompts_first = sorted(shares, key=decodes.__contains__)
        ended = [row for row in prompts_first if self._read(row, shares[row])]
        reads = {row.job.id: count for row, count in shares.items()}
        for row in ended:
            self.outputs[row.job.id] = row.output
            self._end(row)
        self._settle()
        self._now += 1
        return Step(
            admitted=tuple(row.job.id for row in admitted),
            reads=reads,
            ended=tuple(row.job.id for row in ended),
            preempted=tuple(row.job.id for row in preempted),
            expired=tuple(row.job.id for row in expired),
            spare=self.pool.available,
            running=running,
            waiting=waiting,
        )

    def _queue(self, row: _Row) -> None:
        insort(self.waiting, row, key=lambda one: (not one.preempted, one.priority))

    def _expire(self) -> list[_Row]:
        found = [row for row in self.running if row.job.deadline <= self._now]
        if not self.engine.undated:
            found += [row for row in self.waiting if row.job.deadline <= self._now]
        for row in found:
            if row in self.running:
                self._end(row)
            else:
                self.waiting.remove(row)
                self.pool.release(row.blocks)
        return found

    def _end(self, row: _Row) -> None:
        self.running.remove(row)
        self.held.append(row)

    def _settle(self) -> None:
        waits = self.engine.batched or self.engine.policy == "static"
        if waits and self.running:
            return
        for row in self.held:
            self.pool.release(row.blocks[: len(row.blocks) - self.engine.leaky])
        self.held.clear()

    def _most(self, row: _Row) -> int:
        tokens = len(row.job.prompt) + row.job.most - 1 if self.engine.promises else len(row.tokens)
        return blocks_for(tokens, self.engine.page)

    def _lacking(self, row: _Row) -> int:
        return max(blocks_for(len(row.tokens), self.engine.page) - len(row.blocks), 0)

    def _own(self, block: int) -> bool:
        return self.pool.references(block) == 1

    def _preempt(self) -> list[_Row]:
        found: list[_Row] = []
        while len(self.running) > 1:
            if sum(map(self._lacking, filter(_decodes, self.running))) <= self.pool.available:
                break
            useful = [row for row in self.running if any(map(self._own, row.blocks))]
            if not useful:
                break
            victim = max(useful, key=lambda row: row.priority)
            self.running.remove(victim)
            if not self.engine.clinging:
                self.pool.release(victim.blocks)
                victim.blocks = []
            victim.computed, victim.known, victim.preempted = 0, 0, True
            self._queue(victim)
            found.append(victim)
        return found

    def _decodes(self) -> dict[_Row, int]:
        shares = {}
        for row in filter(_decodes, self.running):
            if self._lacking(row) <= self.pool.available:
                row.blocks += self.pool.allocate(self._lacking(row))
                shares[row] = 1
        return shares

    def _chunks(self, rows: Sequence[_Row], shares: dict[_Row, int], left: int) -> int:
        for row in rows:
            count = min(row.missing, self.engine.chunk, left)
            if count > 0:
                shares[row] = count
                left -= count
        return left

    def _fits(self, row: _Row, shared: Sequence[int]) -> bool:
        revived = sum(not self.pool.references(block) for block in shared)
        promised = 0
        if self.engine.promises:
            promised = sum(self._most(one) - len(one.blocks) for one in self.running)
        wanted = max(self._most(row) - len(row.blocks) - len(shared), 0)
        return promised + wanted <= self.pool.available - revived

    def _admit(self, shares: dict[_Row, int], left: int) -> list[_Row]:
        engine = self.engine
        static = engine.batched or engine.policy == "static"
        if (static and self.running) or (
            engine.policy == "half batch" and 2 * len(self.running) > engine.slots
        ):
            return []
        admitted: list[_Row] = []
        while self.waiting and len(self.running) < engine.slots and (left or static):
            row = self.waiting[0]
            shared = self._shared(row)
            if not self._fits(row, shared):
                break
            self.waiting.pop(0)
            if shared:
                self.pool.share(shared)
                row.blocks, row.known = shared, len(shared)
                row.computed = len(shared) * engine.page
            row.blocks += self.pool.allocate(self._lacking(row))
            if engine.early:
                self._register(row, len(row.tokens) // engine.page)
            insort(self.running, row, key=lambda one: one.priority)
            admitted.append(row)
            left = self._chunks([row], shares, left)
        return admitted

    def _shared(self, row: _Row) -> list[int]:
        if not self.engine.sharing or row.blocks:
            return []
        page = self.engine.page
        return self.pool.peek(chain_hashes(row.tokens[:-1], page))

    def _register(self, row: _Row, full: int) -> None:
        digests = chain_hashes(row.tokens, self.engine.page)
        for index in range(row.known, full):
            if self.pool.digest(row.blocks[index]) is None:
                self.pool.register(row.blocks[index], digests[index])
        row.known = max(row.known, full)

    def _read(self, row: _Row, count: int) -> bool:
        """Write `count` tokens, draw the next one, and return whether the output is complete."""
        page = self.engine.page
        for at in range(row.computed, row.computed + count):
            self.memory[row.blocks[at // page] * page + at % page] = row.tokens[at]
        row.computed += count
        if self.engine.sharing:
            self._register(row, row.computed // page)
        if row.missing:
            return False
        slots = [row.blocks[at // page] * page + at % page for at in range(row.computed)]
        row.tokens.append(_next([self.memory[slot] for slot in slots]))
        return len(row.output) == row.job.output


def _decodes(row: _Row) -> bool:
    return row.decoding


def run(engine: Engine, jobs: Sequence[Job], steps: int = 10_000) -> tuple[Server, list[Step]]:
    """Serve the jobs until all have ended, for at most `steps` steps."""
    server = Server(engine, jobs)
    trace: list[Step] = []
    while server.busy and len(trace) < steps:
        trace.append(server.step())
    return server, trace
