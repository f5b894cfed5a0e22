"""Compute percentiles of waiting times from the traces of several replicas."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

__all__ = ["LATENCY", "NOBODYS", "PERCENTS", "some_replicas"]

NOBODYS = 90
PERCENTS = (75, 80, 85, 95)  # for numbered students
BETWEEN = 0.000_176  # s; keeps every time away from the goal, where rounding would decide
_Step = tuple[float, float, Sequence[str], Mapping[str, int]]
_Replicas = Sequence[tuple[Mapping[str, float], Sequence[_Step]]]


def latencies(
    replicas: _Replicas, goal: tuple[float, float] | None, *, percent: int
) -> tuple[float, float, float]:
    """Return the percentiles of TTFT, TPOT, and the time in the queue, in seconds."""
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

    def nearest(values: Sequence[float]) -> float:
        rank = math.ceil(len(values) * percent / 100)
        return sorted(values)[rank - 1]

    return nearest(ttft), nearest(tpot), nearest(queue)


def _by_replica(join: Callable[[Iterable[float]], float]) -> Callable[..., tuple[float, ...]]:
    """Return the mistake that computes each replica's percentiles and joins them."""

    def answer(
        replicas: _Replicas, goal: tuple[float, float] | None, *, percent: int
    ) -> tuple[float, ...]:
        each = [latencies([replica], goal, percent=percent) for replica in replicas]
        return tuple(map(join, zip(*each, strict=True)))

    return answer


def _replica(chance: random.Random, slow: float) -> tuple[dict[str, float], list[_Step]]:
    """Draw a trace with four slots; some requests lose their slot, and some never get one."""
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
            started = any(name in earlier for *_, earlier in steps)
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
    """Draw one to three replicas, some of them slow; ids are unique within a replica."""
    replicas = [
        _replica(chance, chance.choice((1.0, 1.0, 2.5))) for _ in range(chance.randint(1, 3))
    ]
    return {
        "replicas": replicas,
        "goal": tuple(round(chance.uniform(*at), 3) + BETWEEN for at in ((0.2, 0.9), (0.05, 0.12)))
        if goal
        else None,
    }


def _measured(chance: random.Random) -> dict[str, Any]:
    """Draw replicas that each have all three times, because some mistakes need them."""
    while True:
        case = some_replicas(chance)
        try:
            for replica in case["replicas"]:
                latencies([replica], None, percent=NOBODYS)
        except IndexError:
            continue
        return case


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"percent": percent} for percent in (NOBODYS, *PERCENTS)]
    wrong = (function for function, _ in LATENCY.wrong.values())
    return separating(lambda: _measured(chance), [latencies, *wrong], variants)


def _own_percent(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.latency:{student}")
    return {"percent": chance.choice(PERCENTS) if student else NOBODYS}


LATENCY = Exercise(
    id="inflight.latency",
    points=5,
    beyond=2,
    reference=latencies,
    mistakes=[
        Mistake(
            "divided by all tokens",
            ("(count - 1)", "count"),
            "Your TPOT divides by the number of tokens. There is one gap fewer between the first "
            "and the last token.",
        ),
        Mistake(
            "steps for tokens",
            ("(count - 1)", "max(len(ends) - 1, 1)"),
            "Your TPOT counts steps. Some steps bring a request several tokens.",
        ),
        Mistake(
            "whole time",
            ("(ends[-1] - ends[0]) / (count - 1)", "(ends[-1] - arrival) / count"),
            "Your TPOT starts at the arrival. The time before the first token is the TTFT.",
        ),
        Mistake(
            "gaps of all",
            (
                "tpot.append((ends[-1] - ends[0]) / (count - 1))",
                "tpot += [two - one for one, two in zip(ends, ends[1:])]",
            ),
            "Your TPOT is a percentile of single gaps. Each request has one TPOT, however many "
            "tokens it has.",
        ),
        Mistake(
            "one token counted",
            [("count > 1", "count"), ("(count - 1)", "max(count - 1, 1)")],
            "You compute a TPOT for requests with one token. They have no time between tokens.",
        ),
        Mistake(
            "from admission",
            ("ends[0] - arrival", "ends[0] - admitted[0]"),
            "Your TTFT starts when a request gets a slot. Its client has waited longer.",
        ),
        Mistake(
            "beginning of the step",
            (
                "ends[0] - arrival",
                "next(begin for begin, *_, tokens in steps if name in tokens) - arrival",
            ),
            "Your TTFT ends when the step that computes the first token begins. The client gets "
            "the token when the step is over.",
        ),
        Mistake(
            "last admission",
            ("admitted[0]", "admitted[-1]"),
            "Your queue time ends with the last admission. Some requests were preempted and "
            "admitted a second time.",
        ),
        Mistake(
            "end of the step",
            ("[begin for begin, _, names", "[end for _, end, names"),
            "Your queue time ends with the step that admits the request. It has its slot from "
            "the beginning of that step.",
        ),
        Mistake(
            "never admitted counted",
            ("if name in names]", "if name in names] or [arrival]"),
            "You give requests that were never admitted a queue time, and the best one of all.",
        ),
        Mistake(
            "mean of percentiles",
            _by_replica(statistics.fmean),
            "You take each replica's percentile and then their mean. No client's waiting time is "
            "such a mean.",
        ),
        Mistake(
            "slowest replica",
            _by_replica(max),
            "You take each replica's percentile and then the largest. A client may be sent to "
            "any of the replicas.",
        ),
        Mistake(
            "interpolated",
            [
                ("del goal", "import numpy"),
                ("sorted(values)[rank - 1]", "float(numpy.percentile(values, percent))"),
            ],
            "You return a number between two waiting times. The nearest rank is a time that "
            "somebody actually waited.",
        ),
        Mistake(
            "rank rounded down",
            ("math.ceil(len(values) * percent / 100)", "max(len(values) * percent // 100, 1)"),
            "Too few requests waited as long as your number or less.",
        ),
        Mistake(
            "rank one too high",
            (
                "math.ceil(len(values) * percent / 100)",
                "min(int(len(values) * percent / 100) + 1, len(values))",
            ),
            "If `percent` % of the number of values is a whole number, you return the value "
            "after the right one. Of ten values in order, the ninth is the 90th percentile.",
        ),
        Mistake(
            "mean",
            ("sorted(values)[rank - 1]", "math.fsum(values) / len(values)"),
            "You return means. A percentile is meant to show the few that wait long.",
        ),
    ],
    cases=_cases,
    variant=_own_percent,
    returns=("TTFT", "TPOT", "time in the queue"),
    explanation="A client's clock starts when the request is sent and knows nothing of slots and "
    "steps: the first token comes at the end of a step, and n tokens have n − 1 gaps between them, "
    "whether they come one by one or several at once. A request has one TTFT and at most one TPOT, "
    "so a long output doesn't count more than a short one. A percentile is a rank among all "
    "requests together, and the replicas' own percentiles don't determine it: a single slow "
    "replica may hold all of the slowest tenth. By the nearest rank, it is a time that somebody "
    "actually waited; interpolated percentiles differ little once there are many requests. With "
    "fewer than 100 requests, the 99th percentile is the slowest one. This reference handles no "
    "goal.",
    hints=(
        "List the tokens of the example one by one, each with the second at which it came. How "
        "many gaps are between them? Then ask which requests have no TTFT, no TPOT, or no time in "
        "the queue.",
        "For each request of each replica, find when the first step that admitted it begins, when "
        "each step that brought it tokens ends, and how many tokens it got in all. Its TPOT is "
        "the time from the first token to the last, divided by the number of tokens less 1. Put "
        "the values of all replicas into one list for each time, and take the percentile of the "
        "whole list.",
        "`sorted(values)[math.ceil(len(values) * percent / 100) - 1]` is the percentile by the "
        "nearest rank: the rank is rounded up, and ranks count from 1.",
    ),
)
