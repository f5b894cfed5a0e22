"""Labels of several heads from ragged rows in which texts end."""

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

__all__ = ["ENDS", "NOBODYS", "NOTHING", "SHIFTED_LABELS"]

NOTHING = -100  # what torch's cross entropy leaves out
NOBODYS = 1
ENDS = (2, 3, 5, 6)  # a student's end-of-text token
VOCAB = 8
SHAPES = ((3, 9, 2), (2, 12, 4), (4, 10, 3), (1, 7, 3), (3, 4, 5), (2, 15, 3))  # B, T, K


def shifted_labels(
    tokens: Tensor, counts: Tensor, heads: int, answers: Tensor | None, *, end: int
) -> Tensor:
    """The labels [K, B, T] of K heads, -100 where nothing is to be predicted."""
    del answers
    labels = torch.full((heads, *tokens.shape), -100)
    for b, count in enumerate(counts.tolist()):
        row = tokens[b, :count].tolist()
        for t, head in itertools.product(range(count), range(heads)):
            at = t + 2 + head
            if at < count and end not in row[t:at]:
                labels[head, b, t] = row[at]
    return labels


def _shift(fault: str, head: int, heads: int) -> int:
    return {
        "one early": 1 + head,
        "one late": 3 + head,
        "one shift for all": 2,
        "heads the other way round": 1 + heads - head,
    }.get(fault, 2 + head)


def _shifted(fault: str, tokens: Tensor, shift: int) -> Tensor:
    """The tokens [B, T] moved left by `shift`, by the ways of different mistakes."""
    if fault == "wraps around":
        return tokens.roll(-shift, 1)
    tail = tokens.new_full((tokens.shape[0], shift), NOTHING)
    if fault == "row below":
        flat = torch.cat((tokens.flatten(), tail[0]))
        return flat[shift:].view_as(tokens)
    return torch.cat((tokens, tail), 1)[:, shift:]


def _closed(fault: str, tokens: Tensor, shift: int, end: int) -> Tensor:
    """Where an end-of-text token stands between a state and its label, [B, T]."""
    length = tokens.shape[1]
    ends = (tokens == end).long()
    before = torch.cat((torch.zeros_like(ends[:, :1]), ends.cumsum(1)), 1)  # [B, T + 1]
    places = torch.arange(length)
    first, last = places, places + shift
    if fault == "own token unseen":
        first = places + 1
    if fault == "last token alone":
        first = last - 1
    if fault == "first end for all":
        first = torch.zeros_like(places)
    if fault == "end not predicted":
        last = last + 1
    if fault == "past the end":
        last = first
    return before[:, last.clamp(max=length)] > before[:, first.clamp(max=length)]


def _wrongly(fault: str) -> Callable[..., Tensor]:
    def labels(
        tokens: Tensor, counts: Tensor, heads: int, answers: Tensor | None, *, end: int
    ) -> Tensor:
        del answers
        padding = torch.arange(tokens.shape[1]) >= counts[:, None]
        valid = tokens if fault == "padding counted" else tokens.masked_fill(padding, NOTHING)
        found = []
        for head in range(heads):
            shift = _shift(fault, head, heads)
            closed = _closed(fault, tokens, shift, end)
            found.append(_shifted(fault, valid, shift).masked_fill(closed, NOTHING))
        made = torch.stack(found)
        return made.masked_fill(made == NOTHING, 0) if fault == "filled with 0" else made

    return labels


def _case(draw: torch.Generator, rows: int, length: int, heads: int) -> dict[str, Any]:
    """Rows of different lengths, one of them full; what stands in the padding are tokens too."""
    counts = torch.randint(1, length + 1, (rows,), generator=draw)
    counts[int(torch.randint(rows, (1,), generator=draw))] = length
    tokens = torch.randint(VOCAB, (rows, length), generator=draw)
    return {"tokens": tokens, "counts": counts, "heads": heads, "answers": None}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Any], ...]:
    """Cases that tell all answers apart, whatever a student's end-of-text token is."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        cases = tuple(_case(draw, *shape) for shape in SHAPES)
        if all(_telling(cases, end) for end in (NOBODYS, *ENDS)):
            return cases


def _telling(cases: Sequence[Mapping[str, Any]], end: int) -> bool:
    functions = [shifted_labels, *(_wrongly(name) for name in _HINTS)]
    given = [torch.cat([fn(**case, end=end).flatten() for case in cases]) for fn in functions]
    return not any(torch.equal(one, other) for one, other in itertools.combinations(given, 2))


def _cases(seed: int) -> list[dict[str, Any]]:
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in case.items()
        }
        for case in _drawn(seed)
    ]


def _own_end(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"medusa.shifted_labels:{student}")
    return {"end": chance.choice(ENDS) if student else NOBODYS}


_HINTS = {
    "one early": "Your heads learn one place too early: the first one repeats what the backbone's "
    "own head already says.",
    "one late": "Your heads learn one place too late: nobody predicts the token that the first one "
    "is there for.",
    "one shift for all": "All of your heads learn the same place.",
    "heads the other way round": "Your last head looks the least far ahead, and the first one the "
    "farthest.",
    "wraps around": "At the end of a row your labels are the row's first tokens.",
    "row below": "At the end of a row your labels are the first tokens of the row below it.",
    "padding counted": "Some of your labels stand in the padding. What is written there is no "
    "text, though it may look like it.",
    "past the end": "Your heads predict across the end of a text, out of one and into another.",
    "end not predicted": "None of your labels is the end-of-text token. A head that never learns "
    "it will never propose that a text ends.",
    "own token unseen": "From the state of an end-of-text token you predict the text behind it. "
    "That one knows nothing of it.",
    "last token alone": "You look for the end of the text in one place only, just before the "
    "label. It may stand farther back, between the state and its label.",
    "first end for all": "Behind the first end of a row nothing is predicted with you. Another "
    "text begins there, with labels of its own.",
    "filled with 0": "Where nothing is to be predicted your label is 0. That is a token, and the "
    "heads will learn it.",
}

SHIFTED_LABELS = Exercise(
    id="medusa.shifted_labels",
    reference=shifted_labels,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_end,
    explanation="A state's own token is the last one that it has seen, the backbone's head says "
    "the one behind it, and head 0 starts with the one behind that. A label must stand in the row "
    "and in the same text as the state: no end-of-text token from the state's place up to just "
    "before the label. The end itself is a label like any other, or no draft would ever end. "
    "Farther heads have fewer labels, so each head's loss is a mean over its own. The padding is "
    "told by `counts` alone, as its tokens may be anything. This reference knows no answers.",
)
