"""The fastest draft length, from a log and measured times."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BEST_LENGTH"]

DRAFT_TIMES = (0.9, 1.1, 1.3, 1.5)  # one per student; 1.0 without a student number
BURSTS = 0.85  # probability that the text stays easy or stays hard
_Log = Sequence[tuple[int, int]]


def best_length(
    log: _Log, times: Sequence[float], rows: int, *, draft_time: float
) -> tuple[int, float]:
    """The best draft length, and how many times as fast as plain decoding it is."""
    del rows
    best, fastest = 0, 1.0
    expected = reached = 1.0
    for length in range(1, max(drafted for drafted, _ in log) + 1):
        judged = [accepted for drafted, accepted in log if min(drafted, accepted + 1) >= length]
        if not judged:
            break
        rate = sum(accepted >= length for accepted in judged) / len(judged)
        reached *= rate
        expected += reached
        time = times[length + 1] + length * draft_time
        speedup = expected * times[1] / time
        if speedup > fastest:
            best, fastest = length, speedup
    return best, fastest


def simulated_log(chance: random.Random, easy: float, hard: float, longest: int) -> _Log:
    """(drafted, accepted) of 60 blocks in a text with easy and hard stretches.

    As in some engines, drafts get longer after a full acceptance and shorter after a rejection.
    """
    log, length, at_ease = [], longest, True
    for _ in range(60):
        at_ease = at_ease == (chance.random() < BURSTS)
        rate = easy if at_ease else hard
        accepted = 0
        while accepted < length and chance.random() < rate:
            accepted += 1
        log.append((length, accepted))
        length = min(length + 2, longest) if accepted == length else max(length - 1, 1)
    chance.shuffle(log)
    return log


def _times(chance: random.Random, plain: float, slope: float, count: int) -> list[float]:
    """Milliseconds that a forward over 0, 1, 2, ... tokens takes."""
    times = [0.0, plain]
    for _ in range(count):
        times.append(times[-1] + slope * chance.uniform(0.6, 1.4))
    return [round(one, 3) for one in times]


def _cases(seed: int) -> list[dict[str, Any]]:
    """Fast and slow targets, one for which no draft pays, and one for which one token pays."""
    chance = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for easy, hard, longest, plain, slope in (
        (0.9, 0.35, 6, 10.0, 0.5),
        (0.85, 0.3, 5, 12.0, 1.4),
        (0.95, 0.6, 6, 20.0, 0.4),
        (0.8, 0.1, 4, 9.0, 1.0),
        (0.3, 0.05, 4, 4.0, 2.5),
    ):
        log = simulated_log(chance, easy, hard, longest)
        cases.append({"log": log, "times": _times(chance, plain, slope, longest + 2), "rows": 1})
    cases[1]["log"] += [(0, 0)] * 5  # blocks without a draft
    # With every seed, one token pays and four don't: the longest draft isn't always best.
    log = [(4, 1)] * 40 + [(4, 0)] * 8 + [(4, 4)] * 4
    chance.shuffle(log)
    cases.append({"log": log, "times": _times(chance, 10.0, 2.0, 6), "rows": 1})
    return cases


def _own_time(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"speculative.best_length:{student}")
    return {"draft_time": chance.choice(DRAFT_TIMES) if student else 1.0}


_MISTAKES = [
    Mistake("width ignored", ("times[length + 1]", "times[1]"),
            "Your target takes as long for a block as for one token. `times` says what each "
            "further token costs."),
    Mistake("one row short", ("times[length + 1]", "times[length]"),
            "Your target reads only as many tokens as were drafted. It also reads the token before "
            "them."),
    Mistake("times added up", ("times[length + 1]", "(length + 1) * times[1]"),
            "You add up forwards over one token each. The target reads a block in one forward; "
            "that is why drafting pays."),
    Mistake("bonus forgotten", ("expected = reached = 1.0", "expected, reached = 0.0, 1.0"),
            "You count only the accepted tokens. Each block delivers one more."),
    Mistake("shares multiplied",
            ("/ len(judged)", "/ sum(drafted >= length for drafted, _ in log)"),
            "You multiply shares of all drafts that were long enough. Those shares already include "
            "the earlier rejections, so you count these several times."),
    Mistake("shares of long drafts",
            [("*= rate", "= rate"),
             ("/ len(judged)", "/ sum(drafted >= length for drafted, _ in log)")],
            "You take the share of long enough drafts that were accepted up to each position. Long "
            "drafts were made where the text was easy. Take the share accepted among the tokens "
            "judged at each position, and multiply these shares."),
    Mistake("short ones rejected", [("*= rate", "= rate"), ("/ len(judged)", "/ len(log)")],
            "You treat a draft that ended early as if it were rejected at the next position. It "
            "says nothing about the positions after its end."),
    Mistake("one rate",
            ("sum(accepted >= length for accepted in judged) / len(judged)",
             "sum(a for _, a in log) / sum(min(d, a + 1) for d, a in log)"),
            "You use one rate for all positions. In this log, the rate depends on the position."),
    Mistake("share of the drafted",
            ("sum(accepted >= length for accepted in judged) / len(judged)",
             "sum(a for _, a in log) / sum(d for d, _ in log)"),
            "You divide all accepted tokens by all drafted ones and use that as the rate at each "
            "position. It also counts tokens after a rejection, which were never judged."),
    Mistake("first rate for all",
            ("sum(accepted >= length for accepted in judged) / len(judged)",
             "sum(a > 0 for _, a in log) / sum(d > 0 for d, _ in log)"),
            "You use the first position's rate for all. In a text with easy stretches, the rate is "
            "different after an acceptance."),
    Mistake("conditionals added", ("+= reached", "+= rate"),
            "You add up the rates of the positions. The second token counts only if the first was "
            "accepted too."),
    Mistake("whole or nothing", ("expected += reached", "expected = 1 + length * reached"),
            "You count a block only if its whole draft was accepted. The tokens accepted before "
            "the first rejection count too."),
    Mistake("drafting free", (" + length * draft_time", ""), "Your drafts cost no time."),
    Mistake("one draft per block", ("length * draft_time", "draft_time"),
            "You count one forward of the draft model per block. It needs one forward per drafted "
            "token."),
    Mistake("one draft more", ("length * draft_time", "(length + 1) * draft_time"),
            "You count one forward of the draft model more than there are drafted tokens."),
    Mistake("most tokens", ("speedup > fastest", "reached > 0"),
            "You choose the length with the most tokens per block. That is always the longest; the "
            "time of a block grows too."),
    Mistake("never none", ("fastest = 0, 1.0", "fastest = 1, 0.0"),
            "You always draft. For one target in the cases, no draft pays."),
    Mistake("tokens per millisecond",
            [("fastest = 0, 1.0", "fastest = 0, 1 / times[1]"),
             ("expected * times[1]", "expected")],
            "You return tokens per millisecond. Divide by the tokens per millisecond of plain "
            "decoding."),
]  # fmt: skip

BEST_LENGTH = Exercise(
    id="speculative.best_length",
    points=6,
    beyond=2,
    reference=best_length,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_time,
    returns=("length", "speed-up"),
    rtol=1e-9,
    explanation="Only drafts that reached a position say anything about it. The rates multiply to "
    "the probability of getting that far, and these probabilities add up to the expected number of "
    "accepted tokens. For drafts that end early, this is the Kaplan-Meier estimator of survival. "
    "With one rate a for all positions, a block delivers (1 − a^(γ+1)) / (1 − a) tokens. That is "
    "wrong in a text with easy and hard stretches, where a token is accepted more often after an "
    "accepted one. Try all lengths: if you stop at the first one that is worse than the one "
    "before, you may miss a better one. This reference handles one row.",
    hints=(
        "Which of the four blocks in the example tell you something about position 2, and why do "
        "the others not? Then name every forward that a block with γ drafted tokens needs.",
        "The chance at a position is a share of the blocks in which that position was judged. A "
        "block brings 1 token and, for each position of its draft, the product of the chances up "
        "to that position. Divide this sum by the time of the block, with target and draft model "
        "together, and compare it with 1 token in `times[1]`. Try every length, 0 included.",
        "`judged = [a for d, a in log if d >= i and a >= i - 1]` holds the accepted tokens of "
        "each block that was judged at position `i`. The chance there is the share of `judged` "
        "with `a >= i`, and the first position with an empty `judged` ends the search. A draft "
        "of `i` tokens costs `times[i + 1] + i * draft_time`.",
    ),
)
