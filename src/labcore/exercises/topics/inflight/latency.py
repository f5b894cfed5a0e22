"""Percentiles of waiting times from the traces of several replicas."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating

__all__ = ["LATENCY", "NOBODYS", "PERCENTS", "some_replicas"]

NOBODYS = 90
PERCENTS = (75, 80, 85, 95)  # a student's
BETWEEN = 0.000_176  # s; no time is equal to a goal, in which rounding would decide
_Step = tuple[float, float, Sequence[str], Mapping[str, int]]
_Replicas = Sequence[tuple[Mapping[str, float], Sequence[_Step]]]
_Answer = tuple[float, ...]


def latencies(
    replicas: _Replicas, goal: tuple[float, float] | None, *, percent: int
) -> tuple[float, float, float]:
    """The percentile of TTFT, of TPOT and of the time in the queue, in seconds."""
    del goal
    ttft, tpot, queue = [], [], []
    for arrivals, steps in replicas:
        for name, arrival in arrivals.items():
            admitted = [begin for begin, _, names, _ in steps if name in names]
            ends = [end for _, end, _, tokens in steps if name in tokens]
            count = sum(tokens.get(name, 0) for *_, tokens in steps)
            if admitted:
                queue.append(admitted[0] - arrival)
            if ends:
                ttft.append(ends[0] - arrival)
            if count > 1:
                tpot.append((ends[-1] - ends[0]) / (count - 1))
    ttft_at, tpot_at, queue_at = (
        sorted(values)[math.ceil(len(values) * percent / 100) - 1] for values in (ttft, tpot, queue)
    )
    return ttft_at, tpot_at, queue_at


@dataclass(kw_only=True, slots=True)
class _Life:
    """Of one request. admitted: (begin, end) of the steps; said: (begin, end, tokens)."""

    arrival: float
    admitted: list[tuple[float, float]] = field(default_factory=list)
    said: list[tuple[float, float, int]] = field(default_factory=list)


def _lives(arrivals: Mapping[str, float], steps: Sequence[_Step]) -> list[_Life]:
    lives = {name: _Life(arrival=arrival) for name, arrival in arrivals.items()}
    for begin, end, names, tokens in steps:
        for name in names:
            lives[name].admitted.append((begin, end))
        for name, count in tokens.items():
            lives[name].said.append((begin, end, count))
    return list(lives.values())


def _first(fault: str, life: _Life) -> list[float]:
    if not life.said:
        return []
    begin, end, _ = life.said[0]
    if fault == "from admission":
        return [end - life.admitted[0][0]]
    return [(begin if fault == "begin of the step" else end) - life.arrival]


def _each(fault: str, life: _Life) -> list[float]:
    ends = [end for _, end, _ in life.said]
    count = sum(tokens for *_, tokens in life.said)
    if fault == "gaps of all":
        return [two - one for one, two in itertools.pairwise(ends)]
    if count < 2:
        return [0.0] if count and fault == "one token counted" else []
    if fault == "divided by all tokens":
        return [(ends[-1] - ends[0]) / count]
    if fault == "steps for tokens":
        return [(ends[-1] - ends[0]) / max(len(ends) - 1, 1)]
    if fault == "whole time":
        return [(ends[-1] - life.arrival) / count]
    return [(ends[-1] - ends[0]) / (count - 1)]


def _queued(fault: str, life: _Life) -> list[float]:
    if not life.admitted:
        return [0.0] if fault == "never admitted counted" else []
    begin, end = life.admitted[-1 if fault == "last admission" else 0]
    return [(end if fault == "end of the step" else begin) - life.arrival]


def _percentile(fault: str, values: Iterable[float], percent: int) -> float:
    ordered = sorted(values)
    if fault == "interpolated":
        return float(numpy.percentile(ordered, percent))
    if fault == "mean":
        return math.fsum(ordered) / len(ordered)
    rank = len(ordered) * percent / 100
    rank = math.floor(rank) if fault == "rank rounded down" else math.ceil(rank)
    return ordered[max(rank, 1) - 1]


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(replicas: _Replicas, goal: tuple[float, float] | None, *, percent: int) -> _Answer:
        del goal
        groups = [_lives(*replica) for replica in replicas]
        apart = fault in ("mean of percentiles", "slowest replica")
        if not apart:
            groups = [[life for group in groups for life in group]]
        told = [
            [
                _percentile(fault, (value for life in group for value in of(fault, life)), percent)
                for of in (_first, _each, _queued)
            ]
            for group in groups
        ]
        columns = list(zip(*told, strict=True))
        if fault == "mean of percentiles":
            return tuple(math.fsum(column) / len(column) for column in columns)
        return tuple(map(max, columns))

    return answer


_HINTS = {
    "divided by all tokens": "Your TPOT divides by the number of tokens. Between the first and the "
    "last one there is one gap less.",
    "steps for tokens": "Your TPOT counts steps. Some of them bring a request several tokens.",
    "whole time": "Your TPOT begins with the arrival. The time before the first token has a name "
    "of its own.",
    "gaps of all": "Your TPOT is a percentile of single gaps. Each request has one TPOT, however "
    "many tokens it has.",
    "one token counted": "With you a request of one token has a TPOT. It has no time between "
    "tokens.",
    "from admission": "Your TTFT begins when a request gets a slot. Its client has waited longer.",
    "begin of the step": "Your TTFT ends when the step begins that computes the first token. The "
    "client has it when the step is over.",
    "last admission": "Your queue ends with the last admission. Some requests lost their place and "
    "came in a second time.",
    "end of the step": "Your queue ends with the step that a request came in with. It has a slot "
    "from the beginning of it.",
    "never admitted counted": "Requests that were never admitted have a time in the queue with "
    "you, and the best one of all.",
    "mean of percentiles": "You take the percentile of each replica and then their mean. Nobody's "
    "waiting time is such a mean.",
    "slowest replica": "You take the percentile of each replica and then the largest. A client may "
    "be sent to any of them.",
    "interpolated": "You return a number between two waiting times. Asked for is one that somebody "
    "has waited.",
    "rank rounded down": "Fewer requests than asked for have waited as long as your number or "
    "less.",
    "mean": "You return means. The few that wait long are what a percentile is for.",
}
_WRONG = {name: _wrongly(name) for name in _HINTS}


def _replica(chance: random.Random, slow: float) -> tuple[dict[str, float], list[_Step]]:
    """A trace with a few slots, requests that lose their place, and some that are never let in."""
    count = chance.randint(9, 16)
    arrivals = {f"r{n}": round(chance.uniform(0, 2.0), 3) for n in range(count)}
    queue = sorted(arrivals, key=lambda name: arrivals[name])
    given_up = {name for name in queue[2:] if chance.random() < 0.08}
    left = {name: chance.choice((1, 1, 3, 5, 8, 13)) for name in queue}
    reading: dict[str, int] = {}
    steps: list[_Step] = []
    now = round(chance.uniform(0, 0.2), 3)
    while any(name not in given_up for name in (*queue, *reading)):
        admitted = []
        for name in [one for one in queue if one not in given_up and arrivals[one] <= now]:
            if len(reading) < 4:
                reading[name] = chance.choice((0, 0, 1, 2))
                admitted.append(name)
                queue.remove(name)
        tokens = {}
        for name in list(reading):
            if reading[name]:
                reading[name] -= 1
                continue
            started = any(name in said for *_, said in steps)
            tokens[name] = min(chance.choice((1, 1, 1, 2, 4)) if started else 1, left[name])
            left[name] -= tokens[name]
            if not left[name]:
                del reading[name]
            elif chance.random() < 0.05:
                del reading[name]
                queue.insert(0, name)
        end = round(now + slow * chance.uniform(0.02, 0.12), 3)
        if admitted or tokens or reading:
            steps.append((now, end, admitted, tokens))
        now = end
    return arrivals, steps


def some_replicas(chance: random.Random, *, goal: bool = False) -> dict[str, Any]:
    """One to three replicas, one of them slower; ids are a replica's own."""
    replicas = [
        _replica(chance, chance.choice((1.0, 1.0, 2.5))) for _ in range(chance.randint(1, 3))
    ]
    return {
        "replicas": replicas,
        "goal": tuple(round(chance.uniform(*at), 3) + BETWEEN for at in ((0.2, 0.9), (0.05, 0.12)))
        if goal
        else None,
    }


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"percent": percent} for percent in (NOBODYS, *PERCENTS)]
    return separating(lambda: some_replicas(chance), [latencies, *_WRONG.values()], variants)


def _own_percent(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.latency:{student}")
    return {"percent": chance.choice(PERCENTS) if student else NOBODYS}


LATENCY = Exercise(
    id="inflight.latency",
    reference=latencies,
    mistakes=[Mistake(name, _WRONG[name], hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_percent,
    returns=("TTFT", "TPOT", "time in the queue"),
    explanation="A client's clock starts when the request is sent and knows nothing of slots and "
    "steps: the first token comes at the end of a step, and n tokens have n − 1 gaps between "
    "them, whether they come one by one or several at once. A request has one TTFT and at most "
    "one TPOT, so that a long output does not count more than a short one. A percentile is a "
    "place in the order of all requests together, and the replicas' own percentiles do not say "
    "where it is: a replica that is slow for everybody may hold all of the slowest tenth. By the "
    "nearest rank it is a time that somebody has waited; interpolated ones differ little once "
    "there are many requests. With fewer than 100 of them a 99th percentile is the slowest. This "
    "reference knows no goal.",
)
