"""An engine: requests come in at any moment, share one batch, and their tokens go out at once.

In each step, the scheduler decides which chunks of prompts and which decodes run in which blocks.
The engine reads them all in one packed forward, draws the next tokens, and commits the results.
Sources: Yu et al., Orca, OSDI 2022 (scheduling by iterations); Kwon et al., 2023, arXiv 2309.06180
(blocks); Agrawal et al., 2023, arXiv 2308.16369 (chunks of prompts beside decodes).
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from labcore.checks import one_of, positive_int
from labcore.decoding.contract import Proposer, SamplingConfig
from labcore.decoding.requests import Plan
from labcore.decoding.stops import TextDecoder
from labcore.decoding.verify import LOSSLESS, VERIFIERS
from labcore.device import Backend
from labcore.models import Llama
from labcore.models.cache import KV_DTYPES
from labcore.serving.clock import Clock
from labcore.serving.engine.blocks import BlockPool, blocks_for
from labcore.serving.engine.cache import PagedCache
from labcore.serving.engine.outputs import Entry, Output, check_request
from labcore.serving.engine.request import Request, State
from labcore.serving.engine.runner import Runner
from labcore.serving.engine.scheduler import QueueFull, Scheduler
from labcore.serving.engine.speculation import Speculation
from labcore.serving.engine.step import Step
from labcore.serving.metrics import EngineCounters, RequestMetrics, Snapshot, StepRecord

__all__ = ["Engine"]


class Engine:
    """Serves a `Llama` in evaluation mode, whole or divided by `parallelize`, on a CPU or a GPU.

    tokenizer: with `decode`, for texts in the outputs and for stop texts; with `encode` too,
    prompts may be texts. num_blocks, block_size: the pool's blocks, and the tokens per block.
    kv_dtype: of keys and values; "auto" is the model's. "int8" and "float8" store 8-bit codes with
    scales, so that the same memory holds more blocks; outputs may differ a little.
    max_num_seqs, max_num_batched_tokens, chunk, policy, max_waiting, enable_prefix_caching: as in
    `Scheduler`. Under "static" too, a request's tokens and its end are reported at once; only its
    slot stays taken.
    max_length: the most tokens of a request, without the last of its output; None means as many as
    the pool holds, at most the model's max_position_embeddings.
    proposer: "ngram", a `Proposer` that no one else uses, or None, which drafts nothing. verifier:
    the name of a lossless one. "sample_and_compare" draws one number per token, so the output is
    that of the request alone, whatever is drafted. "rejection" accepts more of a draft model's
    tokens, "block" more still on chains, and their outputs have the same distribution.
    graphs, fused: as in `Runner`. attention: on a GPU, the backend of `paged_attention`. clock:
    for arrivals and deadlines. eos_token_ids: None means the model's; () ends no output early.
    keep: how many records of steps and of requests are kept.

    pool, scheduler: to be inspected. counters: what was counted so far. An output doesn't depend on
    other requests, because each request draws from its own generator, seeded by its SamplingConfig.
    Only rounding may differ: a row of a larger batch is summed in another order.

    One thread at a time may use it; `Service` gives it a thread of its own.
    Raises TypeError or ValueError for invalid options.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: TextDecoder | None = None,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        kv_dtype: str = "auto",
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
        attention: Backend = "auto",
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
        self.clock = Clock() if clock is None else clock
        self.pool = BlockPool(num_blocks, block_size)
        self.max_length = _max_length(model, max_length, num_blocks * block_size)
        self.scheduler = Scheduler(
            self.pool,
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk=chunk,
            max_waiting=max_waiting,
            max_length=self.max_length,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.speculation = Speculation(
            proposer,
            slots=max_num_seqs,
            max_length=self.max_length,
            vocab_size=model.config.vocab_size,
        )
        one_of("kv_dtype", kv_dtype, ("auto", *KV_DTYPES))
        cache = PagedCache.of(
            model,
            dtype=KV_DTYPES.get(kv_dtype, model.embed_tokens.weight.dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            rows=max_num_seqs,
            max_blocks=blocks_for(self.max_length, block_size),
            backend=attention,
        )
        hidden = self.speculation.reads_hidden
        self.runner = Runner(model, cache, graphs=graphs, fused=fused, hidden=hidden)
        self.verifier = VERIFIERS[one_of("verifier", verifier, sorted(LOSSLESS))]
        ends = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.ends = frozenset(int(token) for token in ends)
        self.counters = EngineCounters()
        self._records: deque[StepRecord] = deque(maxlen=positive_int("keep", keep))
        self._metrics: deque[RequestMetrics] = deque(maxlen=keep)
        self._entries: dict[str, Entry] = {}  # until the last output is reported
        self._ended: list[Entry] = []  # those whose last output isn't reported yet
        self._news: list[Output] = []  # of the others
        self._numbers = itertools.count(1)

    @property
    def trace(self) -> list[StepRecord]:
        """The records of the last steps, the oldest first."""
        return list(self._records)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """The metrics of the last requests that ended, the oldest first."""
        return list(self._metrics)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do or to report."""
        return not self._entries

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
        """Take a request and return its id.

        prompt: tokens, or a text if the tokenizer encodes. sampling: None is greedy, up to 128
        tokens. priority: smaller goes first. deadline: seconds on `clock` at which it ends, done or
        not. ends_after: an imposed length for measurements, from 1 to max_tokens: the output ends
        with "eos" after so many tokens, which the scheduler doesn't know in advance.
        counted: whether a QueueFull counts as an ended request; pass False if you'll try again.
        Raises QueueFull if max_waiting requests wait, and TypeError or ValueError for a request
        that is malformed or can never fit.
        """
        tokens, now = self.tokens_of(prompt), self.clock.now()
        sampling = SamplingConfig() if sampling is None else sampling
        request = Request(self._name(id), tokens, sampling, priority, deadline, now)
        check_request(sampling, ends_after, self.tokenizer)
        entry = Entry(request, self.tokenizer, ends_after)
        try:
            entry.state = self.scheduler.add(request, now)
        except QueueFull:
            if counted:
                self.counters.add_finish("queue_full")
            raise
        if entry.state.finish == "refused":
            self._note(entry.state)
            raise ValueError(entry.state.reason)
        self._entries[request.id] = entry
        if entry.state.finish:  # its deadline has passed
            self._end(entry)
        return request.id

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

    def _name(self, id: str | None) -> str:
        if id is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if name not in self._entries)
        if id in self._entries:
            raise ValueError(
                f"an id must be unlike those under way, got {id!r} again; leave it out to have one "
                "made"
            )
        return id

    def cancel(self, id: str) -> bool:
        """End a request now; the next step reports it. Return False if it isn't under way."""
        entry = self._entries.get(id)
        if entry is None or entry.state.finish:
            return False
        self.scheduler.cancel(id, self.clock.now())
        self._end(entry)
        return True

    def step(self) -> list[Output]:
        """Run one iteration and return what is new in each request's output since the last one.

        If the forward fails, its requests end with "error"; all others go on.
        """
        began, at = time.perf_counter(), self.clock.now()
        drafts = self.speculation.propose(self._entries.values())
        sizes = {id: draft.size for id, draft in drafts.items() if isinstance(draft, Plan)}
        plan = self.scheduler.schedule(at, drafts=sizes)
        step = Step(
            runner=self.runner,
            speculation=self.speculation,
            plan=plan,
            entries=self._entries,
            drafts=drafts,
            verifier=self.verifier,
            ends=self.ends,
        )
        try:
            step.run()
        finally:  # even if it is interrupted, no request keeps a block and no news is lost
            step.fail_rest("the step was interrupted before it came to this request")
            finished = self.scheduler.commit(plan, step.results, self.clock.now())
            self._news += step.news
            for id in (*plan.expired, *(state.id for state in finished)):
                self._end(self._entries[id])
            if plan.tokens or plan.preempted or plan.expired:
                seconds = time.perf_counter() - began
                record = StepRecord.of(plan, step.results, self.scheduler, at=at, seconds=seconds)
                self._records.append(record)
                self.counters.add_step(record)
        news = [*self._news, *(entry.last_news() for entry in self._ended)]
        for entry in self._ended:
            del self._entries[entry.id]
        self._news, self._ended = [], []
        return news

    def drain(self) -> dict[str, Output]:
        """Step until nothing is left; return the whole output of every request, by id."""
        entries = dict(self._entries)
        while not self.idle:
            self.step()
        return {id: entry.whole() for id, entry in entries.items()}

    def stats(self) -> Snapshot:
        """Return the state of the queues, the pool and the counters."""
        return Snapshot(
            **asdict(self.counters),
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            num_blocks=self.pool.num_blocks,
            free=self.pool.free,
            held=self.pool.held,
            cached=self.pool.cached,
        )

    def close(self) -> None:
        """Cancel all requests and destroy the graphs. Call it before destroying a process group."""
        try:
            for id in list(self._entries):
                self.cancel(id)
        finally:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, entry: Entry) -> None:
        """Note the end of a request; the next step to return reports it."""
        self._ended.append(entry)
        self._note(entry.state)

    def _note(self, state: State) -> None:
        metrics = RequestMetrics.of(state)
        self._metrics.append(metrics)
        self.counters.add_request(metrics)


def _max_length(model: Llama, asked: int | None, pool: int) -> int:
    most = model.config.max_position_embeddings
    if asked is None:
        return min(pool, most)
    if positive_int("max_length", asked) > most:
        raise ValueError(
            f"max_length must be at most the model's max_position_embeddings = {most}, got "
            f"{asked}; leave it out"
        )
    return asked
