"""A server without a model: the real scheduler on a clock that a cost model advances.

Only time is simulated: every plan comes from the scheduler that an engine runs, and each step takes
the time that `CostModel` predicts. Outputs have the lengths that the workload imposes; their tokens
are placeholders. Vidur shows how accurate such a simulation can be (Agrawal et al., 2024, arXiv
2405.05465).
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from labcore.checks import fraction, positive, positive_int
from labcore.serving.clock import ManualClock
from labcore.serving.engine.plan import StepPlan, StepResult
from labcore.serving.engine.request import Request, State
from labcore.serving.engine.scheduler import QueueFull, Scheduler
from labcore.serving.metrics import RequestMetrics, StepRecord, summary
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.workload import Workload

__all__ = [
    "CACHED",
    "FREE",
    "QUEUE_FULL",
    "SHARED",
    "Run",
    "Simulator",
    "bootstrap",
    "simulate",
]

QUEUE_FULL = "queue_full"
"""The finish of a request that found the queue full: its client was told to retry later."""

FREE, CACHED, SHARED = -1, -2, -3
"""In a block map: an empty block, a known prefix without references, a block that several share."""

_PATIENCE = 3  # consecutive plans without work, while requests wait, that count as a hang


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a simulated server did.

    metrics: one entry per request, in order of arrival; times in seconds. steps: all steps in
    order. blocks: for each step, the state of the pool's blocks while it ran: FREE, CACHED, SHARED
    by several requests, or the index in `metrics` of the request that holds the block; empty unless
    requested. promised: for each step, the number of free blocks that are reserved because running
    requests may still need them; kept with `blocks`. num_blocks: of the pool. slots: rows of the
    batch. batches: whether ended requests keep their slots until the whole batch ends. begin, end:
    the times of the first arrival and of the last end.
    """

    metrics: tuple[RequestMetrics, ...]
    steps: tuple[StepRecord, ...]
    blocks: tuple[tuple[int, ...], ...]
    num_blocks: int
    slots: int
    batches: bool
    begin: float
    end: float
    promised: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The time from the first arrival to the last end."""
        return self.end - self.begin

    @property
    def output_tokens(self) -> int:
        """The number of tokens in all outputs."""
        return sum(one.output for one in self.metrics)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second; NaN if no time passed."""
        return self.output_tokens / self.seconds if self.seconds else math.nan

    @property
    def requests_per_second(self) -> float:
        """Completed requests per second: those ended by EOS, a stop text or max_tokens."""
        done = sum(one.finish in ("eos", "stop", "length") for one in self.metrics)
        return done / self.seconds if self.seconds else math.nan

    @property
    def wasted(self) -> float:
        """The fraction of decode rows computed for ended requests; 0 if there are no rows."""
        ended = sum(step.idle for step in self.steps)
        rows = ended + sum(len(step.decodes) for step in self.steps)
        return ended / rows if rows else 0.0

    def summary(self) -> dict[str, dict[str, float]]:
        """Return count, mean, p50 and p99 of queue, ttft, tpot and e2e; see `metrics.summary`."""
        return summary(self.metrics)


class Simulator:
    """One server, run step by step. `simulate` runs one to the end, a router several.

    scheduler: a new one, with an empty pool. cost: the cost model of its steps. lengths: output
    tokens of each request, by id; the default is max_tokens. residuals: relative deviations of a
    step's time from the cost model's, such as `CostFit.residuals`; every step draws one, with
    `seed`. There are none by default. blocks: whether to keep the block map of every step.
    Raises ValueError for a length below 1, or a residual that would turn time back.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        lengths: Mapping[str, int] | None = None,
        *,
        residuals: Sequence[float] = (),
        seed: int = 0,
        blocks: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.clock = ManualClock()
        self._lengths = dict(lengths or {})
        for length in self._lengths.values():
            positive_int("lengths", length, "pass output tokens")
        self._factors = [
            positive("1 + residual", 1 + one, "pass residuals above -1") for one in residuals
        ]
        self._dice = random.Random(seed)
        self._keep_blocks = blocks
        self._states: dict[str, State] = {}
        self._numbers: dict[str, int] = {}
        self._refused: dict[str, Request] = {}  # found the queue full
        self._steps: list[StepRecord] = []
        self._blocks: list[tuple[int, ...]] = []
        self._promised: list[int] = []
        self._without_work = 0

    @property
    def now(self) -> float:
        """The server's clock in seconds: the end of its last step, or the time it waited for."""
        return self.clock.now()

    @property
    def outstanding(self) -> int:
        """The number of requests that have arrived but not ended."""
        return len(self.scheduler.states)

    def submit(self, request: Request) -> bool:
        """Submit a request at `request.arrival`; return False if it is rejected at once.

        Call `until(request.arrival)` first: the step in progress at that time is the last one
        without the request. Raises ValueError if its id was used before.
        """
        if request.id in self._numbers:
            raise ValueError(f"ids must be unique, got {request.id!r} again; pass another one")
        self._numbers[request.id] = len(self._numbers)
        try:
            state = self.scheduler.add(request, request.arrival)
        except QueueFull:
            self._refused[request.id] = request
            return False
        self._states[request.id] = state
        return state.status != "finished"

    def until(self, time: float) -> None:
        """Run all steps that begin before `time`; if there is nothing to do, advance to it."""
        while self.outstanding and self.now < time:
            self.step()
        while self.now < time:  # rounding may leave the first sum just short
            self.clock.advance(time - self.now)

    def step(self) -> None:
        """Execute one plan of the scheduler.

        Raises RuntimeError if the scheduler hangs: several consecutive plans without work while
        requests wait.
        """
        begin = self.now
        plan = self.scheduler.schedule(begin)
        seconds = self.cost.seconds(plan)
        if seconds and self._factors:
            seconds *= self._dice.choice(self._factors)
        self._watch(plan)
        if self._keep_blocks:
            self._blocks.append(self._block_map(plan))
            running, page = self.scheduler.running, self.scheduler.pool.block_size
            self._promised.append(self.scheduler.policy.promised(running, page))
        self.clock.advance(seconds)
        results = self._results(plan)
        self.scheduler.commit(plan, results, self.now)
        record = StepRecord.of(plan, results, self.scheduler, at=begin, seconds=seconds)
        self._steps.append(record)

    def run(self) -> Run:
        """Run until all requests have ended, and return the `Run`."""
        while self.outstanding:
            self.step()
        metrics = tuple(self._metrics(id) for id in self._numbers)
        ends = [one.arrival + (one.e2e or 0.0) for one in metrics]
        pool = self.scheduler.pool
        return Run(
            metrics=metrics,
            steps=tuple(self._steps),
            blocks=tuple(self._blocks),
            num_blocks=pool.num_blocks,
            slots=self.scheduler.max_num_seqs,
            batches=self.scheduler.policy.batches,
            begin=min((one.arrival for one in metrics), default=0.0),
            end=max(ends, default=0.0),
            promised=tuple(self._promised),
        )

    def _watch(self, plan: StepPlan) -> None:
        idle = not (plan.chunks or plan.decodes or plan.expired)
        self._without_work = self._without_work + 1 if idle else 0
        if self._without_work >= _PATIENCE:
            raise RuntimeError(
                f"a scheduler must plan work while requests are in flight, got {_PATIENCE} plans "
                f"without work for {self.outstanding} requests; check its policy and its pool"
            )

    def _results(self, plan: StepPlan) -> dict[str, StepResult]:
        """Return a token for each request whose prompt is read, with a finish at its length."""
        results = {}
        drawing = [one.id for one in plan.chunks if one.last] + [one.id for one in plan.decodes]
        for id in drawing:
            state = self._states[id]
            number = state.emitted + 1
            most = state.request.sampling.max_tokens
            finish = "length" if number >= most else ""
            if number >= self._lengths.get(id, most + 1):
                finish = "eos"  # as in the engine, also where it is the last token allowed
            token = zlib.crc32(f"{id} {number}".encode())  # outputs differ between requests
            results[id] = StepResult(tokens=(token,), finish=finish)
        return results

    def _block_map(self, plan: StepPlan) -> tuple[int, ...]:
        pool = self.scheduler.pool
        owners = [
            CACHED if not pool.references(block) and pool.digest(block) is not None else FREE
            for block in range(pool.num_blocks)
        ]
        holding = [*self.scheduler.running, *(self._states[id] for id in plan.idle)]
        for state in holding:
            for block in state.blocks:
                owners[block] = SHARED if pool.references(block) > 1 else self._numbers[state.id]
        return tuple(owners)

    def _metrics(self, id: str) -> RequestMetrics:
        if id in self._refused:
            request = self._refused[id]
            return RequestMetrics(
                id=id,
                prompt=len(request.prompt),
                output=0,
                finish=QUEUE_FULL,
                arrival=request.arrival,
            )
        return RequestMetrics.of(self._states[id])


def simulate(
    requests: Workload | Sequence[Request],
    scheduler: Callable[[], Scheduler],
    cost: CostModel,
    *,
    lengths: Mapping[str, int] | None = None,
    residuals: Sequence[float] = (),
    seed: int = 0,
    blocks: bool = False,
) -> Run:
    """Serve all requests to the end on one simulated server, submitting each at its arrival time.

    requests: a workload, or requests whose output lengths are in `lengths` (max_tokens if missing).
    scheduler: makes a new one, with an empty pool. The other arguments are those of `Simulator`.
    The same arguments give the same run.
    """
    if isinstance(requests, Workload):
        lengths = requests.lengths if lengths is None else lengths
        requests = requests.requests()
    server = Simulator(scheduler(), cost, lengths, residuals=residuals, seed=seed, blocks=blocks)
    for request in sorted(requests, key=lambda one: one.arrival):
        server.until(request.arrival)
        server.submit(request)
    return server.run()


def bootstrap(
    values: Sequence[float],
    quantile: float,
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Return a bootstrap confidence interval (low, high) for a quantile.

    values: at least one. quantile, level: at least 0 and below 1. This is the percentile method of
    Efron, 1979, Annals of Statistics 7. Far out in a tail with few values the interval is too
    narrow.
    """
    fraction("quantile", quantile)
    fraction("level", level)
    if not len(values):
        raise ValueError("values must have at least one number, got none; pass measured values")
    positive_int("resamples", resamples)
    drawn = numpy.random.default_rng(seed).choice(
        numpy.asarray(values, dtype=numpy.float64), size=(resamples, len(values))
    )
    told = numpy.quantile(drawn, quantile, axis=1)
    low, high = numpy.quantile(told, ((1 - level) / 2, (1 + level) / 2)).tolist()
    return low, high
