"""Choose a draft and its length from measured times, or none if none pays."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

__all__ = ["BEST_DRAFT", "MARGINS", "NOBODYS", "some_drafts"]

NOBODYS = 1.05
MARGINS = (1.02, 1.03, 1.08, 1.1)  # for numbered students
_Drafts = Mapping[str, tuple[float, float, Sequence[float]]]
_Best = tuple[str | None, int, float]


def best_draft(
    drafts: _Drafts, passes: Mapping[int, float], pause: float | None, *, margin: float
) -> _Best:
    """Return the draft, its length, and how many times as fast as plain decoding it is."""
    del pause
    best: _Best = None, 0, 1.0
    fastest = 1.0
    for name, (found, cost, chances) in drafts.items():
        tokens = reached = 1.0
        for length, chance in enumerate(chances, 1):
            reached *= chance
            tokens += reached
            if length + 1 not in passes:
                continue
            drafted = passes[length + 1] + length * cost
            time = found * drafted + (1 - found) * passes[1]
            speed = (found * tokens + 1 - found) / time * passes[1]
            if speed >= margin and speed > fastest:
                fastest = speed
                best = name, length, speed
    return best


def some_drafts(chance: random.Random) -> dict[str, Any]:
    """Draw two or three drafts, and the times of the passes that somebody measured."""
    plain, slope = chance.uniform(5, 30), chance.choice((0.02, 0.05, 0.1, 0.3))
    passes = {1: round(plain, 2)}
    for n in sorted(chance.sample(range(2, 8), 4)):
        passes[n] = round(plain * (1 + slope * (n - 1) * chance.uniform(0.7, 1.4)), 2)
    drafts = {}
    for name in ("n-grams", "head", "small model")[: chance.choice((2, 3, 3))]:
        found = round(chance.uniform(0.15, 0.8), 2) if name == "n-grams" else 1.0
        cost = plain * {"n-grams": 0.001, "head": 0.06, "small model": 0.2}[name]
        first = chance.uniform(0.3, 0.9)
        fall = chance.uniform(0.8, 1.05)
        chances = [round(min(first * fall**n, 0.97), 2) for n in range(chance.randint(3, 7))]
        drafts[name] = (found, round(cost * chance.uniform(0.5, 2), 3), chances)
    return {"drafts": drafts, "passes": passes, "pause": None}


def _none_pays(chance: random.Random) -> dict[str, Any]:
    """Draw drafts that are all slower than plain decoding, for a target that is busy."""
    case = some_drafts(chance)
    plain = case["passes"][1]
    case["passes"] = {n: round(plain * (0.2 + 0.8 * n), 2) for n in case["passes"]}
    lower = {
        name: (found, cost, [round(0.7 * one, 2) for one in chances])
        for name, (found, cost, chances) in case["drafts"].items()
    }
    return {**case, "drafts": lower}


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"margin": margin} for margin in (NOBODYS, *MARGINS)]
    wrong = (function for function, _ in BEST_DRAFT.wrong.values())
    cases = separating(lambda: some_drafts(chance), [best_draft, *wrong], variants)
    return [*cases, _none_pays(chance)]


def _own_margin(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"capstone.best_draft:{student}")
    return {"margin": chance.choice(MARGINS) if student else NOBODYS}


_SPEED = "(found * tokens + 1 - found) / time * passes[1]"
_MISTAKES = [
    Mistake("checking free", ("passes[length + 1] + length", "passes[1] + length"),
            "Your pass takes as long with a draft as without one. `passes` says what the drafted "
            "tokens cost."),
    Mistake("one token short",
            [("length + 1 not in", "length not in"), ("passes[length + 1] +", "passes[length] +")],
            "Your pass reads only the drafted tokens. It also reads the token before them."),
    Mistake("drafting free", (" + length * cost", ""), "Your drafts cost no time."),
    Mistake("one cost per draft", ("length * cost", "cost"),
            "You count the cost of drafting once per draft. It is per drafted token."),
    Mistake("always found", ("tokens = reached = 1.0", "found = tokens = reached = 1.0"),
            "You assume that there is a draft before every pass. n-grams often find none."),
    Mistake("mean of the speeds",
            (_SPEED, "found * tokens / drafted * passes[1] + 1 - found"),
            "You average the speeds of the passes with and without a draft. A long pass takes up "
            "more of the time than a short one. Divide the mean tokens by the mean time."),
    Mistake("missed passes forgotten", (_SPEED, "found * tokens / time * passes[1]"),
            "A pass without a draft brings nothing in your count. It brings one token."),
    Mistake("own token forgotten", ("tokens = reached = 1.0", "tokens, reached = 0.0, 1.0"),
            "You count only the accepted tokens. The pass adds one token of its own."),
    Mistake("chances added", ("tokens += reached", "tokens += chance"),
            "You add up the chances. The second token counts only if the first was accepted too."),
    Mistake("whole drafts", ("tokens += reached", "tokens = 1 + length * reached"),
            "You count a draft only if all of it was accepted. The tokens before the first wrong "
            "one count too."),
    Mistake("most tokens",
            [("and speed > fastest", "and found * tokens > fastest"),
             ("fastest = speed", "fastest = found * tokens")],
            "You choose the most tokens per pass. A longer draft also takes more time."),
    Mistake("first that pays",
            ("if speed >= margin and speed > fastest", "if speed >= margin and not best[1]"),
            "You take the first draft that pays. Another draft or another length may be faster."),
    Mistake("margin forgotten", ("speed >= margin and ", ""),
            "You accept any gain. One that is smaller than the margin isn't worth a draft."),
    Mistake("margin taken off",
            [("speed >= margin and speed", "speed / margin"), ("length, speed", "length, fastest"),
             ("fastest = speed", "fastest = speed / margin")],
            "You divide the speed by the margin. The margin only decides whether a draft pays."),
    Mistake("tokens per millisecond", ("best = name, length, speed", "best = name, length, speed / "
             "passes[1]"),
            "Your third number is in tokens per millisecond. Compare it with plain decoding."),
]  # fmt: skip

BEST_DRAFT = Exercise(
    id="capstone.best_draft",
    points=6,
    beyond=2,
    reference=best_draft,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_margin,
    returns=("draft", "length", "speed"),
    rtol=1e-9,
    explanation="Tokens per second are all tokens divided by all the time, so take the mean of the "
    "tokens and the mean of the time, and divide these. A mean of the speeds would count every "
    "pass alike, though those with a draft take longer. A draft that is often right but rarely "
    "found can lose to one that is always there, and the draft with the best guesses can lose to "
    "one that costs nothing. Where a pass over several tokens is expensive, as on a busy server, "
    "no draft pays, and then plain decoding is the right answer. This reference sets no limit on "
    "the pauses.",
    hints=(
        "In the example, how many tokens does a pass bring on average if n-grams draft two tokens "
        "whenever they find any? And how long does it take on average?",
        "For each draft and length, take the mean tokens of a pass: 1, plus the products of the "
        "chances, which count only when a draft was found. Take the mean time of a pass in the "
        "same way. Their ratio, times the time of a plain pass, is the speed. Keep the best of "
        "those that reach the margin.",
        "`time = found * (passes[n + 1] + n * cost) + (1 - found) * passes[1]` is the mean time of "
        "a pass with drafts of `n` tokens. Its mean tokens are `found * tokens + 1 - found`, where "
        "`tokens` is 1 plus the products of the chances at positions 1 to `n`.",
    ),
)
