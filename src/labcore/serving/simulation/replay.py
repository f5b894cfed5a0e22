"""Run a workload through a real engine in real time, and report it like a simulated run.

A request is submitted at its arrival time, or once the step in progress at that time has ended.
Its latencies count from the arrival time, so a slow engine can't hide waiting time (an error
called coordinated omission).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from labcore.serving.engine.engine import Engine
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.metrics import RequestMetrics, StepRecord
from labcore.serving.simulation.simulate import QUEUE_FULL, Run
from labcore.serving.simulation.workload import Workload

__all__ = ["Replay", "replay"]

_ROUNDING_S = 1e-6  # sums of a clock that has run for long may be slightly too small


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(Run):
    """What an engine did, as a `Run` without block maps. Time 0 is the start of `replay`.

    outputs: the tokens of each request, by id. moments: when each token was emitted, in seconds;
    tokens from the same step share a time.
    """

    outputs: Mapping[str, tuple[int, ...]]
    moments: Mapping[str, tuple[float, ...]]


class _Player:
    """A replay in progress."""

    def __init__(self, engine: Engine, lengths: Mapping[str, int]) -> None:
        self.engine, self.lengths = engine, lengths
        self.origin = engine.clock.now()
        self.metrics: dict[str, RequestMetrics] = {}
        self.outputs: dict[str, list[int]] = {}
        self.moments: dict[str, list[float]] = {}
        self.due: dict[str, float] = {}  # the arrival time of each request
        self._steps, self._ended = engine.counters.steps, sum(engine.counters.finished.values())

    @property
    def now(self) -> float:
        return self.engine.clock.now() - self.origin

    def submit(self, request: Request) -> None:
        self.outputs[request.id], self.moments[request.id] = [], []
        due = None if request.deadline is None else self.origin + request.deadline
        self.due[request.id] = request.arrival
        try:
            self.engine.submit(
                request.prompt,
                request.sampling,
                id=request.id,
                priority=request.priority,
                deadline=due,
                ends_after=self.lengths.get(request.id),
            )
        except QueueFull:
            self.metrics[request.id] = RequestMetrics(
                id=request.id,
                prompt=len(request.prompt),
                output=0,
                finish=QUEUE_FULL,
                arrival=request.arrival,
            )

    def step(self) -> None:
        told = self.engine.step()
        now = self.now
        for output in told:
            if output.id in self.outputs:
                self.outputs[output.id] += output.tokens
                self.moments[output.id] += [now] * len(output.tokens)

    def steps(self) -> list[StepRecord]:
        """Return the steps of this replay, with times relative to its start."""
        count = self.engine.counters.steps - self._steps
        records = self.engine.trace
        self._check_kept(count, len(records))
        return [replace(one, at=one.at - self.origin) for one in records[len(records) - count :]]

    def collect(self) -> None:
        """Collect the times of the ended requests, relative to their arrival times."""
        count = sum(self.engine.counters.finished.values()) - self._ended
        count -= len(self.metrics)  # the engine keeps no times of rejected requests
        found = self.engine.metrics
        self._check_kept(count, len(found))
        for one in found[len(found) - count :]:
            due = self.due[one.id]
            late = max(one.arrival - self.origin - due, 0.0)
            self.metrics[one.id] = replace(
                one,
                arrival=due,
                queue=None if one.queue is None else one.queue + late,
                ttft=None if one.ttft is None else one.ttft + late,
                e2e=None if one.e2e is None else one.e2e + late,
            )

    @staticmethod
    def _check_kept(count: int, kept: int) -> None:
        if count > kept:
            raise ValueError(
                f"the engine must keep all records of a replay, got {kept} of {count}; make it "
                "with a larger keep"
            )


def replay(
    engine: Engine,
    requests: Workload | Sequence[Request],
    *,
    lengths: Mapping[str, int] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Replay:
    """Serve all requests to the end on an idle engine, submitting each at its arrival time.

    requests: a workload, or requests whose output lengths are in `lengths`, by id; a request that
    isn't in it continues to max_tokens, or to an EOS if the engine has one. Arrivals and deadlines
    are in seconds from now. The scheduler knows max_tokens but not the lengths. sleep: waits that
    many seconds on the engine's clock.
    An engine can run several replays in sequence. Known prefixes stay in its cache unless
    `engine.pool.clear()` is called in between.
    Raises ValueError if the engine isn't idle, keeps fewer records than there are steps, or
    refuses a request, and if ids aren't unique. The remaining requests are then cancelled.
    """
    if not engine.idle:
        raise ValueError("the engine must be idle, got one with requests; drain it first")
    if isinstance(requests, Workload):
        lengths = requests.lengths if lengths is None else lengths
        requests = requests.requests()
    coming = sorted(requests, key=lambda one: one.arrival)
    if len({one.id for one in coming}) < len(coming):
        raise ValueError("ids must be unique, got one twice; rename it")
    player = _Player(engine, lengths or {})
    try:
        _play(player, coming, sleep)
    except BaseException:
        _cancel(engine)
        raise
    player.collect()
    steps = player.steps()
    metrics = tuple(player.metrics[one.id] for one in coming)
    return Replay(
        metrics=metrics,
        steps=tuple(steps),
        blocks=(),
        num_blocks=engine.pool.num_blocks,
        slots=engine.scheduler.max_num_seqs,
        batches=engine.scheduler.policy.batches,
        begin=min((one.arrival for one in metrics), default=0.0),
        end=max((one.arrival + (one.e2e or 0.0) for one in metrics), default=0.0),
        outputs={id: tuple(tokens) for id, tokens in player.outputs.items()},
        moments={id: tuple(seconds) for id, seconds in player.moments.items()},
    )


def _play(player: _Player, coming: Sequence[Request], sleep: Callable[[float], object]) -> None:
    place = 0
    while place < len(coming) or not player.engine.idle:
        while place < len(coming) and coming[place].arrival <= player.now + _ROUNDING_S:
            player.submit(coming[place])
            place += 1
        if not player.engine.idle:
            player.step()
        elif place < len(coming):
            sleep(max(coming[place].arrival - player.now, 0.0))


def _cancel(engine: Engine) -> None:
    for state in list(engine.scheduler.states.values()):
        engine.cancel(state.id)
    while not engine.idle:
        engine.step()
