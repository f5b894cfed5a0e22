"""Logs of collectives of several ranks: how far they come, and who is to blame."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["ODD_RANK", "one_differs", "some_log"]

KINDS = ("all-reduce", "all-gather", "broadcast")
SIZES = (256, 512, 4096)
_Op = tuple[str, int, bool]
_Logs = Sequence[Sequence[Any]]
_Answer = tuple[int, int]


def odd_rank(logs: _Logs, captured: Sequence[Mapping[int, Any]] | None) -> _Answer:
    """How many collectives finish, and the rank that then stands alone, or -1."""
    del captured
    done = 0
    while True:
        heads = [log[done] if done < len(log) else None for log in logs]
        alone = [rank for rank, head in enumerate(heads) if heads.count(head) == 1]
        if alone:
            return done, alone[0]
        if heads[0] is None:
            return done, -1
        done += 1


def _seen(fault: str, op: _Op) -> tuple[Any, ...]:
    kind, size, graph = op
    return {
        "kinds alone": (kind,),
        "sizes unseen": (kind, graph),
        "graphs unseen": (kind, size),
        "sizes alone": (size, graph),
    }.get(fault, op)


def _by_length(logs: _Logs) -> _Answer:
    lengths = [len(log) for log in logs]
    alone = [rank for rank, length in enumerate(lengths) if lengths.count(length) == 1]
    return min(lengths), alone[0] if alone else -1


def _last_difference(logs: _Logs) -> _Answer:
    longest = max(map(len, logs))
    for at in reversed(range(longest)):
        heads = [log[at] if at < len(log) else None for log in logs]
        alone = [rank for rank, head in enumerate(heads) if heads.count(head) == 1]
        if alone:
            return at, alone[0]
    return longest, -1


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(logs: _Logs, captured: Sequence[Mapping[int, Any]] | None) -> _Answer:
        del captured
        if fault == "lengths alone":
            return _by_length(logs)
        if fault == "last difference":
            return _last_difference(logs)
        counts = [Counter(log) for log in logs]
        if fault == "order unseen" and all(one == counts[0] for one in counts):
            return len(logs[0]), -1
        seen = [[_seen(fault, op) for op in log] for log in logs]
        if fault == "ends unseen":
            shortest = min(map(len, seen))
            seen = [log[:shortest] for log in seen]
        done, odd = odd_rank(seen, None)
        if odd >= 0 and fault == "first rank is right" and odd == 0:
            odd = 1
        if odd >= 0 and fault == "ranks from 1":
            odd += 1
        if odd >= 0 and fault == "the hanging one counted":
            done += 1
        if odd < 0 and fault == "somebody always":
            odd = 0
        return done, odd

    return answer


def some_log(chance: random.Random, length: int) -> list[_Op]:
    """A log of different collectives: no two neighbours are the same."""
    log: list[_Op] = []
    while len(log) < length:
        op = (chance.choice(KINDS), chance.choice(SIZES), chance.random() < 0.7)
        if not log or log[-1] != op:
            log.append(op)
    return log


def one_differs(chance: random.Random, log: Sequence[_Op], change: str) -> list[_Op]:
    """The log with one change of a kind at a random place."""
    at = chance.randrange(1, len(log) - 1)
    kind, size, graph = log[at]
    if change == "kind":
        kind = chance.choice([one for one in KINDS if one != kind])
    if change == "size":
        size = chance.choice([one for one in SIZES if one != size])
    if change == "graph":
        graph = not graph
    before, behind = list(log[:at]), list(log[at + 1 :])
    if change == "end cut":
        return before
    if change == "one more":
        return [*log, log[0]]
    if change == "left out":
        return before + behind
    if change == "exchanged":
        return [*before, behind[0], log[at], *behind[1:]]
    return [*before, (kind, size, graph), *behind]


_CHANGES = (
    ("kind", 4, 0),
    ("size", 3, 2),
    ("graph", 5, 1),
    ("end cut", 4, 3),
    ("one more", 3, 0),
    ("left out", 6, 4),
    ("exchanged", 4, 2),
    ("", 5, 0),
)  # what differs, ranks, the odd one


def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    cases = []
    for change, ranks, odd in _CHANGES:
        log = some_log(chance, chance.randint(6, 12))
        logs = [list(log) for _ in range(ranks)]
        if change:
            logs[odd] = one_differs(chance, log, change)
        cases.append({"logs": logs, "captured": None})
    return cases


_HINTS = {
    "kinds alone": "You compare the kinds of collectives. One of 512 bytes does not meet one of "
    "4096, and one in a graph meets none outside.",
    "sizes unseen": "Your ranks agree where their bytes differ. The one with more would wait for "
    "what never comes.",
    "graphs unseen": "Your ranks agree where one of them replays a graph and another launches the "
    "same collective by itself. NCCL asks for the same on all ranks.",
    "sizes alone": "Your ranks agree where they call different collectives of the same size.",
    "lengths alone": "You compare how long the logs are. Logs of one length may differ, and ranks "
    "may stop before the shortest of them ends.",
    "order unseen": "Your ranks agree when they have the same collectives in any order. One that "
    "waits in the second does not come to the first.",
    "ends unseen": "With you nobody misses a rank whose log has ended. The others wait for it.",
    "last difference": "You found the last place where logs differ. Nobody comes that far.",
    "first rank is right": "You take rank 0 for right, and blame another where it stands alone.",
    "ranks from 1": "You count ranks from 1.",
    "the hanging one counted": "You count the collective in which the ranks hang. It never "
    "finishes.",
    "somebody always": "You blame a rank where all logs are alike.",
}

ODD_RANK = Exercise(
    id="tensor_parallel.odd_rank",
    reference=odd_rank,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("finished collectives", "odd rank"),
    explanation="A communicator does not look at names: the n-th collective of one rank meets the "
    "n-th of each other, and finishes when all have come and want the same. So the first place "
    "where the logs differ is the last place that anybody reaches, and what stands behind it "
    "explains nothing. A log that has ended differs as well. All ranks hang alike, which is why "
    "nobody's own stack trace tells who is to blame; only logs side by side do, and there the "
    "majority is mostly right. This reference knows no replays.",
)
