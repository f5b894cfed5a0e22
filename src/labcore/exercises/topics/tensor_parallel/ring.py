"""Play a ring all-reduce on paper: what each rank sends in each step, and what it ends with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["FIRSTS", "NOBODYS", "RING"]

NOBODYS = 1
FIRSTS = (2, 3, 5, 7)  # for numbered students
SHAPES = ((2, 6), (3, 7), (4, 10), (5, 3), (1, 4), (6, 23))  # ranks, numbers
_Answer = tuple[list[Tensor], list[list[Tensor]]]


def ring_all_reduce(tensors: Sequence[Tensor], narrow: bool, *, first: int) -> _Answer:
    """Return each rank's sum, and what each rank sends in each step."""
    del narrow
    ranks = len(tensors)
    held = [[*tensor.tensor_split(ranks)] for tensor in tensors]
    messages = []
    for step in range(2 * (ranks - 1)):
        adds = step < ranks - 1
        chunks = [(rank + first - step) % ranks for rank in range(ranks)]
        messages.append([held[rank][chunk] for rank, chunk in enumerate(chunks)])
        for rank, chunk in enumerate(chunks):
            came, right = messages[-1][rank], (rank + 1) % ranks
            held[right][chunk] = held[right][chunk] + came if adds else came
    return [torch.cat(chunks) for chunks in held], messages


def _whole(tensors: Sequence[Tensor], narrow: bool, *, first: int) -> _Answer:
    """Pass on the whole tensor that arrived last."""
    del narrow, first
    ranks = range(len(tensors))
    messages = [[tensors[rank - step] for rank in ranks] for step in ranks[:-1]]
    return [torch.stack([*tensors]).sum(0)] * len(tensors), messages


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw whole numbers, whose sums are exact: as many as ranks, more, and fewer."""
    draw = torch.Generator().manual_seed(seed)
    cases = []
    for ranks, length in SHAPES:
        numbers = torch.randint(-99, 100, (ranks, length), generator=draw).float()
        cases.append({"tensors": [one.clone() for one in numbers], "narrow": False})
    return cases


def _own_first(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"tensor_parallel.ring:{student}")
    return {"first": chance.choice(FIRSTS) if student else NOBODYS}


RING = Exercise(
    id="tensor_parallel.ring",
    points=6,
    beyond=2,
    reference=ring_all_reduce,
    mistakes=[
        Mistake(
            "mean",
            ("torch.cat(chunks)", "torch.cat(chunks) / ranks"),
            "Your messages are right, and your ranks end with the mean. An all-reduce of summands "
            "has nothing to divide by.",
        ),
        Mistake(
            "reduce-scatter shifted by one",
            ("first - step", "first - step - (step >= ranks - 1)"),
            "Your second half begins with a chunk that the rank has not finished. The last message "
            "of the first half finished another one.",
        ),
        Mistake(
            "one step short",
            ("range(2 * (ranks - 1))", "[*range(ranks - 2), *range(ranks - 1, 2 * ranks - 3)]"),
            "Each half of yours has a step too few: a sum of N summands takes N − 1 messages, "
            "however it travels.",
        ),
        Mistake(
            "first half alone",
            ("range(2 * (ranks - 1))", "range(ranks - 1)"),
            "Your ring stops when each rank has one finished chunk. The others are still to come "
            "to it.",
        ),
        Mistake(
            "second half adds",
            ("step < ranks - 1", "True"),
            "In your second half a rank adds what comes. It is finished, and the own numbers are "
            "in it already.",
        ),
        Mistake(
            "first half replaces",
            ("step < ranks - 1", "False"),
            "In your first half a rank's own numbers get lost under what comes.",
        ),
        Mistake(
            "own numbers alone",
            ("[held[rank]", "[(tensors[rank].tensor_split(ranks) if adds else held[rank])"),
            "In your first half each rank sends its own numbers only. What it has added to them "
            "must travel on, or it never meets the rest.",
        ),
        Mistake(
            "always one chunk",
            ("first - step", "first"),
            "Each of your ranks sends the same chunk in every step.",
        ),
        Mistake(
            "all the same chunk",
            ("rank + first - step", "first - step"),
            "In each step all of your ranks send the chunk of the same number. Then they all wait "
            "for one chunk while the links of the others carry nothing new.",
        ),
        Mistake(
            "to the left",
            [("first - step", "first + step"), ("rank + 1", "rank - 1")],
            "Your messages travel the other way round: to the rank before, while a rank hears from "
            "the one behind it.",
        ),
        Mistake(
            "first unused",
            ("rank + first - step", "rank - step"),
            "Your ranks begin with the chunk of their own number, whatever `first` is.",
        ),
        Mistake(
            "whole tensors",
            _whole,
            "Each of your messages is a whole tensor. That is N − 1 times all bytes, where chunks "
            "need 2 (N − 1) / N times.",
        ),
        Mistake(
            "messages change later",
            [("*tensor.", "*tensor.clone()."), ("chunk] = held", "chunk][:] = held")],
            "Your sums are right. Your messages show what became of their chunks later: they are "
            "views of numbers that you then changed in place.",
        ),
        Mistake(
            "rounded up",
            ("split(ranks)", "split([-(-len(tensor) // ranks) * n for n in range(1, ranks)])"),
            "Your chunks are as long as the rounded up quotient, and the last ones get what is "
            "left. The rule here is another: lengths differ by one at most.",
        ),
        Mistake(
            "rest at the end",
            ("split(ranks)", "split([len(tensor) // ranks * n for n in range(1, ranks)])"),
            "Your last chunk has all that the division leaves over. The first ones take one number "
            "more each.",
        ),
        Mistake(
            "rest left out",
            ("split(ranks)", "split([len(tensor) // ranks * n for n in range(1, ranks + 1)])"),
            "The numbers that the division leaves over belong to none of your chunks and are never "
            "summed.",
        ),
        Mistake(
            "gather in the wrong order",
            (
                "torch.cat(chunks) for chunks in held",
                "torch.cat([chunks[(rank + first + 1 + n) % ranks] for n in range(ranks)])"
                " for rank, chunks in enumerate(held)",
            ),
            "Your chunks are all right, and stand in the order in which a rank got them finished.",
        ),
    ],
    cases=_cases,
    variant=_own_first,
    returns=("sums", "messages"),
    explanation="In step s rank r sends chunk (r + first − s) mod N, so what it got in step s is "
    "what it sends in step s + 1. A chunk starts at one rank, meets all others on its way, and is "
    "whole after N − 1 steps; one formula goes on for the second half, where each rank replaces "
    "instead of adding. Each message is one N-th of the tensor: 2 (N − 1) / N of it leaves each "
    "rank, less than two tensors for any N, while the steps grow with N. Each chunk is summed "
    "once, in its own order, so all ranks end with the same bits. A chunk may be empty; its "
    "message still takes its turn. This reference sends numbers as they are.",
    hints=(
        "Play steps 0 and 1 with 3 ranks on paper, with `first` = 0. Which chunk does rank 1 get "
        "in step 0, and which one does it send in step 1?",
        "From step 1 on, through both halves, a rank sends the chunk that it got in the step "
        "before. In the first half the chunk that comes is added to the rank's own, and in the "
        "second half it replaces the rank's own. Collect all messages of a step before any chunk "
        "changes, and never change a tensor that was sent.",
        "`chunk = (rank + first - step) % len(tensors)` is the chunk that `rank` sends in both "
        "halves, where `step` counts from 0 to 2 (N − 1) − 1. Cut the tensors with "
        "`tensor.tensor_split(len(tensors))`. Add with `+` and not with `+=`: these pieces are "
        "views, so `+=` would change `tensors`.",
    ),
)
