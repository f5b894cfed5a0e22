"""How many drafted tokens a target keeps, from logits and given uniform numbers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["COUNT_ACCEPTED", "NOBODYS", "TEMPERATURES", "clear_of_ties"]

NOBODYS = 0.8
TEMPERATURES = (0.6, 0.7, 1.25, 1.4)
CASES = 20
LEAST = 1e-4  # between a uniform number and the ratio that it is compared with


def count_accepted(
    target: Tensor, draft: Tensor, tokens: Tensor, u: Tensor, lenience: float, *, temperature: float
) -> int:
    """How many of the N drafted tokens are accepted."""
    del lenience
    p = (target / temperature).softmax(-1)
    q = (draft / temperature).softmax(-1)
    for place, token in enumerate(tokens.tolist()):
        if not u[place] < p[place, token] / q[place, token]:
            return place
    return len(tokens)


def _ratios(target: Tensor, draft: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """p / q of each drafted token, [N]."""
    p = (target[:-1] / temperature).softmax(-1).gather(1, tokens[:, None])[:, 0]
    return p / (draft / temperature).softmax(-1).gather(1, tokens[:, None])[:, 0]


def _leading(accepted: Tensor) -> int:
    return int(accepted.long().cumprod(0).sum())


def _by_ratio(
    fault: str, target: Tensor, draft: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """What a mistake compares the draws with, [N]."""
    warm = {"no temperature": 1.0, "temperature multiplied": 1 / temperature}.get(
        fault, temperature
    )
    p = (target / (1.0 if fault == "temperature on q alone" else warm)).softmax(-1)
    q = (draft / (1.0 if fault == "temperature on p alone" else warm)).softmax(-1)
    rows = p[1:] if fault == "row behind" else p[:-1]
    if fault == "overlap":
        return torch.minimum(rows, q).sum(-1)
    mine = rows.gather(1, tokens[:, None])[:, 0]
    theirs = q.gather(1, tokens[:, None])[:, 0]
    return {
        "upside down": theirs / mine,
        "p alone": mine,
        "logarithm": mine.log() - theirs.log(),
    }.get(fault, mine / theirs)


def _wrongly(fault: str) -> Callable[..., int]:
    def counted(
        target: Tensor,
        draft: Tensor,
        tokens: Tensor,
        u: Tensor,
        lenience: float,
        *,
        temperature: float,
    ) -> int:
        del lenience
        if fault == "greedy":
            return _leading(target[:-1].argmax(-1) == tokens)
        ratios = _by_ratio(fault, target, draft, tokens, temperature)
        draws = u[:1].expand_as(u) if fault == "one draw for all" else u
        accepted = draws < ratios
        if fault == "at most":
            accepted = draws <= ratios
        if fault == "larger accepts":
            accepted = draws > ratios
        if fault == "no draw":
            accepted = ratios >= 1
        if fault == "past the first rejection":
            return int(accepted.sum())
        if fault == "to the last acceptance":
            return int((accepted * torch.arange(1, len(u) + 1)).max())
        counted = _leading(accepted)
        return min(counted + 1, len(u)) if fault == "rejected one counted" else counted

    return counted


def clear_of_ties(case: Mapping[str, Any], temperature: float, lenience: float = 1.0) -> bool:
    """Whether no draw stands so close to its ratio that rounding could decide."""
    ratios = _ratios(case["target"], case["draft"], case["tokens"], temperature) / lenience
    gaps = (ratios - case["u"]).abs()
    return bool(((gaps > LEAST) | (ratios == 0)).all())


def _case(draw: torch.Generator, place: int) -> dict[str, Tensor]:
    """A draft that resembles the target, its tokens drawn from it, some outside the target's k."""
    drafted, vocab = 5 + place % 4, 6 + place % 3
    target = 1.8 * torch.randn(drafted + 1, vocab, generator=draw, dtype=torch.float64)
    noise = torch.randn(drafted, vocab, generator=draw, dtype=torch.float64)
    draft = target[:-1] + 0.8 * noise
    tokens = torch.multinomial((1.2 * draft).softmax(-1), 1, generator=draw)[:, 0]
    u = torch.rand(drafted, generator=draw, dtype=torch.float64)
    if place % 4 == 3:
        # The target's top-k has left a token out, and a uniform number may be 0.
        out = 1 + place % 3
        target[out, tokens[out]] = -torch.inf
        u[out] = 0.0
        u[:out] *= 0.2
    return {"target": target, "draft": draft, "tokens": tokens, "u": u}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Tensor], ...]:
    """Cases that tell all answers apart at each temperature a student may have."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        cases = tuple(_case(draw, place) for place in range(CASES))
        if all(_telling(cases, temperature) for temperature in (NOBODYS, *TEMPERATURES)):
            return cases


def _telling(cases: Sequence[Mapping[str, Any]], temperature: float) -> bool:
    if not all(clear_of_ties(case, temperature) for case in cases):
        return False
    functions = [count_accepted, *(_wrongly(name) for name in _HINTS)]
    given = [
        tuple(fn(**case, lenience=1.0, temperature=temperature) for case in cases)
        for fn in functions
    ]
    return all(one != other for one, other in itertools.combinations(given, 2))


def _cases(seed: int) -> list[dict[str, Any]]:
    return [
        {**{name: value.clone() for name, value in case.items()}, "lenience": 1.0}
        for case in _drawn(seed)
    ]


def _own_temperature(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"speculative.count_accepted:{student}")
    return {"temperature": chance.choice(TEMPERATURES) if student else NOBODYS}


_HINTS = {
    "at most": "A token that the target gives no probability gets through with you when its "
    "uniform number is 0. Numbers from [0, 1) do contain the 0.",
    "upside down": "You divide the draft's probability by the target's. A token that the target "
    "likes more than the draft does is then the one that is thrown away.",
    "past the first rejection": "You count accepted tokens behind a rejected one. They continue a "
    "text that is not going to be written.",
    "to the last acceptance": "You count up to the last token that would be accepted, with the "
    "rejected ones before it. What stands behind a rejected token continues another text.",
    "rejected one counted": "You count the rejected token too.",
    "greedy": "You accept a token if it is the target's likeliest. That is the rule for greedy "
    "output; of a sampled one it makes a greedy one.",
    "larger accepts": "You accept where the draw is above the ratio, so that what the target likes "
    "least gets through most often.",
    "p alone": "You compare the draw with the target's probability alone. It counts how often the "
    "draft proposes the token: one that the draft proposes rarely must not be rejected as well.",
    "no draw": "You accept exactly the tokens that the target likes at least as much as the draft "
    "does, whatever the draw is. The others then never come, though some of them should.",
    "one draw for all": "Your tokens share the first draw. Each decision needs a number of its "
    "own, or they depend on each other.",
    "row behind": "You judge each token by the row behind it: that is what follows the token, not "
    "what the target thought of it.",
    "logarithm": "You compare the draw with the logarithm of the ratio, which is below 0 wherever "
    "the ratio is below 1.",
    "overlap": "You compare the draw with what the two distributions have in common. That is how "
    "often a token is accepted on average; this token has a ratio of its own.",
    "temperature on p alone": "The temperature changes your target's probabilities and not your "
    "draft's. The tokens were drawn from a draft with the temperature.",
    "temperature on q alone": "The temperature changes your draft's probabilities and not your "
    "target's. The text is to come from a target with the temperature.",
    "no temperature": "Your probabilities are those of temperature 1.",
    "temperature multiplied": "You multiply the logits by the temperature, so that a high one "
    "makes the likely tokens likelier.",
}

COUNT_ACCEPTED = Exercise(
    id="speculative.count_accepted",
    reference=count_accepted,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_temperature,
    explanation="A token x that the draft proposes with probability q(x) and that passes with "
    "min(1, p(x) / q(x)) comes out with min(p(x), q(x)): never more often than the target wants, "
    "and the rest is made up by the residual. A draw below the ratio passes, so that a ratio of 0 "
    "never does and a ratio of 1 always does, as the draws are in [0, 1). The minimum with 1 is "
    "in the proof and not in the program: no draw is above 1. What follows a rejected token was "
    "drafted for another text. This reference knows no lenience.",
)
