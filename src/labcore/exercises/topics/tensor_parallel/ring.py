"""A ring all-reduce played on paper: what each rank sends in each step, and what it ends with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["FIRSTS", "NOBODYS", "RING"]

NOBODYS = 1
FIRSTS = (2, 3, 5, 7)  # a student's
SHAPES = ((2, 6), (3, 7), (4, 10), (5, 3), (1, 4), (6, 23))  # ranks, numbers
_Answer = tuple[list[Tensor], list[list[Tensor]]]


def ring_all_reduce(tensors: Sequence[Tensor], narrow: bool, *, first: int) -> _Answer:
    """The sum as each rank has it, and for each step what each rank sends."""
    del narrow
    ranks, length = len(tensors), len(tensors[0])
    sizes = [length // ranks + (chunk < length % ranks) for chunk in range(ranks)]
    held = [[*tensor.split(sizes)] for tensor in tensors]
    messages = []
    for step in range(2 * (ranks - 1)):
        chunks = [(rank + first - step) % ranks for rank in range(ranks)]
        messages.append([held[rank][chunk] for rank, chunk in enumerate(chunks)])
        for rank in range(ranks):
            chunk, came = chunks[rank - 1], messages[-1][rank - 1]
            held[rank][chunk] = held[rank][chunk] + came if step < ranks - 1 else came
    return [torch.cat(chunks) for chunks in held], messages


def _sizes(fault: str, length: int, ranks: int) -> list[int]:
    if fault == "rounded up":
        longest = -(-length // ranks)
        return [max(0, min(longest, length - chunk * longest)) for chunk in range(ranks)]
    if fault == "rest at the end":
        return [length // ranks] * (ranks - 1) + [length - length // ranks * (ranks - 1)]
    if fault == "rest left out":
        return [length // ranks] * ranks + [length % ranks]
    return [length // ranks + (chunk < length % ranks) for chunk in range(ranks)]


def _number(fault: str, rank: int, first: int, step: int, ranks: int) -> int:
    """The chunk that a rank sends in a step."""
    if fault == "first unused":
        first = 0
    if fault == "to the left":
        return (rank + first + step) % ranks
    if fault == "all the same chunk":
        return (first - step) % ranks
    if fault == "always one chunk":
        return (rank + first) % ranks
    if fault == "reduce-scatter shifted by one" and step >= ranks - 1:
        return (rank + first - step - 1) % ranks
    return (rank + first - step) % ranks


def _steps(fault: str, ranks: int) -> list[int]:
    if fault == "one step short":
        return [*range(ranks - 2), *range(ranks - 1, 2 * ranks - 3)]
    if fault == "first half alone":
        return [*range(ranks - 1)]
    return [*range(2 * (ranks - 1))]


def _whole(tensors: Sequence[Tensor]) -> _Answer:
    """Each rank sends on the whole tensor that it got last."""
    sums, came, messages = list(tensors), list(tensors), []
    for _ in range(len(tensors) - 1):
        messages.append(came)
        came = [came[rank - 1] for rank in range(len(came))]
        sums = [one + more for one, more in zip(sums, came, strict=True)]
    return [one.clone() for one in sums], messages


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(tensors: Sequence[Tensor], narrow: bool, *, first: int) -> _Answer:
        del narrow
        if fault == "whole tensors":
            return _whole(tensors)
        ranks, length = len(tensors), len(tensors[0])
        own = [[*tensor.split(_sizes(fault, length, ranks))] for tensor in tensors]
        held = [[chunk.clone() for chunk in chunks] for chunks in own]
        messages = []
        for step in _steps(fault, ranks):
            adds = step < ranks - 1
            numbers = [_number(fault, rank, first, step, ranks) for rank in range(ranks)]
            source = own if fault == "own numbers alone" and adds else held
            messages.append([source[rank][chunk] for rank, chunk in enumerate(numbers)])
            if fault == "second half adds":
                adds = True
            if fault == "first half replaces":
                adds = False
            for rank in range(ranks):
                giver = (rank + (1 if fault == "to the left" else -1)) % ranks
                chunk, came = numbers[giver], messages[-1][giver]
                if fault == "messages change later":
                    held[rank][chunk].copy_(held[rank][chunk] + came if adds else came)
                else:
                    held[rank][chunk] = held[rank][chunk] + came if adds else came
        if fault == "gather in the wrong order":
            held = [
                [chunks[(rank + first + 1 + n) % ranks] for n in range(ranks)]
                for rank, chunks in enumerate(held)
            ]
        sums = [torch.cat(chunks) for chunks in held]
        return [one / ranks for one in sums] if fault == "mean" else sums, messages

    return answer


def _cases(seed: int) -> list[dict[str, Any]]:
    """Whole numbers, whose sums have no rounding; as many as ranks, more, and fewer."""
    draw = torch.Generator().manual_seed(seed)
    cases = []
    for ranks, length in SHAPES:
        numbers = torch.randint(-99, 100, (ranks, length), generator=draw).float()
        cases.append({"tensors": [one.clone() for one in numbers], "narrow": False})
    return cases


def _own_first(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"tensor_parallel.ring:{student}")
    return {"first": chance.choice(FIRSTS) if student else NOBODYS}


_HINTS = {
    "mean": "Your messages are right, and your ranks end with the mean. An all-reduce of summands "
    "has nothing to divide by.",
    "reduce-scatter shifted by one": "Your second half begins with a chunk that the rank has not "
    "finished. The last message of the first half finished another one.",
    "one step short": "Each half of yours has a step too few: a sum of N summands takes N − 1 "
    "messages, however it travels.",
    "first half alone": "Your ring stops when each rank has one finished chunk. The others are "
    "still to come to it.",
    "second half adds": "In your second half a rank adds what comes. It is finished, and the own "
    "numbers are in it already.",
    "first half replaces": "In your first half a rank's own numbers get lost under what comes.",
    "own numbers alone": "In your first half each rank sends its own numbers only. What it has "
    "added to them must travel on, or it never meets the rest.",
    "always one chunk": "Each of your ranks sends the same chunk in every step.",
    "all the same chunk": "In each step all of your ranks send the chunk of the same number. Then "
    "they all wait for one chunk while the links of the others carry nothing new.",
    "to the left": "Your messages travel the other way round: to the rank before, while a rank "
    "hears from the one behind it.",
    "first unused": "Your ranks begin with the chunk of their own number, whatever `first` is.",
    "whole tensors": "Each of your messages is a whole tensor. That is N − 1 times all bytes, "
    "where chunks need 2 (N − 1) / N times.",
    "messages change later": "Your sums are right. Your messages show what became of their chunks "
    "later: they are views of numbers that you then changed in place.",
    "rounded up": "Your chunks are as long as the rounded up quotient, and the last ones get what "
    "is left. The rule here is another: lengths differ by one at most.",
    "rest at the end": "Your last chunk has all that the division leaves over. The first ones take "
    "one number more each.",
    "rest left out": "The numbers that the division leaves over belong to none of your chunks and "
    "are never summed.",
    "gather in the wrong order": "Your chunks are all right, and stand in the order in which a "
    "rank got them finished.",
}

RING = Exercise(
    id="tensor_parallel.ring",
    reference=ring_all_reduce,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
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
)
