"""Make labels for several heads from ragged rows that hold several texts."""

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

NOTHING = -100  # torch's cross entropy ignores this label
NOBODYS = 1
ENDS = (2, 3, 5, 6)  # a student's end-of-text token
VOCAB = 8
SHAPES = ((3, 9, 2), (2, 12, 4), (4, 10, 3), (1, 7, 3), (3, 4, 5), (2, 15, 3))  # B, T, K


def shifted_labels(
    tokens: Tensor, counts: Tensor, heads: int, answers: Tensor | None, *, end: int
) -> Tensor:
    """Return the labels [K, B, T] of K heads, -100 where a head has nothing to predict."""
    del answers
    labels = torch.full((heads, *tokens.shape), -100)
    for b, count in enumerate(counts.tolist()):
        row = tokens[b, :count].tolist()
        for t, head in itertools.product(range(count), range(heads)):
            at = t + 2 + head
            if at < count and end not in row[t:at]:
                labels[head, b, t] = row[at]
    return labels


def _case(draw: torch.Generator, rows: int, length: int, heads: int) -> dict[str, Any]:
    """Draw rows of different lengths, one of them full. The padding holds tokens too."""
    counts = torch.randint(1, length + 1, (rows,), generator=draw)
    counts[int(torch.randint(rows, (1,), generator=draw))] = length
    tokens = torch.randint(VOCAB, (rows, length), generator=draw)
    return {"tokens": tokens, "counts": counts, "heads": heads, "answers": None}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Any], ...]:
    """Draw cases that distinguish all answers for each end-of-text token."""
    draw = torch.Generator().manual_seed(seed)
    functions = [shifted_labels, *(function for function, _ in SHIFTED_LABELS.wrong.values())]
    while True:
        cases = tuple(_case(draw, *shape) for shape in SHAPES)
        if all(_telling(functions, cases, end) for end in (NOBODYS, *ENDS)):
            return cases


def _telling(
    functions: Sequence[Callable[..., Tensor]], cases: Sequence[Mapping[str, Any]], end: int
) -> bool:
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


_MISTAKES = [
    Mistake("one early", ("t + 2 + head", "t + 1 + head"),
            "Your labels are one position too early: the first head repeats what the backbone's "
            "own head already predicts."),
    Mistake("one late", ("t + 2 + head", "t + 3 + head"),
            "Your labels are one position too late: no head predicts the token that the first one "
            "should predict."),
    Mistake("one shift for all", ("t + 2 + head", "t + 2"),
            "All of your heads predict the same position."),
    Mistake("heads the other way round", ("t + 2 + head", "t + 1 + heads - head"),
            "Your last head looks the least far ahead, and your first head the farthest."),
    Mistake("wraps around",
            [("tokens[b, :count]", "tokens[b]"), ("range(count)", "range(len(row))"),
             ("at < count", "at % len(row) < count"), ("row[at]", "row[at % len(row)]")],
            "At the end of a row, your labels are the row's first tokens."),
    Mistake("row below",
            [("row = tokens[b, :count].tolist()",
              "padding = torch.arange(tokens.shape[1]) >= counts[:, None]\n"
              "        valid = tokens.masked_fill(padding, -100)[b:].flatten().tolist()\n"
              "        row = tokens[b].tolist()"),
             ("range(count)", "range(len(row))"), ("at < count", "at < len(valid)"),
             ("row[at]", "valid[at]")],
            "At the end of a row, your labels are the first tokens of the next row."),
    Mistake("padding counted", ("row =", "count = tokens.shape[1]\n        row ="),
            "Some of your labels come from the padding. It isn't text, though it may look like "
            "it."),
    Mistake("past the end", (" and end not in row[t:at]", ""),
            "Your heads predict across the end of a text, from one text into the next."),
    Mistake("end not predicted", ("row[t:at]", "row[t : at + 1]"),
            "None of your labels is the end-of-text token. A head that never learns it will never "
            "propose the end of a text."),
    Mistake("own token unseen", ("row[t:at]", "row[t + 1 : at]"),
            "From the state of an end-of-text token, you predict the next text, about which the "
            "state knows nothing."),
    Mistake("last token alone", ("end not in row[t:at]", "row[at - 1] != end"),
            "You look for the end of the text only just before the label. It may also be farther "
            "back, anywhere between the state and its label."),
    Mistake("first end for all", ("row[t:at]", "row[:at]"),
            "You predict nothing after the first end in a row. Another text begins there, with "
            "labels of its own."),
    Mistake("filled with 0", ("tokens.shape), -100)", "tokens.shape), 0)"),
            "Where there is nothing to predict, your label is 0. That is a token, and the heads "
            "will learn it."),
]  # fmt: skip

SHIFTED_LABELS = Exercise(
    id="medusa.shifted_labels",
    points=6,
    beyond=2,
    reference=shifted_labels,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_end,
    explanation="A state has seen its own token, the backbone's head predicts the next one, and "
    "head 0 predicts the one after that. A label must be in the same row and the same text as the "
    "state: no end-of-text token may occur from the state's position to just before the label. The "
    "end itself is a label like any other; otherwise, no draft would ever end. Heads that look "
    "farther ahead have fewer labels, so each head's loss is a mean over its own labels. Only "
    "`counts` identifies the padding, because its tokens may be anything. This reference ignores "
    "`answers`.",
    hints=(
        "Take the states at positions 0, 1, and 2 of the example. Where is the label of head 0 "
        "for each of them, and where is the `end` in relation to the state and the label?",
        "The label of head i at position t is the token at position `t + 2 + i`. It needs two "
        "conditions: that position is below `counts[b]`, and no `end` is at position t or later "
        "but before the label. The label itself may be the `end`.",
        "`at < counts[b] and end not in tokens[b, t:at].tolist()`, with `at = t + 2 + i`, is true "
        "if head i has a label at position t. The slice contains the state's own token and "
        "leaves the label out.",
    ),
)
