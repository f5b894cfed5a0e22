"""An engine: requests in at any moment, in-flight batching, tokens out as they come.

In each step the scheduler decides which chunks of prompts and which decodes run in which blocks;
the engine reads them all in one packed forward, draws the next tokens, and tells the scheduler what
came of it.
Sources: Yu et al., Orca, OSDI 2022 (scheduling by iterations); Kwon et al., 2023, arXiv 2309.06180
(blocks); Agrawal et al., 2023, arXiv 2308.16369 (chunks of prompts beside decodes).
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Sequence

from labcore.checks import one_of, positive_int
from labcore.decoding.contract import Proposer, SamplingConfig
from labcore.decoding.requests import Plan
from labcore.decoding.stops import TextDecoder
from labcore.decoding.verify import LOSSLESS, VERIFIERS
from labcore.models import Llama
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.cache import PagedCache
from labcore.serving.engine.clock import Clock, MonotonicClock
from labcore.serving.engine.metrics import EngineCounters, RequestMetrics, Snapshot, StepRecord
from labcore.serving.engine.outputs import Entry, Output, check_ends_after, check_sampling
from labcore.serving.engine.request import Request, State
from labcore.serving.engine.runner import Runner
from labcore.serving.engine.scheduler import QueueFull, Scheduler, StepPlan
from labcore.serving.engine.speculation import Speculation
from labcore.serving.engine.turn import Turn

__all__ = ["Engine"]


class Engine:
    """Serves a `Llama`: whole or divided by `parallelize`, on a CPU or a GPU, in evaluation mode.

    tokenizer: with `decode`, for texts in the outputs and for stop texts; with `encode` too,
    prompts may be texts. num_blocks, block_size: the pool's blocks, and the tokens of each.
    max_num_seqs, max_num_batched_tokens, chunk, policy, max_waiting, enable_prefix_caching: as in
    `Scheduler`. Under "static", too, a client hears its tokens as they come and its end at once;
    only the slot stays taken.
    max_length: the most tokens of a request, without the last of its output; None means what the
    pool holds, at most the model's max_position_embeddings.
    proposer: "ngram", or a `Proposer` of the engine's own; None drafts nothing. verifier: one of
    the lossless names. "sample_and_compare" draws one number per token, so that an output is that
    of the request alone whatever is drafted; "rejection" accepts more of a draft model's tokens,
    and its output has the same distribution.
    graphs, fused: as in `Runner`. clock: seconds of arrivals and deadlines. eos_token_ids: None
    means the model's; () ends no output early. keep: how many records of steps and of requests are
    kept, the latest.

    trace: a `StepRecord` for each of the last steps. metrics: `RequestMetrics` of each of the last
    requests that ended. pool, scheduler: to be looked at. An output doesn't depend on its
    neighbors: a request draws from a generator of its own, by its SamplingConfig's seed. Rounding
    may: a row of a larger batch is summed in another order.

    Not for several threads at once: `Service` puts it in a thread of its own.
    Raises TypeError or ValueError for options that don't fit.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: TextDecoder | None = None,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        chunk: int | None = None,
        policy: str = "guaranteed_no_evict",
        max_waiting: int = 1024,
        max_length: int | None = None,
        enable_prefix_caching: bool = True,
        proposer: str | Proposer | None = None,
        verifier: str = "sample_and_compare",
        graphs: bool | None = None,
        fused: bool | None = None,
        clock: Clock | None = None,
        eos_token_ids: Sequence[int] | None = None,
        keep: int = 10_000,
    ) -> None:
        if not isinstance(model, Llama):
            raise TypeError(
                f"model must be a Llama, got {type(model).__name__}; load one with "
                "labcore.models.from_pretrained"
            )
        self.model, self.tokenizer = model, tokenizer
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.pool = BlockPool(num_blocks, block_size)
        most = model.config.max_position_embeddings
        if max_length is None:
            max_length = min(num_blocks * block_size, most)
        if positive_int("max_length", max_length) > most:
            raise ValueError(
                f"max_length must be at most the model's max_position_embeddings = {most}, got "
                f"{max_length}; leave it out"
            )
        self.max_length = max_length
        self.scheduler = Scheduler(
            self.pool,
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk=chunk,
            max_waiting=max_waiting,
            max_length=max_length,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.speculation = Speculation(proposer, max_num_seqs, max_length)
        cache = PagedCache.of(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            rows=max_num_seqs,
            max_blocks=blocks_for(max_length, block_size),
        )
        hidden = self.speculation.reads_hidden
        self.runner = Runner(model, cache, graphs=graphs, fused=fused, hidden=hidden)
        self.verifier = VERIFIERS[one_of("verifier", verifier, sorted(LOSSLESS))]
        ends = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.ends = frozenset(int(token) for token in ends)
        self.counters = EngineCounters()
        self._records: deque[StepRecord] = deque(maxlen=positive_int("keep", keep))
        self._metrics: deque[RequestMetrics] = deque(maxlen=keep)
        self._entries: dict[str, Entry] = {}
        self._news: list[Output] = []  # of requests that ended between two steps
        self._ended: list[Entry] = []  # whose last output is among them
        self._whole: dict[str, Output] | None = None  # what drain collects
        self._named = 0

    @property
    def trace(self) -> list[StepRecord]:
        """The last steps, the oldest first."""
        return list(self._records)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """The last requests that ended, the oldest first."""
        return list(self._metrics)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, and nothing to report."""
        return not self._entries and not self._news

    def submit(
        self,
        prompt: Sequence[int] | str,
        sampling: SamplingConfig | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        ends_after: int | None = None,
        counted: bool = True,
    ) -> str:
        """Take a request; return its id.

        prompt: tokens, or a text if the tokenizer encodes. sampling: None is greedy, up to 128
        tokens. priority: smaller goes first. deadline: the moment on `clock` at which it ends, done
        or not. ends_after: a measurement's imposed length, between 1 and max_tokens: the output
        ends with "eos" when it has as many tokens, which the scheduler doesn't know.
        counted: whether a QueueFull counts as a request that ended; not if it is tried again.
        Raises QueueFull if as many as may wait do so: come back later. Raises TypeError or
        ValueError, at once, for a request that is malformed or can never fit.
        """
        tokens, now = self.tokens_of(prompt), self.clock.now()
        asked = SamplingConfig() if sampling is None else sampling
        request = Request(self._name(id), tokens, asked, priority, deadline, now)
        if asked.stop and self.tokenizer is None:
            raise ValueError(
                "stop texts need a tokenizer, which says what the tokens spell; make the engine "
                "with tokenizer=…"
            )
        check_sampling(asked)
        check_ends_after(ends_after, asked)
        try:
            state = self.scheduler.add(request, now)
        except QueueFull:
            if counted:
                self.counters.finished["queue_full"] += 1
            raise
        try:
            entry = Entry(state, self.tokenizer, ends_after)
        except BaseException:
            self.scheduler.cancel(state.id, now)  # nobody else knows of it
            raise
        if state.finish == "refused":
            self._note(state)
            raise ValueError(state.reason)
        self._entries[state.id] = entry
        if state.finish:  # its deadline has passed
            self._end(entry)
        return state.id

    def tokens_of(self, prompt: Sequence[int] | str) -> tuple[int, ...]:
        """Return a prompt's tokens. Raises TypeError or ValueError for anything else."""
        if isinstance(prompt, str):
            encode = getattr(self.tokenizer, "encode", None)
            if encode is None:
                raise TypeError(
                    "a prompt must be tokens where the engine has no tokenizer that encodes, got "
                    "a text; make the engine with tokenizer=…"
                )
            prompt = encode(prompt)
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise TypeError(f"a prompt must be a row of tokens, got {type(prompt).__name__}")
        try:
            tokens = tuple(operator.index(token) for token in prompt)  # type: ignore[arg-type]
        except TypeError as problem:
            raise TypeError(f"tokens must be whole numbers: {problem}") from None
        vocab = self.model.config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ValueError(
                f"tokens must lie between 0 and {vocab - 1}, got {min(tokens)} to {max(tokens)}"
            )
        return tokens

    def _name(self, asked: str | None) -> str:
        # The last output of a request that ended may still have to be reported.
        known = self._entries.keys() | {output.id for output in self._news}
        if asked is not None:
            if asked in known:
                raise ValueError(
                    f"an id must be unlike those under way, got {asked!r} again; leave it out to "
                    "have one made"
                )
            return asked
        self._named += 1
        while f"request-{self._named}" in known:
            self._named += 1
        return f"request-{self._named}"

    def cancel(self, id: str) -> bool:
        """End a request now; its last output comes with the next step. False if it isn't there."""
        entry = self._entries.get(id)
        if entry is None:
            return False
        self.scheduler.cancel(id, self.clock.now())
        self._end(entry)
        return True

    def step(self) -> list[Output]:
        """Run one iteration; return what each request has to report since the last one.

        A forward that fails ends the requests in it with "error"; the others go on.
        """
        began, at = time.perf_counter(), self.clock.now()
        drafts = self.speculation.propose(self._entries.values())
        sizes = {id: one.size for id, one in drafts.items() if isinstance(one, Plan)}
        plan = self.scheduler.schedule(at, drafts=sizes)
        turn = Turn(
            self.runner,
            self.speculation,
            plan,
            entries=dict(self._entries),
            drafts=drafts,
            verifier=self.verifier,
            ends=self.ends,
        )
        try:
            self._make_way(plan)
            turn.run()
        finally:
            # An interrupted step ends its requests; none keeps a block, no news is lost.
            finished = self.scheduler.commit(plan, turn.all_results(), self.clock.now())
            self._make_way(plan)
            self._news += turn.news.values()
            for state in finished:
                self._end(self._entries[state.id])
            if plan.tokens or plan.preempted or plan.expired:
                self._record(plan, turn, at, time.perf_counter() - began)
        told, self._news = self._news, []
        if self._whole is not None:
            self._whole.update((entry.id, entry.whole()) for entry in self._ended)
        self._ended = []
        return told

    def drain(self) -> dict[str, Output]:
        """Step until nothing is left; return the whole output of each that hadn't ended before."""
        self._whole = {}
        try:
            while not self.idle:
                self.step()
            return self._whole
        finally:
            self._whole = None

    def stats(self) -> Snapshot:
        """Return the state of the queues, the pool and the counters."""
        return Snapshot.of(
            self.counters,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            num_blocks=self.pool.num_blocks,
            free=self.pool.free,
            held=self.pool.held,
            cached=self.pool.cached,
        )

    def close(self) -> None:
        """Cancel what is under way and destroy the graphs, before a process group is destroyed."""
        try:
            for id in list(self._entries):
                self.cancel(id)
        finally:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_way(self, plan: StepPlan) -> None:
        """Let go of the preempted and the expired; harmless if that is done already."""
        for id in plan.preempted:
            self.speculation.leave(self._entries[id])
        for id in plan.expired:
            if id in self._entries:
                self._end(self._entries[id])

    def _end(self, entry: Entry) -> None:
        """Let go of a request that the scheduler has ended."""
        self.speculation.leave(entry)
        last = entry.last_news()
        del self._entries[entry.id]
        self._news.append(last)
        self._ended.append(entry)
        self._note(entry.state)

    def _note(self, state: State) -> None:
        metrics = RequestMetrics.of(state)
        self._metrics.append(metrics)
        self.counters.add_request(metrics)

    def _record(self, plan: StepPlan, turn: Turn, at: float, seconds: float) -> None:
        record = StepRecord(
            step=plan.step,
            at=at,
            seconds=seconds,
            chunks=plan.chunks,
            decodes=plan.decodes,
            tokens=plan.tokens,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            free=self.pool.free,
            held=self.pool.held,
            cached=self.pool.cached,
            idle=plan.rests,
            admitted=plan.admitted,
            preempted=plan.preempted,
            expired=plan.expired,
            emitted=sum(len(result.tokens) for result in turn.results.values()),
            drafted=turn.drafted,
            accepted=turn.accepted,
            failed=tuple(turn.reasons),
        )
        self._records.append(record)
        self.counters.add_step(record)
