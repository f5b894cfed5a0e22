"""Find in the logs of several ranks where their collectives hang, and which rank is at fault."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
    """Return how many collectives finish, and the rank that then stands alone, or -1."""
    del captured
    longest = max(map(len, logs))
    for done in range(longest):
        heads = [log[done] if done < len(log) else None for log in logs]
        alone = [rank for rank, head in enumerate(heads) if heads.count(head) == 1]
        if alone:
            return done, alone[0]
    return longest, -1


def some_log(chance: random.Random, length: int) -> list[_Op]:
    """Draw a log of collectives in which no two neighbors are the same."""
    log: list[_Op] = []
    while len(log) < length:
        op = (chance.choice(KINDS), chance.choice(SIZES), chance.random() < 0.7)
        if not log or log[-1] != op:
            log.append(op)
    return log


def one_differs(chance: random.Random, log: Sequence[_Op], change: str) -> list[_Op]:
    """Return a copy of the log with one change of the given kind at a random place."""
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
)  # (change, number of ranks, odd rank)


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


ODD_RANK = Exercise(
    id="tensor_parallel.odd_rank",
    points=4,
    beyond=2,
    reference=odd_rank,
    mistakes=[
        Mistake(
            "kinds alone",
            ("log[done] if", "log[done][0] if"),
            "You compare the kinds of collectives. One of 512 bytes does not meet one of 4096, and "
            "one in a graph meets none outside.",
        ),
        Mistake(
            "sizes unseen",
            ("log[done] if", "log[done][::2] if"),
            "Your ranks agree where their bytes differ. The one with more would wait for what "
            "never comes.",
        ),
        Mistake(
            "graphs unseen",
            ("log[done] if", "log[done][:2] if"),
            "Your ranks agree where one of them replays a graph and another launches the same "
            "collective by itself. NCCL asks for the same on all ranks.",
        ),
        Mistake(
            "sizes alone",
            ("log[done] if", "log[done][1:] if"),
            "Your ranks agree where they call different collectives of the same size.",
        ),
        Mistake(
            "lengths alone",
            [
                ("range(longest)", "[min(map(len, logs))]"),
                ("log[done] if done < len(log) else None", "len(log)"),
            ],
            "You compare how long the logs are. Logs of one length may differ, and ranks may stop "
            "before the shortest of them ends.",
        ),
        Mistake(
            "order unseen",
            ("if alone:", "if alone and any(sorted(log) != sorted(logs[0]) for log in logs):"),
            "Your ranks agree when they have the same collectives in any order. One that waits in "
            "the second does not come to the first.",
        ),
        Mistake(
            "ends unseen",
            ("max(map", "min(map"),
            "With you nobody misses a rank whose log has ended. The others wait for it.",
        ),
        Mistake(
            "last difference",
            ("range(longest)", "reversed(range(longest))"),
            "You found the last place where logs differ. Nobody comes that far.",
        ),
        Mistake(
            "first rank is right",
            ("alone[0]", "alone[0] or 1"),
            "You take rank 0 for right, and blame another where it stands alone.",
        ),
        Mistake("ranks from 1", ("alone[0]", "alone[0] + 1"), "You count ranks from 1."),
        Mistake(
            "the hanging one counted",
            ("done, alone[0]", "done + 1, alone[0]"),
            "You count the collective in which the ranks hang. It never finishes.",
        ),
        Mistake(
            "somebody always",
            ("longest, -1", "longest, 0"),
            "You blame a rank where all logs are alike.",
        ),
    ],
    cases=_cases,
    returns=("finished collectives", "odd rank"),
    explanation="A communicator does not look at names: the n-th collective of one rank meets the "
    "n-th of each other, and finishes when all have come and want the same. So the first place "
    "where the logs differ is the last place that anybody reaches, and what stands behind it "
    "explains nothing. A log that has ended differs as well. All ranks hang alike, which is why "
    "nobody's own stack trace tells who is to blame; only logs side by side do, and there the "
    "majority is mostly right. This reference knows no replays.",
    hints=(
        "In the example, what does each of the three ranks ask for in second place, and what in "
        "third place? Which of these calls never happen?",
        "Compare the logs place by place. At each place, collect the whole entry of each rank, or "
        "a mark for a log that has ended. At the first place where they are not all the same, the "
        "index of the place is the number of finished collectives, and the entry that occurs once "
        "belongs to the odd rank.",
        "`wanted = [log[n] if n < len(log) else None for log in logs]` is what all ranks ask for "
        "at place n, for n up to the end of the longest log. The rank with "
        "`wanted.count(wanted[rank]) == 1` stands alone.",
    ),
)
