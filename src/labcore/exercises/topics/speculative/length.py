"""The draft length that pays best, from a log and measured times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BEST_LENGTH"]

DRAFT_TIMES = (0.9, 1.1, 1.3, 1.5)  # a student's; nobody's is 1.0
BURSTS = 0.85  # chance that the text stays as easy or hard as it is
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
        reached *= sum(accepted >= length for accepted in judged) / len(judged)
        expected += reached
        speedup = expected * times[1] / (times[length + 1] + length * draft_time)
        if speedup > fastest:
            best, fastest = length, speedup
    return best, fastest


def _survivals(fault: str, log: _Log) -> list[float]:
    """The chance that the first n drafted tokens are accepted, for n = 1, 2, ..."""
    longest = max(drafted for drafted, _ in log)
    accepted_all = sum(accepted for _, accepted in log)
    rates = {
        "one rate": accepted_all / sum(min(drafted, accepted + 1) for drafted, accepted in log),
        "share of the drafted": accepted_all / sum(drafted for drafted, _ in log),
    }
    found, reached = [], 1.0
    for length in range(1, longest + 1):
        long = [accepted for drafted, accepted in log if drafted >= length]
        judged = [accepted for accepted in long if accepted >= length - 1]
        passed = sum(accepted >= length for accepted in judged)
        if not judged:
            break
        if fault in rates:
            reached *= rates[fault]
        elif fault == "shares multiplied":
            reached *= passed / len(long)
        elif fault == "shares of long drafts":
            reached = passed / len(long)
        elif fault == "short ones rejected":
            reached = sum(accepted >= length for _, accepted in log) / len(log)
        elif fault == "first rate for all":
            first = [accepted for drafted, accepted in log if drafted]
            reached *= sum(accepted > 0 for accepted in first) / len(first)
        else:
            reached *= passed / len(judged)
        found.append(reached)
    return found


def _wrongly(fault: str) -> Callable[..., tuple[int, float]]:
    def choose(
        log: _Log, times: Sequence[float], rows: int, *, draft_time: float
    ) -> tuple[int, float]:
        del rows
        survivals = _survivals(fault, log)
        found = []
        for length in range(len(survivals) + 1):
            bonus = 0 if fault == "bonus forgotten" and length else 1
            expected = bonus + sum(survivals[:length])
            if fault == "whole or nothing" and length:
                expected = 1 + length * survivals[length - 1]
            if fault == "conditionals added":
                ratios = [b / a if a else 0.0 for a, b in itertools.pairwise([1.0, *survivals])]
                expected = 1 + sum(ratios[:length])
            read = {"width ignored": 1, "one row short": max(length, 1)}.get(fault, length + 1)
            drafting = length + (fault == "one draft more" and length > 0)
            if fault == "drafting free":
                drafting = 0
            if fault == "one draft a block":
                drafting = min(length, 1)
            time = times[read] + drafting * draft_time
            if fault == "times added up":
                time = (length + 1) * times[1] + length * draft_time if length else times[1]
            plain = 1.0 if fault == "tokens a millisecond" else times[1]
            found.append((length, expected * plain / time, expected))
        if fault == "never none":
            found = found[1:]
        key = 2 if fault == "most tokens" else 1
        length, speedup, _ = max(found, key=lambda one: (one[key], -one[0]))
        return length, speedup

    return choose


def simulated_log(chance: random.Random, easy: float, hard: float, longest: int) -> _Log:
    """(drafted, accepted) of 60 blocks in a text with easy and hard stretches.

    The drafts get longer after a success and shorter after a failure, as some engines make them.
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
    """Milliseconds of a forward over 0, 1, 2, ... tokens."""
    times = [0.0, plain]
    for _ in range(count):
        times.append(times[-1] + slope * chance.uniform(0.6, 1.4))
    return [round(one, 3) for one in times]


def _cases(seed: int) -> list[dict[str, Any]]:
    """Cheap and dear targets, drafts of up to 6, none that pays, and one token that does."""
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
    cases[1]["log"] += [(0, 0)] * 5  # nothing was drafted
    # One token pays and four never do, whatever was drawn: the longest is not always the best.
    log = [(4, 1)] * 40 + [(4, 0)] * 8 + [(4, 4)] * 4
    chance.shuffle(log)
    cases.append({"log": log, "times": _times(chance, 10.0, 2.0, 6), "rows": 1})
    return cases


def _own_time(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"speculative.best_length:{student}")
    return {"draft_time": chance.choice(DRAFT_TIMES) if student else 1.0}


_HINTS = {
    "width ignored": "Your target takes as long for a block as for one token. The times say what "
    "each further token costs.",
    "one row short": "Your target reads as many tokens as were drafted. It reads the one before "
    "them too.",
    "times added up": "You add up forwards over one token each. The target reads a block at once: "
    "that is what makes it pay.",
    "bonus forgotten": "You count the accepted tokens alone. Each block brings one token more.",
    "shares multiplied": "You multiply shares of all drafts that were long enough. They already "
    "contain the rejections before, so these count several times.",
    "shares of long drafts": "Of the drafts that were long enough you take the share accepted so "
    "far. Long drafts were made where the text was easy; take what was accepted of what was judged "
    "at each place, and multiply.",
    "short ones rejected": "A draft that ended counts as one that was rejected there. It says "
    "nothing about the places behind its end.",
    "one rate": "You use one rate for all places. In this log it depends on the place.",
    "share of the drafted": "You take accepted by drafted as the rate at each place. It also "
    "counts tokens behind a rejection, which nobody judged.",
    "first rate for all": "You take the first place's rate for all. A text with easy stretches has "
    "other rates behind an acceptance.",
    "conditionals added": "You add up the rates of the places. The second token counts only where "
    "the first was accepted too.",
    "whole or nothing": "You count a block only if its draft is accepted as a whole. What was "
    "accepted before the first rejection counts too.",
    "drafting free": "Your drafts cost no time.",
    "one draft a block": "You count one forward of the draft model a block. It drafts one token "
    "after another.",
    "one draft more": "You count one forward of the draft model more than there are drafted "
    "tokens.",
    "most tokens": "You choose the length with the most tokens a block. That is always the "
    "longest; the time of a block grows too.",
    "never none": "You always draft. There is a target in the cases for which nothing pays.",
    "tokens a millisecond": "You return tokens a millisecond. Divide by those of plain decoding.",
}

BEST_LENGTH = Exercise(
    id="speculative.best_length",
    reference=best_length,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_time,
    returns=("length", "speed-up"),
    rtol=1e-9,
    explanation="What is known of a place is known from the drafts that came so far: the rates "
    "multiply to the chance of getting there, and the chances add up to the accepted tokens. For "
    "drafts that end early this is the Kaplan-Meier estimator of survival. With one rate a for all "
    "places the sum is (1 − a^(γ+1)) / (1 − a). In a text with easy and hard stretches that is "
    "wrong, since a token is accepted more often behind an accepted one. All lengths are tried: "
    "stopping at the first that pays less than the one before could miss a better one. This "
    "reference knows one row.",
)
