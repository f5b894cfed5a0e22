"""How many drafted tokens a target accepts, from logits and given uniform draws."""

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
LEAST = 1e-4  # the smallest distance between a uniform draw and its ratio


def count_accepted(
    target: Tensor, draft: Tensor, tokens: Tensor, u: Tensor, lenience: float, *, temperature: float
) -> int:
    """How many of the N drafted tokens are accepted."""
    del lenience
    p = (target / temperature).softmax(-1)
    q = (draft / temperature).softmax(-1)
    positions = torch.arange(len(tokens))
    ratios = p[positions, tokens] / q[positions, tokens]
    accepted = u < ratios
    # The running product is 0 from the first rejection on.
    return int(accepted.long().cumprod(0).sum())


def _ratios(target: Tensor, draft: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """p / q of each drafted token, [N]."""
    p = (target[:-1] / temperature).softmax(-1).gather(1, tokens[:, None])[:, 0]
    return p / (draft / temperature).softmax(-1).gather(1, tokens[:, None])[:, 0]


def clear_of_ties(case: Mapping[str, Any], temperature: float, lenience: float = 1.0) -> bool:
    """Whether each draw is so far from its ratio that rounding cannot decide."""
    ratios = _ratios(case["target"], case["draft"], case["tokens"], temperature) / lenience
    gaps = (ratios - case["u"]).abs()
    return bool(((gaps > LEAST) | (ratios == 0)).all())


def _case(draw: torch.Generator, number: int) -> dict[str, Tensor]:
    """A draft that resembles the target. Every fourth target excludes a drafted token."""
    drafted, vocab = 5 + number % 4, 6 + number % 3
    target = 1.8 * torch.randn(drafted + 1, vocab, generator=draw, dtype=torch.float64)
    noise = torch.randn(drafted, vocab, generator=draw, dtype=torch.float64)
    draft = target[:-1] + 0.8 * noise
    tokens = torch.multinomial((1.2 * draft).softmax(-1), 1, generator=draw)[:, 0]
    u = torch.rand(drafted, generator=draw, dtype=torch.float64)
    if number % 4 == 3:
        # The target's top-k excludes a drafted token, and its draw is 0.
        out = 1 + number % 3
        target[out, tokens[out]] = -torch.inf
        u[out] = 0.0
        u[:out] *= 0.2
    return {"target": target, "draft": draft, "tokens": tokens, "u": u}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Tensor], ...]:
    """Cases that distinguish all answers at every student's temperature."""
    draw = torch.Generator().manual_seed(seed)
    functions = [count_accepted, *(fn for fn, _ in COUNT_ACCEPTED.wrong.values())]
    while True:
        cases = tuple(_case(draw, number) for number in range(CASES))
        if all(_telling(functions, cases, temperature) for temperature in (NOBODYS, *TEMPERATURES)):
            return cases


def _telling(
    functions: Sequence[Callable[..., int]], cases: Sequence[Mapping[str, Any]], temperature: float
) -> bool:
    if not all(clear_of_ties(case, temperature) for case in cases):
        return False
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


_MISTAKES = [
    Mistake("at most", ("u < ratios", "u <= ratios"),
            "You accept a token to which the target gives no probability if its draw is 0. Draws "
            "from [0, 1) can be 0."),
    Mistake("upside down",
            ("p[positions, tokens] / q[positions, tokens]",
             "q[positions, tokens] / p[positions, tokens]"),
            "You divide the draft's probability by the target's. You then reject the tokens that "
            "the target likes more than the draft does."),
    Mistake("past the first rejection", (".long().cumprod(0)", ""),
            "You count accepted tokens after a rejected one. They continue a text that won't be "
            "written."),
    Mistake("to the last acceptance",
            ("accepted.long().cumprod(0).sum()", "max([0, *accepted * (positions + 1)])"),
            "You count up to the last token that passes, including the rejected ones before it. "
            "What follows a rejected token continues a different text."),
    Mistake("rejected one counted", (".sum()", ".sum().add(1).clamp(max=len(u))"),
            "You count the rejected token too."),
    Mistake("greedy", ("u < ratios", "target[:-1].argmax(-1) == tokens"),
            "You accept a token if it is the target's most likely one. That rule is for greedy "
            "output; it makes sampled output greedy."),
    Mistake("larger accepts", ("u < ratios", "u > ratios"),
            "You accept a token if the draw is above the ratio. The tokens that the target likes "
            "least then pass most often."),
    Mistake("p alone", (" / q[positions, tokens]", ""),
            "You compare the draw with the target's probability alone. The draft's probability "
            "matters too: a token that the draft rarely proposes must not also be rejected often."),
    Mistake("no draw", ("u < ratios", "ratios >= 1"),
            "You ignore the draw and accept exactly the tokens that the target likes at least as "
            "much as the draft does. The others then never pass, though some of them should."),
    Mistake("one draw for all", ("u < ratios", "u[:1] < ratios"),
            "All your tokens share the first draw. Each decision needs its own draw, or the "
            "decisions depend on each other."),
    Mistake("next row", ("p[positions, tokens]", "p[positions + 1, tokens]"),
            "You judge each token by the next row. That row predicts what follows the token, not "
            "the token itself."),
    Mistake("logarithm", ("u < ratios", "u < ratios.log()"),
            "You compare the draw with the logarithm of the ratio, which is negative wherever the "
            "ratio is below 1."),
    Mistake("overlap",
            ("p[positions, tokens] / q[positions, tokens]", "torch.minimum(p[:-1], q).sum(-1)"),
            "You compare the draw with the overlap of the two distributions. That is the "
            "acceptance rate averaged over all tokens; each token has its own ratio."),
    Mistake("temperature on p alone", ("draft / temperature", "draft"),
            "You apply the temperature to the target but not to the draft. The tokens were drawn "
            "from the draft at this temperature."),
    Mistake("temperature on q alone", ("target / temperature", "target"),
            "You apply the temperature to the draft but not to the target. The text should follow "
            "the target at this temperature."),
    Mistake("no temperature", ("del lenience", "temperature = 1.0"),
            "Your probabilities are those of temperature 1."),
    Mistake("temperature multiplied", ("del lenience", "temperature = 1 / temperature"),
            "You multiply the logits by the temperature, so a high temperature makes likely "
            "tokens even likelier."),
]  # fmt: skip

COUNT_ACCEPTED = Exercise(
    id="speculative.count_accepted",
    points=6,
    beyond=2,
    reference=count_accepted,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_temperature,
    explanation="A token x that the draft proposes with probability q(x) and that is accepted with "
    "probability min(1, p(x) / q(x)) appears with probability min(p(x), q(x)): never more often "
    "than under the target. The residual adds the rest. A draw below the ratio passes, and the "
    "draws are in [0, 1), so a ratio of 0 never passes and a ratio of 1 always does. The minimum "
    "with 1 is needed in the proof but not in the program, because every draw is below 1. What "
    "follows a rejected token was drafted for a different text. This reference ignores lenience.",
    hints=(
        "In the example, change the first draw from 0.3 to 0.6. How many tokens are accepted now? "
        "Then ask whether a token whose target logit is −inf can pass if its draw is 0.",
        "Divide both sets of logits by `temperature` before the softmax. For token i, take the "
        "entry at `tokens[i]` from row i of both distributions. The token passes if its draw is "
        "strictly below p / q, and you count the passes up to the first rejection.",
        "`(u < ratios).long().cumprod(0).sum()` counts the tokens before the first rejection, "
        "because the running product is 0 from there on. `ratios` holds p / q of the drafted "
        "tokens, and p comes from `target[:-1]`. Return the count as an int.",
    ),
)
